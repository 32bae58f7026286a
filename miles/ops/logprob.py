"""Log-prob and entropy of tokens straight from hidden states, with their exact gradient.

The T x V logits exist one chunk at a time: a chunk is at most `chunk_size` tokens, or more while it has no more than
`SMALL_CHUNK_ELEMENTS` logits. When one chunk holds everything its softmax is kept for the backward pass; otherwise the
backward pass computes the logits again. All sums are float32 (float64 for float64 inputs), for bfloat16 inputs too.

Sampling replay: with `kept` each token is scored over its own set of ids, those that top-k, top-p or min-p left when
it was drawn. All other logits become `CUT_LOGIT`, whose probability and gradient are exactly 0, so one softmax serves
both and the matrix product is the one of plain scoring.

T: tokens; V: vocabulary; D: hidden; C: tokens of a chunk; K: ids scored of a token; N: ids of all kept sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.ops.kernels import has_kernels, kernels
from miles.ops.matmul import gradient_to_add_to, linear, project_float32
from miles.ops.numerics import is_invariant

SMALL_CHUNK_ELEMENTS = 4 * 2**20  # 16 MB of float32
CUT_LOGIT = -1e30  # finite: probability 0 times log-probability must be 0, not nan


@dataclass(frozen=True, slots=True)
class KeptIds:
    """A set of ids for each token: ids `bounds[t]` to `bounds[t + 1] - 1` of `ids_N` (int32, on the device)."""

    ids_N: Tensor
    bounds: np.ndarray  # on the host, one more than tokens

    def cut(self, logits_CV: Tensor, chunk: slice) -> None:
        """Overwrite the logits of this chunk of tokens that are not kept."""
        bounds = self.bounds[chunk.start : chunk.stop + 1]
        num_kept_C = torch.from_numpy(np.diff(bounds)).to(logits_CV.device)
        rows_N = torch.repeat_interleave(num_kept_C, output_size=int(bounds[-1] - bounds[0]))
        ids_N = self.ids_N[bounds[0] : bounds[-1]].long()
        kept_N = logits_CV[rows_N, ids_N]
        logits_CV.fill_(CUT_LOGIT)[rows_N, ids_N] = kept_N


def token_log_probs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    kept: KeptIds | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ head.T / temperature)[target] and the entropy of that softmax in nats, both float32.

    `targets_T` may also be T x K: several ids of each token, with log-probs T x K. With `kept` the softmax is over the
    kept ids of the token; an id that was cut has a log-prob near `CUT_LOGIT`. Both results can be differentiated with
    respect to `hidden_TD` and `head_VD`.
    """
    assert temperature > 0, f"the temperature must be positive, got {temperature}"
    rows = max(chunk_size, SMALL_CHUNK_ELEMENTS // head_VD.shape[0])
    if has_kernels(hidden_TD) and kept is None and targets_T.numel() == hidden_TD.shape[0]:
        log_probs_T, entropy_T = kernels("logprob").head_log_probs(
            hidden_TD, head_VD, targets_T.flatten(), temperature=temperature, chunk_rows=rows
        )
        return log_probs_T.view_as(targets_T), entropy_T
    targets_TK = targets_T[:, None] if targets_T.ndim == 1 else targets_T
    log_probs_TK, entropy_T = _TokenLogProbs.apply(hidden_TD, head_VD, targets_TK, temperature, rows, kept)
    return log_probs_TK.view_as(targets_T), entropy_T


@torch.no_grad()
def top_log_probs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    num_top: int,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    kept: KeptIds | None = None,
) -> tuple[Tensor, Tensor]:
    """The `num_top` most likely ids of each token and their log-probs, most likely first; no gradient."""
    ids, log_probs = [], []
    for chunk in _chunks(hidden_TD.shape[0], chunk_size):
        best = _log_softmax(_logits(hidden_TD, head_VD, chunk), temperature, chunk, kept).topk(num_top)
        ids.append(best.indices)
        log_probs.append(best.values)
    return torch.cat(ids), torch.cat(log_probs)


