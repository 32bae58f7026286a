"""token_log_probs against the plain formula: values, gradients, chunking, precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from miles.ops import logprob
from miles.ops.logprob import KeptIds, token_log_probs, top_log_probs
from tests.unit.living import Living


def plain(hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The definition, with the whole T x V matrix and autograd's own gradient."""
    log_softmax_TV = torch.log_softmax(hidden_TD @ head_VD.T / temperature, -1)
    entropy_T = -(log_softmax_TV.exp() * log_softmax_TV).sum(-1)
    return log_softmax_TV[torch.arange(len(targets_T)), targets_T], entropy_T


def inputs(num_tokens: int, vocab: int, hidden: int, *, dtype: torch.dtype = torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(num_tokens, hidden, generator=generator, dtype=torch.float64)
    head_VD = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    targets_T = torch.randint(vocab, (num_tokens,), generator=generator)
    return hidden_TD.to(dtype).requires_grad_(), head_VD.to(dtype).requires_grad_(), targets_T


@pytest.fixture(params=["one chunk, kept", "many chunks, recomputed"])
def chunk_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    if request.param == "one chunk, kept":
        return 1024
    monkeypatch.setattr(logprob, "SMALL_CHUNK_ELEMENTS", 0)
    return 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_values_and_gradients_equal_the_plain_formula(chunk_size: int, temperature: float) -> None:
    hidden_TD, head_VD, targets_T = inputs(10, 7, 5)
    ours = token_log_probs(hidden_TD, head_VD, targets_T, temperature=temperature, chunk_size=chunk_size)
    theirs = plain(hidden_TD, head_VD, targets_T, temperature)
    weights = torch.linspace(-1.0, 2.0, 10, dtype=torch.float64)
    grads = []
    for log_probs_T, entropy_T in (ours, theirs):
        loss = (weights * log_probs_T).sum() + 0.3 * (weights.flip(0) * entropy_T.square()).sum()
        grads.append(torch.autograd.grad(loss, (hidden_TD, head_VD)))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("output", [0, 1])
def test_gradcheck_of_each_output_alone(chunk_size: int, output: int) -> None:
    hidden_TD, head_VD, targets_T = inputs(8, 6, 4)
    assert torch.autograd.gradcheck(
        lambda h, w: token_log_probs(h, w, targets_T, temperature=0.7, chunk_size=chunk_size)[output],
        (hidden_TD, head_VD),
    )


def test_gradient_of_only_one_input(chunk_size: int) -> None:
    hidden_TD, head_VD, targets_T = inputs(8, 6, 4)
    for ours, theirs, wanted in (
        ((hidden_TD, head_VD.detach()), (hidden_TD, head_VD.detach()), hidden_TD),
        ((hidden_TD.detach(), head_VD), (hidden_TD.detach(), head_VD), head_VD),
    ):
        got = torch.autograd.grad(token_log_probs(*ours, targets_T, chunk_size=chunk_size)[0].sum(), wanted)
        expected = torch.autograd.grad(plain(*theirs, targets_T, 1.0)[0].sum(), wanted)
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@given(num_tokens=st.integers(0, 40), rows=st.integers(1, 45), seed=st.integers(0, 1000))
def test_chunk_size_changes_nothing_but_rounding(num_tokens: int, rows: int, seed: int) -> None:
    hidden_TD, head_VD, targets_T = inputs(num_tokens, 11, 6, seed=seed)
    whole = token_log_probs(hidden_TD, head_VD, targets_T)
    log_probs_T1, entropy_T = logprob._TokenLogProbs.apply(hidden_TD, head_VD, targets_T[:, None], 1.0, rows, None)
    parts = (log_probs_T1.squeeze(1), entropy_T)
    grads = [torch.autograd.grad(lp.sum() + h.sum(), (hidden_TD, head_VD)) for lp, h in (whole, parts)]
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-11, atol=1e-12)


