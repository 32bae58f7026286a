"""One prompt, one answer."""

from __future__ import annotations

import dataclasses

from miles.rollout.client import EngineClient
from miles.types import FinishReason, GenerationResult, Sample, SampleStatus, SamplingParams

_STATUS = {
    FinishReason.STOP: SampleStatus.COMPLETED,
    FinishReason.LENGTH: SampleStatus.TRUNCATED,
    FinishReason.ABORT: SampleStatus.ABORTED,
    FinishReason.ERROR: SampleStatus.FAILED,
}


async def generate(
    client: EngineClient, sample: Sample, sampling: SamplingParams, *, noise_key: int, max_context_len: int
) -> GenerationResult:
    """Write the answer to `sample.tokens` into the sample, as long as `sampling` and the context allow."""
    room = max_context_len - len(sample.tokens)
    assert room > 0, "load_prompts refuses prompts that fill the context"
    if room < sampling.max_new_tokens:
        sampling = dataclasses.replace(sampling, max_new_tokens=room)
    result = await client.generate(sample.tokens, sampling, noise_key=noise_key)
    sample.tokens = [*sample.tokens, *result.output_ids]
    sample.response = result.text
    sample.response_length = len(result.output_ids)
    sample.loss_mask = [1] * len(result.output_ids)
    sample.rollout_log_probs = result.log_probs
    sample.weight_versions = result.weight_versions
    sample.kept_token_ids = result.kept_token_ids
    sample.top_token_ids, sample.top_log_probs = result.top_token_ids, result.top_log_probs
    sample.cached_tokens = result.cached_tokens
    sample.status = _STATUS[result.finish_reason]
    return result
