"""The evaluation sets of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from miles.config.sections import RunConfig
from miles.data.prompts import LabelCheck, PromptFlags, PromptSet, load_prompts
from miles.errors import ConfigError
from miles.evals.eval_config import SetSettings, read_eval_config
from miles.plugins import load_function
from miles.rollout.producer import rollout_sampling
from miles.text.tokenizer import Tokenizer
from miles.types import SamplingParams


@dataclass(frozen=True, slots=True)
class EvalSuite:
    """A set with how it is answered."""

    name: str
    data: PromptSet
    sampling: SamplingParams
    num_answers: int


def load_suites(
    config: RunConfig, tokenizer: Tokenizer, *, max_context_len: int, check_label: LabelCheck | None
) -> list[EvalSuite]:
    """Load the pairs NAME FILE of `--eval-prompt-data` and the sets of `--eval-config`. Raises what `load_prompts`
    raises."""
    pairs = config.eval.eval_prompt_data
    assert len(pairs) % 2 == 0, "the rules of the config ask for pairs"
    sets = [SetSettings(name, file) for name, file in zip(pairs[::2], pairs[1::2], strict=True)]
    source = "--eval-prompt-data"
    if config.eval.eval_config is not None:
        sets, source = [*sets, *read_eval_config(config.eval.eval_config)], "--eval-config"
    names = [one.name for one in sets]
    if len(set(names)) < len(names):
        raise ConfigError(f"--eval-prompt-data and --eval-config give two sets the same name: {' '.join(names)}")
    return [
        _load(one, config, tokenizer, max_context_len=max_context_len, check_label=check_label, source=source)
        for one in sets
    ]


def _load(
    one: SetSettings,
    config: RunConfig,
    tokenizer: Tokenizer,
    *,
    max_context_len: int,
    check_label: LabelCheck | None,
    source: str,
) -> EvalSuite:
    if "/" in one.name or not one.name.strip():
        raise ConfigError(f"{source} {one.name!r} {one.path}: a set's name is part of metric names; use no slash")
    data = dataclasses.replace(
        config.data,
        prompt_data=one.path,
        input_key=one.input_key or config.eval.eval_input_key or config.data.input_key,
        label_key=one.label_key or config.eval.eval_label_key or config.data.label_key,
        tool_key=one.tool_key or config.data.tool_key,
        metadata_key=one.metadata_key or config.data.metadata_key,
    )
    flags = PromptFlags(
        file=f"--eval-prompt-data {one.name}",
        input_key="--eval-input-key" if config.eval.eval_input_key else "--input-key",
        label_key="--eval-label-key" if config.eval.eval_label_key else "--label-key",
    )
    overrides = {**one.metadata_overrides, **({"rm_type": one.rm_type} if one.rm_type is not None else {})}
    check = None if check_label is None else lambda label, metadata: check_label(label, {**metadata, **overrides})
    loaded = load_prompts(
        data,
        tokenizer,
        max_context_len=max_context_len,
        max_prompt_len=config.rollout.rollout_max_prompt_len,
        check_label=check,
        hooks=config.hooks,
        flags=flags,
    )
    writer, prompts = one.custom_generate_function_path, list(loaded.prompts)
    if writer is not None:  # found wrong before the run
        load_function(writer, flag=f"{source}, set {one.name}, custom_generate_function_path")
    for sample in prompts:
        sample.metadata |= overrides
        sample.generate_function_path = writer
    sampling = _changed(
        eval_sampling(config), max_new_tokens=one.max_response_len, temperature=one.temperature, top_p=one.top_p,
        top_k=one.top_k, stop=one.stop, stop_token_ids=one.stop_token_ids,
    )  # fmt: skip
    num_answers = one.n_samples_per_eval_prompt or config.eval.n_samples_per_eval_prompt
    return EvalSuite(one.name, dataclasses.replace(loaded, prompts=prompts), sampling, num_answers)


def eval_sampling(config: RunConfig) -> SamplingParams:
    """How evaluation answers are drawn: the `--eval-...` flags, else those of the rollout."""
    ours = config.eval
    return _changed(
        rollout_sampling(config), max_new_tokens=ours.eval_max_response_len, temperature=ours.eval_temperature,
        top_p=ours.eval_top_p, top_k=ours.eval_top_k, return_kept_tokens=False, num_top_log_probs=0,
    )  # fmt: skip


def _changed(sampling: SamplingParams, **values: Any) -> SamplingParams:
    """With those values that are not None."""
    return dataclasses.replace(sampling, **{name: value for name, value in values.items() if value is not None})