def test_bfloat16_inputs_give_float32_results_summed_in_float32() -> None:
    """Against float64 of the very same bfloat16 numbers: the results carry float32 error only, not bfloat16's 4e-3."""
    hidden_TD, head_VD, targets_T = inputs(300, 50, 32, dtype=torch.bfloat16)
    head_VD.grad_dtype = torch.float32
    log_probs_T, entropy_T = token_log_probs(hidden_TD, head_VD, targets_T)
    log_probs_T.sum().backward()
    hidden64, head64 = (x.detach().double().requires_grad_() for x in (hidden_TD, head_VD))
    exact_T, exact_entropy_T = plain(hidden64, head64, targets_T, 1.0)
    exact_T.sum().backward()
    assert log_probs_T.dtype == entropy_T.dtype == torch.float32
    torch.testing.assert_close(log_probs_T.double(), exact_T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy_T.double(), exact_entropy_T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(head_VD.grad.double(), head64.grad, rtol=1e-4, atol=1e-3)
    assert hidden_TD.grad.dtype == torch.bfloat16
    torch.testing.assert_close(hidden_TD.grad.double(), hidden64.grad, rtol=2e-2, atol=2e-2)
    before, kept = head_VD.grad.clone(), head_VD.grad
    token_log_probs(hidden_TD, head_VD, targets_T)[0].sum().backward()
    assert head_VD.grad is kept  # a second micro-batch adds to it in place
    torch.testing.assert_close(kept, 2 * before)


def test_very_certain_token_has_entropy_zero_and_finite_gradient() -> None:
    hidden_TD = torch.tensor([[1000.0]], requires_grad=True)
    head_VD = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    log_probs_T, entropy_T = token_log_probs(hidden_TD, head_VD, torch.tensor([0]))
    (log_probs_T + entropy_T).sum().backward()
    assert log_probs_T.item() == 0.0
    assert entropy_T.item() == 0.0
    assert hidden_TD.grad.isfinite().all() and head_VD.grad.isfinite().all()


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(AssertionError, match="temperature must be positive"):
        token_log_probs(torch.ones(1, 2), torch.ones(3, 2), torch.tensor([0]), temperature=0.0)


def kept_sets(num_tokens: int, vocab: int, targets_T: Tensor, seed: int = 0) -> tuple[KeptIds, Tensor]:
    """Random sets that hold the target, and the same as a mask."""
    generator = torch.Generator().manual_seed(seed)
    mask_TV = torch.rand(num_tokens, vocab, generator=generator) < 0.3
    mask_TV[torch.arange(num_tokens), targets_T] = True
    bounds = np.concatenate(([0], mask_TV.sum(-1).cumsum(0).numpy()))
    return KeptIds(mask_TV.nonzero()[:, 1].int(), bounds), mask_TV


@pytest.mark.parametrize("chunk_elements", [0, 10**9], ids=["many chunks", "one chunk"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_kept_sets_give_the_softmax_over_them_and_its_exact_gradient(monkeypatch, chunk_elements, temperature) -> None:
    monkeypatch.setattr(logprob, "SMALL_CHUNK_ELEMENTS", chunk_elements)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(11, 6, dtype=torch.float64, generator=generator).requires_grad_()
    head = torch.randn(17, 6, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(17, (11,), generator=generator)
    weights = torch.randn(2, 11, dtype=torch.float64, generator=generator)
    kept, mask_TV = kept_sets(11, 17, targets)
    ours = token_log_probs(hidden, head, targets, temperature=temperature, chunk_size=4, kept=kept)
    gradients = torch.autograd.grad((torch.stack(ours) * weights).sum(), (hidden, head))
    rows = []
    for t in range(11):  # the definition: only the kept rows of the head exist
        log_p = torch.log_softmax(hidden[t] @ head[mask_TV[t]].T / temperature, -1)
        place = int(mask_TV[t, : targets[t]].sum())
        rows.append(torch.stack((log_p[place], -(log_p.exp() * log_p).sum())))
    expected = torch.stack(rows, 1)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), (hidden, head))
    torch.testing.assert_close(torch.stack(ours), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("with_kept", [False, True])
def test_several_ids_of_a_token_are_scored_at_once(monkeypatch, with_kept: bool) -> None:
    monkeypatch.setattr(logprob, "SMALL_CHUNK_ELEMENTS", 0)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(9, 5, dtype=torch.float64, generator=generator).requires_grad_()
    head = torch.randn(13, 5, dtype=torch.float64, generator=generator).requires_grad_()
    ids_TK = torch.stack([torch.randperm(13, generator=generator)[:4] for _ in range(9)])
    weights_TK = torch.rand(9, 4, dtype=torch.float64, generator=generator)
    kept, mask_TV = kept_sets(9, 13, ids_TK[:, 0])
    log_probs_TK, _ = token_log_probs(hidden, head, ids_TK, chunk_size=2, kept=kept if with_kept else None)
    logits_TV = hidden @ head.T
    if with_kept:
        logits_TV = logits_TV.masked_fill(~mask_TV, -torch.inf)
    expected_TK = logits_TV.log_softmax(-1).gather(1, ids_TK)
    assert ((log_probs_TK < -1e29) == (expected_TK == -torch.inf)).all()
    # Probabilities, so that a cut id counts as 0 on both sides.
    ours = torch.autograd.grad((log_probs_TK.exp() * weights_TK).sum(), (hidden, head))
    theirs = torch.autograd.grad((expected_TK.exp() * weights_TK).sum(), (hidden, head))
    torch.testing.assert_close(log_probs_TK.exp(), expected_TK.exp(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_the_most_likely_ids_and_their_log_probs() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, head = torch.randn(7, 5, generator=generator), torch.randn(13, 5, generator=generator)
    ids_TK, log_probs_TK = top_log_probs(hidden, head, 3, temperature=0.5, chunk_size=2)
    expected = (hidden @ head.T / 0.5).log_softmax(-1).sort(-1, descending=True)
    assert ids_TK.tolist() == expected.indices[:, :3].tolist()
    torch.testing.assert_close(log_probs_TK, expected.values[:, :3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_chunks_never_lie_side_by_side(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two float32 numbers for each logit of one chunk, beside the gradients."""
    monkeypatch.setattr(logprob, "SMALL_CHUNK_ELEMENTS", 0)
    hidden_TD, head_VD, targets_T = inputs(12, 5000, 2, dtype=torch.float32)
    with Living() as living:
        log_probs_T, _ = token_log_probs(hidden_TD, head_VD, targets_T, temperature=temperature, chunk_size=4)
        assert 0.99 < living.peak / (2 * 4 * 4 * 5000) < 1.01
        log_probs_T.sum().backward()
    assert 0.99 < living.peak / (2 * 4 * 4 * 5000 + 4 * 2 * 5000) < 1.01
