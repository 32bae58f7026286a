"""Log-prob, entropy and gradient of a chunk of logits, interpreted, against float64 formulas.

Tolerance 1e-5: float32 sums over 9,000 terms.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from miles.ops.logprob import CUT_LOGIT, token_log_probs
from tests.gpu.ops.references import log_probs_and_entropy, relative_error, require_interpreter

require_interpreter()

from miles.ops import triton_logprob  # noqa: E402
from miles.ops.triton_logprob import chunk_grad_logits, chunk_log_probs, head_log_probs  # noqa: E402


@pytest.mark.parametrize(("num_ids", "temperature"), [(9000, 1.0), (300, 0.7)])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_values_and_gradient(num_ids: int, temperature: float, with_entropy: bool) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(3, num_ids) * 4 + 50).requires_grad_()  # far from 0: an unstable sum would overflow
    targets = torch.tensor([0, num_ids - 1, num_ids // 2])
    grads = torch.randn(2, 3)

    log_probs, entropy, log_sums = chunk_log_probs(logits.detach(), targets, temperature)
    expected = log_probs_and_entropy(logits, targets, temperature)
    assert relative_error(log_probs, expected[0]) < 1e-5
    assert relative_error(entropy, expected[1]) < 1e-5

    loss = (expected[0] * grads[0]).sum() + (expected[1] * grads[1]).sum() * with_entropy
    (wanted,) = torch.autograd.grad(loss, logits)
    buffer = logits.detach().clone()
    entropy_grad = grads[1] if with_entropy else None
    actual = chunk_grad_logits(buffer, targets, log_sums, entropy, grads[0], entropy_grad, temperature, buffer)
    assert actual is buffer
    assert relative_error(actual, wanted) < 1e-5


def test_cut_tokens_have_no_weight() -> None:
    logits = torch.full((1, 9000), -torch.inf)  # the second block of ids is cut as a whole
    logits[0, :4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    log_probs, entropy, _ = chunk_log_probs(logits, torch.tensor([2]), 1.0)
    expected = logits[:, :4].log_softmax(-1)
    assert log_probs.item() == pytest.approx(expected[0, 2].item(), rel=1e-6)
    assert entropy.item() == pytest.approx(-(expected.exp() * expected).sum().item(), rel=1e-6)


def test_cut_tokens_change_no_bit_whatever_marks_them() -> None:
    """The engine's mark is -inf, the trainer's a large number, and all logits that are left can be negative."""
    torch.manual_seed(0)
    logits, is_cut = 3 * torch.randn(64, 9000) - 30, torch.ones(64, 9000, dtype=torch.bool)
    is_cut[:, 100:140] = False
    targets = torch.randint(100, 140, (64,))
    marked = (logits.masked_fill(is_cut, mark) for mark in (-torch.inf, CUT_LOGIT))
    (log_probs, entropy, log_sums), trained = (chunk_log_probs(x, targets, 1.0) for x in marked)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip((log_probs, entropy, log_sums), trained, strict=True))
    expected = logits[:, 100:140].double().log_softmax(-1).gather(1, targets[:, None] - 100).squeeze(1)
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk_rows", [3, 8])  # several chunks, and one whose logits are kept
def test_the_chunked_head_equals_the_plain_one(chunk_rows: int) -> None:
    torch.manual_seed(1)
    hidden, head = torch.randn(8, 16, requires_grad=True), torch.randn(200, 16, requires_grad=True)
    targets, grads = torch.randint(200, (8,)), list(torch.randn(2, 8))
    plain = token_log_probs(hidden, head, targets, temperature=0.8)
    fused = head_log_probs(hidden, head, targets, temperature=0.8, chunk_rows=chunk_rows)
    for one, other in zip(fused, plain, strict=True):
        assert relative_error(one, other) < 1e-5
    wanted = torch.autograd.grad(plain, (hidden, head), grads)
    for one, other in zip(torch.autograd.grad(fused, (hidden, head), grads), wanted, strict=True):
        assert relative_error(one, other) < 1e-5


def test_chunks_never_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are gone before the next ones come, and in the backward pass before the products with their gradient."""
    alive: dict[str, list[StorageWeakRef]] = {"logits": [], "gradient": []}

    def watched(name: str, freed: tuple[str, ...], makes: str | None) -> None:
        function = getattr(triton_logprob, name)

        def watch(*args: Any) -> Any:
            gc.collect()  # the interpreter leaves cycles
            assert all(storage.expired() for kind in freed for storage in alive[kind])
            made = function(*args)
            if makes is not None:
                alive[makes].append(StorageWeakRef(made.untyped_storage()))
            return made

        monkeypatch.setattr(triton_logprob, name, watch)

    watched("project_float32", ("logits", "gradient"), "logits")
    watched("chunk_grad_logits", ("gradient",), "gradient")
    watched("add_product_float32", ("logits",), None)
    hidden, head = torch.randn(6, 2, requires_grad=True), torch.randn(300, 2, requires_grad=True)
    head_log_probs(hidden, head, torch.arange(6), temperature=0.8, chunk_rows=2)[0].sum().backward()
    assert (len(alive["logits"]), len(alive["gradient"])) == (6, 3)
