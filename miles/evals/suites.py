"""The evaluation sets of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

from miles.config.sections import RunConfig
from miles.data.prompts import LabelCheck, PromptFlags, PromptSet, load_prompts
from miles.errors import ConfigError
from miles.text.tokenizer import Tokenizer
from miles.types import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EvalSuite:
    name: str
    data: PromptSet


def load_suites(
    config: RunConfig, tokenizer: Tokenizer, *, max_context_len: int, check_label: LabelCheck | None
) -> list[EvalSuite]:
    """Load the pairs NAME FILE of `--eval-prompt-data`. Raises what `load_prompts` raises."""
    pairs = config.eval.eval_prompt_data
    assert len(pairs) % 2 == 0, "the rules of the config ask for pairs"
    suites = []
    for name, file in zip(pairs[::2], pairs[1::2], strict=True):
        if "/" in name or not name.strip():
            raise ConfigError(f"--eval-prompt-data {name!r} {file}: a set's name is part of metric names; use no slash")
        data = dataclasses.replace(
            config.data,
            prompt_data=file,
            input_key=config.eval.eval_input_key or config.data.input_key,
            label_key=config.eval.eval_label_key or config.data.label_key,
        )
        flags = PromptFlags(
            file=f"--eval-prompt-data {name}",
            input_key="--eval-input-key" if config.eval.eval_input_key else "--input-key",
            label_key="--eval-label-key" if config.eval.eval_label_key else "--label-key",
        )
        loaded = load_prompts(
            data,
            tokenizer,
            max_context_len=max_context_len,
            max_prompt_len=config.rollout.rollout_max_prompt_len,
            check_label=check_label,
            flags=flags,
        )
        suites.append(EvalSuite(name, loaded))
    return suites


def eval_sampling(config: RunConfig) -> SamplingParams:
    """How evaluation answers are drawn: the `--eval-...` flags, else those of the rollout."""
    ours, rollout = config.eval, config.rollout
    return SamplingParams(
        max_new_tokens=_first(ours.eval_max_response_len, rollout.rollout_max_response_len),
        temperature=_first(ours.eval_temperature, rollout.rollout_temperature),
        top_p=_first(ours.eval_top_p, rollout.rollout_top_p),
        top_k=_first(ours.eval_top_k, rollout.rollout_top_k),
        min_p=rollout.rollout_min_p,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
        skip_special_tokens=rollout.rollout_skip_special_tokens,
    )


def _first(value: T | None, default: T) -> T:
    return default if value is None else value
