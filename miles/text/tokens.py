"""The tokens of an answer of several turns: only ever appended to, so that what is trained on is what was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from miles.errors import DataError
from miles.text.tokenizer import Tokenizer
from miles.types import GenerationResult, Sample

_MARK = "MILES-END-OF-ANSWER-7f3a"
_NEVER = -1e4  # log-prob of tokens that stand for none


class TokenLog:
    """Prompt and response of a sample. The model's tokens come with all that the engine knows of them; given ones (what
    tools wrote) have the mask 0, the log-prob 0 and the version of the token before."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        sample.loss_mask = sample.loss_mask or []
        sample.rollout_log_probs = sample.rollout_log_probs or []
        sample.weight_versions = sample.weight_versions or []

    @property
    def ids(self) -> list[int]:
        return self._sample.tokens

    def append_written(self, result: GenerationResult) -> None:
        """Tokens that the model drew."""
        count = len(result.output_ids)
        self._extend(result.output_ids, [1] * count, result.log_probs, result.weight_versions)
        self._extend_arrays("kept_token_ids", result.kept_token_ids)
        self._extend_arrays("top_token_ids", result.top_token_ids)
        self._extend_arrays("top_log_probs", result.top_log_probs)
        self._sample.cached_tokens += result.cached_tokens

    def append_given(self, ids: Sequence[int]) -> None:
        """Tokens that the model reads and did not write."""
        sample, count = self._sample, len(ids)
        assert sample.weight_versions, "an answer begins with tokens of the model"
        self._extend(ids, [0] * count, [0.0] * count, [sample.weight_versions[-1]] * count)
        if sample.kept_token_ids is not None:
            self._extend_arrays("kept_token_ids", [np.array([token_id], dtype=np.int32) for token_id in ids])
        if sample.top_token_ids is not None and sample.top_log_probs is not None:
            width = len(sample.top_token_ids[0])
            self._extend_arrays("top_token_ids", [np.arange(width, dtype=np.int32)] * count)
            self._extend_arrays("top_log_probs", [np.full(width, _NEVER, dtype=np.float32)] * count)

    def _extend(self, ids: Sequence[int], mask: list[int], log_probs: Sequence[float], versions: Sequence[int]) -> None:
        sample = self._sample
        sample.tokens = [*sample.tokens, *ids]
        sample.response_length += len(ids)
        sample.loss_mask = [*(sample.loss_mask or []), *mask]
        sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *log_probs]
        sample.weight_versions = [*(sample.weight_versions or []), *versions]

    def _extend_arrays(self, name: str, arrays: Sequence[np.ndarray] | None) -> None:
        if arrays is not None:
            setattr(self._sample, name, [*(getattr(self._sample, name) or []), *arrays])


def following_text(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], *, written_end: str) -> str:
    """What the chat template puts behind an answer that the model ended with `written_end`: these messages and the
    beginning of the next answer. What stands before is never rendered again, so a template that drops old thinking
    changes nothing. Raises `DataError` when the template leaves a message out."""
    answer: list[dict[str, Any]] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    _, found, after = tokenizer.render([*answer, *messages]).rpartition(_MARK)
    if not found or not all(str(message["content"]).strip() in after for message in messages):
        roles = ", ".join(sorted({message["role"] for message in messages}))
        raise DataError(
            f"the chat template does not show messages of the role {roles}: give one with --chat-template-path"
        )
    return after.removeprefix(written_end)


def following_ids(tokenizer: Tokenizer, last_id: int, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Ids of `following_text` behind an answer whose last token is `last_id`."""
    ends_turn = last_id in tokenizer.eos_token_ids
    written_end = tokenizer.decode([last_id], skip_special_tokens=False) if ends_turn else ""
    return tokenizer.encode(following_text(tokenizer, messages, written_end=written_end))


def keeps_thinking(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]]) -> bool:
    """Whether the chat template still shows the thinking of an answer when these messages follow it."""
    thought: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": f"<think>\n{_MARK}\n</think>\n\n!"},
    ]
    return _MARK in tokenizer.render([*thought, *messages])
