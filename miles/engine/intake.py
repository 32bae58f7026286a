"""Turns a request into a live one, or says in one sentence why it can never be served."""

from __future__ import annotations

import numpy as np

from miles.engine.request import LiveRequest, StopSets
from miles.model.spec import ModelSpec
from miles.text.detokenize import Detokenizer
from miles.text.tokenizer import Tokenizer
from miles.types import GenerationRequest


class Intake:
    """Checks requests against the model's context and the cache. Without a tokenizer answers have no text and stop
    strings are refused."""

    def __init__(self, spec: ModelSpec, *, tokenizer: Tokenizer | None, stop_sets: StopSets, cache_tokens: int) -> None:
        self._spec, self._tokenizer, self._stop_sets = spec, tokenizer, stop_sets
        self._cache_tokens = cache_tokens
        self._num_accepted = 0

    def accept(self, request: GenerationRequest) -> tuple[LiveRequest, str | None]:
        """The live request, and the reason to refuse it."""
        sampling, prompt = request.sampling, np.array(request.prompt_ids, dtype=np.int64)
        live = LiveRequest(
            request=request,
            order=self._num_accepted,
            prompt=prompt,
            prompt_key=prompt.tobytes(),
            limit=min(len(prompt) + sampling.max_new_tokens, self._spec.max_position_embeddings),
            stop_set=self._stop_sets.row_for(sampling.stop_token_ids, ignore_eos=sampling.ignore_eos),
        )
        self._num_accepted += 1
        refusal = self._refusal(live)
        if refusal is None:
            if self._tokenizer is not None:
                live.detokenizer = Detokenizer(
                    self._tokenizer, sampling.stop, skip_special_tokens=sampling.skip_special_tokens
                )
            if sampling.return_kept_tokens and sampling.cuts_tokens:
                live.kept = []
            if sampling.num_top_log_probs > 0:
                live.top = []
        return live, refusal

    def _refusal(self, live: LiveRequest) -> str | None:
        sampling, num_prompt = live.request.sampling, len(live.prompt)
        context, vocab_size = self._spec.max_position_embeddings, self._spec.vocab_size
        if num_prompt == 0:
            return "the prompt is empty: it needs at least one token"
        if live.prompt.min() < 0 or live.prompt.max() >= vocab_size:
            return (
                f"the prompt has token ids from {live.prompt.min()} to {live.prompt.max()} but the model knows 0 to "
                f"{vocab_size - 1}: use the tokenizer of --hf-checkpoint"
            )
        if sampling.max_new_tokens < 1:
            return f"max_new_tokens is {sampling.max_new_tokens}: at least 1 is needed (--rollout-max-response-len)"
        if num_prompt >= context:
            return (
                f"a prompt of {num_prompt} tokens leaves no room for an answer in the model's context of {context} "
                "tokens: shorten it, or leave such prompts out with --rollout-max-prompt-len"
            )
        if live.limit > self._cache_tokens:
            return (
                f"a prompt of {num_prompt} tokens with up to {live.limit - num_prompt} new ones can need {live.limit} "
                f"tokens of KV cache but it holds {self._cache_tokens}: raise --engine-max-total-tokens, or lower "
                "--rollout-max-response-len"
            )
        if not 0.0 <= sampling.temperature < float("inf"):
            return f"the temperature is {sampling.temperature}: it must be 0 (greedy) or a positive number"
        if not (0.0 < sampling.top_p <= 1.0 and 0.0 <= sampling.min_p <= 1.0):
            return f"top_p is {sampling.top_p} and min_p is {sampling.min_p}: they must lie in (0, 1] and [0, 1]"
        if sampling.stop and self._tokenizer is None:
            return "stop strings need a tokenizer and this engine has none; stop_token_ids work without"
        return None
