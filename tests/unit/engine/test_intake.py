"""Requests that can never be served end with one clear sentence and disturb nobody."""

from __future__ import annotations

from typing import Any

import pytest

from miles.types import FinishReason
from tests.unit.engine.tiny import assert_all_free, make_core, make_model, request, run_all

MODEL = make_model()

REFUSED = {
    "empty": ([], 5, {}, "prompt is empty"),
    "vocabulary": ([3, 37], 5, {}, "ids from 3 to 37 but the model knows 0 to 36.*--hf-checkpoint"),
    "negative id": ([-1, 3], 5, {}, "ids from -1 to 3"),
    "context": ([3] * 96, 5, {}, "prompt of 96 tokens.*context of 96 tokens.*--rollout-max-prompt-len"),
    "cache": ([3] * 20, 30, {}, "prompt of 20 tokens.*50 tokens of KV cache.*holds 48.*--engine-max-total-tokens"),
    "nothing wanted": ([3], 0, {}, "max_new_tokens is 0"),
    "temperature": ([3], 5, {"temperature": -0.5}, "temperature is -0.5"),
    "temperature nan": ([3], 5, {"temperature": float("nan")}, "temperature is nan"),
    "top_p": ([3], 5, {"top_p": 0.0}, "top_p is 0.0"),
    "min_p": ([3], 5, {"min_p": 1.5}, "min_p is 1.5"),
    "stop": ([3], 5, {"stop": ("x",)}, "stop strings need a tokenizer"),
}


@pytest.mark.parametrize(("prompt", "length", "sampling", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(prompt: list[int], length: int, sampling: dict[str, Any], message: str) -> None:
    core = make_core(MODEL, engine_max_total_tokens=48)
    core.add([request(0, [3, 4], 2), request(1, prompt, length, **sampling), request(2, [3, 4], 2)])
    results = run_all(core)
    assert results[1].finish_reason is FinishReason.ERROR
    assert results[1].output_ids == []
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(results[1].error)
    assert results[0].error is results[2].error is None
    assert core.stats()["failed"] == 1
    assert_all_free(core)


def test_the_largest_request_that_fits_is_served() -> None:
    core = make_core(MODEL, engine_max_total_tokens=48)
    core.add([request(0, [3] * 20, 28, ignore_eos=True)])
    assert len(run_all(core)[0].output_ids) == 28
