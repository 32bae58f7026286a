"""The whole path of a GPU, with interpreted kernels on a CPU: the decoder with its gradients, and the engine with steps
that overlap, against the plain operations. Float32: sums in another order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.gpu.ops.references import product_in_order, relative_error, require_interpreter

require_interpreter()

from miles.config.lora_section import LoraConfig  # noqa: E402
from miles.engine import sharing  # noqa: E402
from miles.model.activations import Recompute, remade_numbers  # noqa: E402
from miles.model.context import packed_context  # noqa: E402
from miles.model.decoder import Decoder  # noqa: E402
from miles.model.lora import add_lora  # noqa: E402
from miles.ops import kernels  # noqa: E402
from miles.ops.logprob import token_log_probs  # noqa: E402
from miles.ops.numerics import invariant  # noqa: E402
from tests.unit.engine.tiny import make_core, make_model, reference_answer, request, run_all  # noqa: E402
from tests.unit.living import outcome  # noqa: E402

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


@pytest.mark.parametrize(
    ("num_layers", "qk_norm", "exact"), [(2, True, False), (1, True, True), (1, False, False)], ids=str
)
def test_what_is_made_again_has_the_same_bits_and_is_not_kept(
    num_layers: int, qk_norm: bool, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "on_cpu_too", True)
    model = make_model(**SHAPE, num_layers=num_layers, qk_norm=qk_norm)
    context = packed_context([4, 2, 1], device="cpu", heads=[0, 0, 0])
    with invariant(exact):
        expected, most = outcome(model, Recompute(), context)
        found, kept = outcome(model, Recompute(selective=True), context)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert most - kept == 4 * 7 * num_layers * remade_numbers(model.spec)


def test_adapters_get_the_same_gradients_from_what_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "on_cpu_too", True)
    model = make_model(**SHAPE, num_layers=1)
    add_lora(model, LoraConfig(lora_rank=4), seed=1)
    for name, parameter in model.named_parameters():
        if ".b." in name:
            parameter.data.normal_()
    context = packed_context([3, 1], device="cpu")
    expected, most = outcome(model, Recompute(), context)
    found, kept = outcome(model, Recompute(selective=True), context)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert most - kept == 4 * 4 * (remade_numbers(model.spec) - model.spec.hidden_size)  # the embeddings are kept


def test_an_answer_has_the_same_bits_when_prompts_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three answers of a prompt of 37 tokens, one of which ends early, beside a short one."""
    monkeypatch.setattr(kernels, "on_cpu_too", True)
    monkeypatch.setattr(np, "matmul", product_in_order)
    prompts = [[2 + i % 31 for i in range(37)]] * 3 + [[3, 4, 5]]
    requests = [request(i, prompt, 3 - i % 2, ignore_eos=True) for i, prompt in enumerate(prompts)]
    model, found, shared = make_model(**SHAPE, num_layers=1), [], []
    plan = sharing.SharedBeginnings.plan

    def seen_plan(self: sharing.SharedBeginnings, rows_R: np.ndarray) -> np.ndarray | None:
        made = plan(self, rows_R)
        shared.append(0 if made is None else int((made[0, :-1] == 32).sum()))
        return made

    monkeypatch.setattr(sharing.SharedBeginnings, "plan", seen_plan)
    for worthwhile in (1, 10**9):
        monkeypatch.setattr(sharing, "WORTHWHILE_TOKENS", worthwhile)
        core = make_core(model, overlaps=True, engine_page_size=16)
        core.add(requests)
        found.append({i: (result.output_ids, result.log_probs) for i, result in run_all(core).items()})
    assert found[0] == found[1]
    assert shared == [3, 2, 0, 0]


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
