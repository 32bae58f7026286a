"""The whole path of a GPU, with interpreted kernels on a CPU: the decoder with its gradients, and the engine with steps
that overlap, against the plain operations. Float32: sums in another order."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.gpu.ops.references import relative_error, require_interpreter

require_interpreter()

from miles.model.context import packed_context  # noqa: E402
from miles.model.decoder import Decoder  # noqa: E402
from miles.ops import kernels  # noqa: E402
from miles.ops.logprob import token_log_probs  # noqa: E402
from tests.unit.engine.tiny import make_core, make_model, reference_answer, request, run_all  # noqa: E402

LENGTHS = [3, 1, 6]
SHAPE = {"head_dim": 32, "num_heads": 2, "num_kv_heads": 1}


def scores_and_gradients(model: Decoder) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 37, (sum(LENGTHS),), generator=generator)
    hidden = model(ids, packed_context(LENGTHS, device="cpu"))
    log_probs, entropy = token_log_probs(hidden, model.head_weight, ids.roll(-1), temperature=0.9)
    model.zero_grad()
    (log_probs.cos().sum() + entropy.sum()).backward()
    return [log_probs, entropy, *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False, "tied_head": False}])
def test_decoder_and_gradients(changes: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(**SHAPE, **changes)
    expected = scores_and_gradients(model)
    monkeypatch.setattr(kernels, "on_cpu_too", True)
    for actual, wanted in zip(scores_and_gradients(model), expected, strict=True):
        assert relative_error(actual, wanted) < 1e-4


def test_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(**SHAPE)
    requests = [
        request(0, [2, 3, 4, 5, 6], 4),
        request(1, [2, 3, 4, 5, 6], 3, temperature=0.7),
        request(2, [9, 8], 4, temperature=0.0),
    ]
    requests.append(dataclasses.replace(requests[0], request_id=3))
    expected = [reference_answer(model, wanted) for wanted in requests]
    monkeypatch.setattr(kernels, "on_cpu_too", True)
    core = make_core(model, overlaps=True, engine_chunked_prefill_size=4)
    core.add(requests)
    results = run_all(core)
    for wanted, (tokens, log_probs, _) in zip(requests, expected, strict=True):
        assert results[wanted.request_id].output_ids == tokens
        assert results[wanted.request_id].log_probs == pytest.approx(log_probs, abs=1e-4)
