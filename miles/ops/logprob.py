"""Log-prob and entropy of tokens straight from hidden states, with their exact gradient.

The T x V logits exist one chunk at a time: a chunk is at most `chunk_size` tokens, or more while it has no more than
`SMALL_CHUNK_ELEMENTS` logits. When one chunk holds everything its softmax is kept for the backward pass; otherwise the
backward pass computes the logits again. All sums are float32 (float64 for float64 inputs), for bfloat16 inputs too.

T: tokens; V: vocabulary; D: hidden; C: tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.ops.matmul import linear, project_float32

SMALL_CHUNK_ELEMENTS = 4 * 2**20  # 16 MB of float32


def token_log_probs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden @ head.T / temperature)[target] and the entropy of that softmax in nats, both float32.

    Both can be differentiated with respect to `hidden_TD` and `head_VD`. Without `with_entropy` the second is None.
    """
    assert temperature > 0, f"the temperature must be positive, got {temperature}"
    rows = max(chunk_size, SMALL_CHUNK_ELEMENTS // head_VD.shape[0])
    return _TokenLogProbs.apply(hidden_TD, head_VD, targets_T, temperature, rows, with_entropy)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_VD: Tensor,
        targets_T: Tensor,
        temperature: float,
        chunk_rows: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        num_tokens = hidden_TD.shape[0]
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        log_probs_T = torch.empty(num_tokens, dtype=dtype, device=hidden_TD.device)
        entropy_T = torch.empty_like(log_probs_T) if with_entropy else None
        kept_TV = None
        for chunk in _chunks(num_tokens, chunk_rows):
            log_softmax_CV = _log_softmax(hidden_TD[chunk], head_VD, temperature)
            log_probs_T[chunk] = log_softmax_CV.gather(1, targets_T[chunk, None]).squeeze(1)
            if entropy_T is not None:
                entropy_T[chunk] = -(log_softmax_CV.exp().mul_(log_softmax_CV)).sum(-1)
            if num_tokens <= chunk_rows and any(ctx.needs_input_grad):
                kept_TV = log_softmax_CV
        ctx.save_for_backward(hidden_TD, head_VD, targets_T, entropy_T, kept_TV)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        ctx.set_materialize_grads(False)
        return log_probs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TD, head_VD, targets_T, entropy_T, kept_TV = ctx.saved_tensors
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        grad_hidden_TD = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        grad_head_VD = torch.zeros_like(head_VD, dtype=dtype) if ctx.needs_input_grad[1] else None
        for chunk in _chunks(hidden_TD.shape[0], ctx.chunk_rows):
            log_softmax_CV = _log_softmax(hidden_TD[chunk], head_VD, ctx.temperature) if kept_TV is None else kept_TV
            grad_logits_CV = _grad_logits(
                log_softmax_CV,
                targets_T[chunk],
                None if grad_log_probs_T is None else grad_log_probs_T[chunk],
                None if grad_entropy_T is None else grad_entropy_T[chunk],
                None if entropy_T is None else entropy_T[chunk],
            )
            grad_logits_CV /= ctx.temperature
            if grad_hidden_TD is not None:
                grad_hidden_TD[chunk] = grad_logits_CV.to(head_VD.dtype) @ head_VD
            if grad_head_VD is not None:
                grad_head_VD.addmm_(grad_logits_CV.T, hidden_TD[chunk].to(dtype))
        return grad_hidden_TD, grad_head_VD, None, None, None, None


def _chunks(num_tokens: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, num_tokens)) for start in range(0, num_tokens, rows)]


def _log_softmax(hidden_CD: Tensor, head_VD: Tensor, temperature: float) -> Tensor:
    # Float64 stays as it is: this is how the gradient is proven against finite differences.
    project = linear if hidden_CD.dtype == torch.float64 else project_float32
    logits_CV = project(hidden_CD, head_VD)
    if temperature != 1.0:
        logits_CV = logits_CV / temperature
    return logits_CV.log_softmax(-1)


def _grad_logits(
    log_softmax_CV: Tensor,
    targets_C: Tensor,
    grad_log_probs_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    entropy_C: Tensor | None,
) -> Tensor:
    """Gradient with respect to the tempered logits z, with p their softmax and H its entropy:
    d log p[target] / dz = onehot(target) - p and dH / dz = -p (log p + H)."""
    probs_CV = log_softmax_CV.exp()
    factor_CV: Tensor | float = 0.0
    if grad_entropy_C is not None:
        assert entropy_C is not None, "an entropy gradient needs the entropy"
        factor_CV = (log_softmax_CV + entropy_C[:, None]) * grad_entropy_C[:, None]
    if grad_log_probs_C is None:
        return probs_CV.mul_(factor_CV).neg_()
    grad_logits_CV = probs_CV.mul_(factor_CV + grad_log_probs_C[:, None]).neg_()
    return grad_logits_CV.scatter_add_(1, targets_C[:, None], grad_log_probs_C[:, None])