def row_log_probs(logits_RV: Tensor, ids_RK: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the ids, float32 R x K: the function that engine and trainer share where
    their bits must agree."""
    if has_kernels(logits_RV):
        score = kernels("logprob").chunk_log_probs
        return torch.stack([score(logits_RV, ids_R.contiguous(), temperature)[0] for ids_R in ids_RK.unbind(1)], 1)
    return tempered(logits_RV, temperature).log_softmax(-1).gather(1, ids_RK)


def tempered(logits: Tensor, temperature: float, *, out: Tensor | None = None) -> Tensor:
    """`logits / temperature`, divided as the engine does: by a number of float32, which is not a product with its
    inverse. `out` may be the logits."""
    return logits if temperature == 1.0 else torch.div(logits, logits.new_full((1, 1), temperature), out=out)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_VD: Tensor,
        targets_TK: Tensor,
        temperature: float,
        chunk_rows: int,
        kept: KeptIds | None,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden_TD.shape[0]
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        log_probs_TK = torch.empty(targets_TK.shape, dtype=dtype, device=hidden_TD.device)
        entropy_T = log_probs_TK.new_empty(num_tokens)
        kept_TV = None
        for chunk in _chunks(num_tokens, chunk_rows):
            logits_CV = _logits(hidden_TD, head_VD, chunk)
            drawn = is_invariant() and has_kernels(hidden_TD)
            if drawn:
                log_probs_TK[chunk] = _as_drawn(logits_CV, targets_TK[chunk], temperature, chunk, kept)
            log_softmax_CV = _log_softmax(logits_CV, temperature, chunk, kept)
            del logits_CV  # no more than two numbers of each logit are there at any time
            if not drawn:
                log_probs_TK[chunk] = log_softmax_CV.gather(1, targets_TK[chunk])
            entropy_T[chunk] = -(log_softmax_CV.exp().mul_(log_softmax_CV)).sum(-1)
            if num_tokens <= chunk_rows and any(ctx.needs_input_grad):
                kept_TV = log_softmax_CV
            del log_softmax_CV
        ctx.save_for_backward(hidden_TD, head_VD, targets_TK, entropy_T, kept_TV)
        ctx.head, ctx.temperature, ctx.chunk_rows, ctx.kept = head_VD, temperature, chunk_rows, kept
        ctx.set_materialize_grads(False)
        return log_probs_TK, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs_TK: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_TD, head_VD, targets_TK, entropy_T, kept_TV = ctx.saved_tensors
        grad_hidden_TD = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        sum_VD, grad_head_VD = gradient_to_add_to(ctx.head) if ctx.needs_input_grad[1] else (None, None)
        for chunk in _chunks(hidden_TD.shape[0], ctx.chunk_rows):
            log_softmax_CV = kept_TV
            if log_softmax_CV is None:
                log_softmax_CV = _log_softmax(_logits(hidden_TD, head_VD, chunk), ctx.temperature, chunk, ctx.kept)
            grad_logits_CV = _grad_logits(
                log_softmax_CV,
                targets_TK[chunk],
                None if grad_log_probs_TK is None else grad_log_probs_TK[chunk],
                None if grad_entropy_T is None else grad_entropy_T[chunk],
                entropy_T[chunk],
            )
            grad_logits_CV /= ctx.temperature
            if grad_hidden_TD is not None:
                grad_hidden_TD[chunk] = grad_logits_CV.to(head_VD.dtype) @ head_VD
            if sum_VD is not None:
                sum_VD.addmm_(grad_logits_CV.T, hidden_TD[chunk].to(sum_VD.dtype))
            del log_softmax_CV, grad_logits_CV
        return grad_hidden_TD, grad_head_VD, None, None, None, None


def _chunks(num_tokens: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, num_tokens)) for start in range(0, num_tokens, rows)]


def _logits(hidden_TD: Tensor, head_VD: Tensor, chunk: slice) -> Tensor:
    # Float64 stays as it is: this is how the gradient is proven against finite differences.
    project = linear if hidden_TD.dtype == torch.float64 else project_float32
    return project(hidden_TD[chunk], head_VD)


def _log_softmax(logits_CV: Tensor, temperature: float, chunk: slice, kept: KeptIds | None) -> Tensor:
    """Overwrites the logits."""
    logits_CV = tempered(logits_CV, temperature, out=logits_CV)
    if kept is not None:
        kept.cut(logits_CV, chunk)
    return logits_CV.log_softmax(-1)


def _as_drawn(logits_CV: Tensor, targets_CK: Tensor, temperature: float, chunk: slice, kept: KeptIds | None) -> Tensor:
    """Log-probs by the steps of the engine on CUDA, which divides by the temperature before it cuts."""
    if kept is None:
        return row_log_probs(logits_CV, targets_CK, temperature=temperature)
    logits_CV = tempered(logits_CV, temperature)
    kept.cut(logits_CV, chunk)
    return row_log_probs(logits_CV, targets_CK)


def _grad_logits(
    log_softmax_CV: Tensor,
    targets_CK: Tensor,
    grad_log_probs_CK: Tensor | None,
    grad_entropy_C: Tensor | None,
    entropy_C: Tensor,
) -> Tensor:
    """Gradient with respect to the tempered logits z, with p their softmax and H its entropy:
    d log p[target] / dz = onehot(target) - p and dH / dz = -p (log p + H)."""
    probs_CV = log_softmax_CV.exp()
    factor_CV: Tensor | float = 0.0
    if grad_entropy_C is not None:
        factor_CV = (log_softmax_CV + entropy_C[:, None]) * grad_entropy_C[:, None]
    if grad_log_probs_CK is None:
        return probs_CV.mul_(factor_CV).neg_()
    grad_logits_CV = probs_CV.mul_(factor_CV + grad_log_probs_CK.sum(-1, keepdim=True)).neg_()
    # One column after the other: ids may repeat in a row, and a GPU adds repeated ids of one call in any order.
    for targets_C1, grad_C1 in zip(targets_CK.split(1, 1), grad_log_probs_CK.split(1, 1), strict=True):
        grad_logits_CV.scatter_add_(1, targets_C1, grad_C1)
    return grad_logits_CV
