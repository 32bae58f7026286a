"""One prompt, one answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from miles.rollout.client import EngineClient
from miles.types import PER_TOKEN, FinishReason, Sample, SampleStatus, SamplingParams

STATUS = {
    FinishReason.STOP: SampleStatus.COMPLETED,
    FinishReason.LENGTH: SampleStatus.TRUNCATED,
    FinishReason.ABORT: SampleStatus.ABORTED,
    FinishReason.ERROR: SampleStatus.FAILED,
}


async def generate(
    client: EngineClient, sample: Sample, sampling: SamplingParams, *, noise_key: int, max_context_len: int
) -> str | None:
    """Write the answer to `sample.tokens` into the sample, as long as `sampling` and the context allow. Returns why
    that failed, or None. An answer that was cut off goes on behind its tokens with the same noise; one that has ended
    stays as it is."""
    if sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.FAILED):
        return None
    drop_stop_beginning(sample, sampling.stop)
    room = min(max_context_len - len(sample.tokens), sampling.max_new_tokens - sample.response_length)
    if room < 1:  # `load_prompts` refuses such prompts, a data source of the user may give one
        sample.status = SampleStatus.FAILED
        return f"its {len(sample.tokens)} tokens leave no room for an answer in a context of {max_context_len}"
    sampling = dataclasses.replace(sampling, max_new_tokens=room)
    result = await client.generate(sample.tokens, sampling, noise_key=noise_key)
    sample.tokens = [*sample.tokens, *result.output_ids]
    sample.response_length += len(result.output_ids)
    is_whole = sample.response_length == len(result.output_ids)
    sample.response = result.text if is_whole else client.text_of(sample.tokens[sample.prompt_length :], sampling)
    sample.loss_mask = [*(sample.loss_mask or []), *([1] * len(result.output_ids))]
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *result.log_probs]
    sample.weight_versions = [*(sample.weight_versions or []), *result.weight_versions]
    sample.kept_token_ids = _joined(sample.kept_token_ids, result.kept_token_ids)
    sample.top_token_ids = _joined(sample.top_token_ids, result.top_token_ids)
    sample.top_log_probs = _joined(sample.top_log_probs, result.top_log_probs)
    sample.cached_tokens += result.cached_tokens
    sample.status = STATUS[result.finish_reason]
    return (result.error or "no reason given") if sample.status is SampleStatus.FAILED else None


def drop_stop_beginning(sample: Sample, stop: Sequence[str], *, first: int = 0) -> None:
    """Let go of the last tokens of a cut-off answer, as many as a stop string can have: the engine looks for stop
    strings in what it writes itself. The noise is by position, so nothing is drawn twice. Response tokens before
    `first` stay."""
    count = min(sample.response_length - first, max((len(text.encode()) for text in stop), default=0))
    if count == 0:
        return
    sample.tokens = sample.tokens[:-count]
    sample.response_length -= count
    for name in PER_TOKEN:
        values = getattr(sample, name)
        setattr(sample, name, values and values[:-count])


def _joined(before: list[np.ndarray] | None, after: list[np.ndarray] | None) -> list[np.ndarray] | None:
    return after if before is None else [*before, *(after or [])]
