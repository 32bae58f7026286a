"""Draw the next token of every row and say how likely it was.

A draw is an exponential race (the Gumbel-max trick without its two logarithms): token i arrives at time E_i / p_i with
E_i a unit exponential, and the first to arrive is a sample of p. E_i is a hash of (noise key, position, i) alone, so a
request gets the same noise in any batch, in any order, on any device. Small times decide the race, therefore
E = -log1p(-v), which keeps full relative precision as the uniform v goes to 0.

Not covered: tokens less likely than about 2^-31 are never drawn, as v has 31 bits.

Shapes: R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from miles.ops.kernels import has_kernels, kernels
from miles.ops.logprob import row_log_probs
from miles.ops.numerics import is_invariant

# Multipliers with good avalanche: 32 bits from Wellons' hash prospector, 64 bits from SplitMix64 (Steele et al. 2014).
_MULTIPLY_32 = (0x7FEB352D, 0x846CA68B - (1 << 32))
_GOLDEN_64 = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLY_64 = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))

# Just under 2^-31: even the largest 31-bit integer, which float32 rounds up, gives v < 1 and so a finite E.
_UNIFORM_STEP = 2.0**-31 * (1.0 - 2.0**-24)

# Elements of a piece of the logits that stays in a CPU core's cache over the passes of `sample`.
_CPU_PIECE = 1 << 17


@dataclass(frozen=True, slots=True)
class Cuts:
    """Which tokens may be drawn, for the rows `rows_R`. 0 or less (`top_k`), 1 or more (`top_p`) and 0 (`min_p`)
    switch a cut off. `num_candidates` most likely tokens are enough to apply top-k and top-p (0 when no row has one).
    """

    rows_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    num_candidates: int


@dataclass(frozen=True, slots=True)
class Draw:
    """Token, its log-prob in the distribution it was drawn from (float32), and whether the row's logits were finite;
    token and log-prob mean nothing where they were not."""

    tokens_R: Tensor
    log_probs_R: Tensor
    finite_R: Tensor


def sample(
    logits_RV: Tensor,
    *,
    seeds_R2: Tensor | None,
    temperature_R: Tensor | None = None,
    greedy_R: Tensor | None = None,
    cuts: Cuts | None = None,
    needs_tempered: bool = True,
) -> Draw:
    """Draw from softmax(logits / temperature) after the cuts. Changes `logits_RV` (float32), which afterwards holds
    the tempered logits with -inf for tokens that were cut, unless `needs_tempered` is False.

    `seeds_R2` come from `row_seeds`; None makes every row greedy. `temperature_R` None means 1. Rows of `greedy_R` take
    the most likely token; their temperature must be 1 and they must have no cut.
    """
    if has_kernels(logits_RV) and seeds_R2 is not None and (cuts is None or len(cuts.rows_R) < len(logits_RV)):
        draw = kernels("sampling").sample_uncut(
            logits_RV, seeds_R2=seeds_R2, temperature_R=temperature_R, greedy_R=greedy_R
        )
        if temperature_R is not None and (needs_tempered or cuts is not None):
            logits_RV.div_(temperature_R.unsqueeze(1))
        if cuts is not None:  # these rows again, and only they: the bits of the others do not depend on their batch
            logits_RV[cuts.rows_R] = cut_RV = _cut(logits_RV[cuts.rows_R], cuts)
            draw.tokens_R[cuts.rows_R], draw.log_probs_R[cuts.rows_R] = _race(cut_RV, seeds_R2[cuts.rows_R])
        return draw
    finite_R = logits_RV.sum(-1).isfinite()
    if temperature_R is not None:
        logits_RV.div_(temperature_R.unsqueeze(1))
    if cuts is not None:
        logits_RV[cuts.rows_R] = _cut(logits_RV[cuts.rows_R], cuts)
    if seeds_R2 is None:
        return Draw(*_most_likely(logits_RV), finite_R)
    tokens_R, log_probs_R = _race(logits_RV, seeds_R2)
    if greedy_R is not None:
        tokens_R[greedy_R], log_probs_R[greedy_R] = _most_likely(logits_RV[greedy_R])
    return Draw(tokens_R, log_probs_R, finite_R)


def _race(logits_RV: Tensor, seeds_R2: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits_RV.shape
    rows_per_piece = num_rows if logits_RV.is_cuda else max(1, _CPU_PIECE // vocab_size)
    words_V = _vocabulary_words(vocab_size, logits_RV.device)
    tokens, probs = [], []
    for logits, seeds in zip(logits_RV.split(rows_per_piece), seeds_R2.split(rows_per_piece), strict=True):
        p = torch.softmax(logits, -1)
        drawn = (p / _negative_exponentials(seeds, words_V)).argmin(-1)
        tokens.append(drawn)
        probs.append(p.gather(1, drawn.unsqueeze(1)).squeeze(1))
    tokens_R = torch.cat(tokens)
    if is_invariant():  # the bits that the trainer computes
        return tokens_R, row_log_probs(logits_RV, tokens_R.unsqueeze(1)).squeeze(1)
    return tokens_R, torch.cat(probs).log_()


def _most_likely(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    best_R = logits_RV.argmax(-1)
    return best_R, logits_RV.gather(1, best_R.unsqueeze(1)).squeeze(1) - logits_RV.logsumexp(-1)


def row_seeds(keys_R: Tensor, positions_R: Tensor) -> Tensor:
    """Two 32-bit seeds (R x 2, int32) of each row's draw, from its noise key (64 bits in an int64) and position."""
    return _mix_64(_mix_64(keys_R) + positions_R * _GOLDEN_64).unsqueeze(1).view(torch.int32)


def _negative_exponentials(seeds_R2: Tensor, words_V: Tensor) -> Tensor:
    """Unit exponentials E of the race, with the other sign: R x V, float32, all negative and finite."""
    bits_RV = (words_V ^ seeds_R2[:, :1]).mul_(seeds_R2[:, 1:] | 1)
    shifted_RV = torch.empty_like(bits_RV)
    _mix_32(bits_RV, shifted_RV)
    v_RV = bits_RV.bitwise_and_(0x7FFFFFFF).to(torch.float32)
    return v_RV.add_(0.5).mul_(-_UNIFORM_STEP).log1p_()


@lru_cache(maxsize=8)
def _vocabulary_words(vocab_size: int, device: torch.device) -> Tensor:
    """One well-mixed 32-bit word per token id."""
    words_V = torch.arange(vocab_size, dtype=torch.int32, device=device)
    _mix_32(words_V, torch.empty_like(words_V))
    return words_V


def _mix_32(x: Tensor, scratch: Tensor) -> None:
    """A bijection of 32-bit words in which every input bit reaches every output bit, in place."""
    for shift, multiplier in ((16, _MULTIPLY_32[0]), (15, _MULTIPLY_32[1]), (16, None)):
        # torch shifts signed integers arithmetically: the mask makes it a logical shift
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))
        if multiplier is not None:
            x.mul_(multiplier)


def _mix_64(x: Tensor) -> Tensor:
    x = x + _GOLDEN_64
    for shift, multiplier in ((30, _MULTIPLY_64[0]), (27, _MULTIPLY_64[1])):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _cut(logits_RV: Tensor, cuts: Cuts) -> Tensor:
    """Top-k, then top-p over what top-k left, then min-p. Tokens as likely as the last kept one are kept too."""
    threshold_R1 = logits_RV.amax(-1, keepdim=True) + cuts.min_p_R.log().unsqueeze(1)
    if cuts.num_candidates:
        best_RC = logits_RV.topk(min(cuts.num_candidates, logits_RV.shape[1])).values
        place_R1 = cuts.top_k_R.clamp(1, best_RC.shape[1]).unsqueeze(1) - 1
        kth_R1 = best_RC.gather(1, place_R1).masked_fill(cuts.top_k_R.unsqueeze(1) < 1, -torch.inf)
        p_RC = torch.softmax(best_RC.masked_fill(best_RC < kth_R1, -torch.inf), -1)
        # a sum over all tokens may round to more than 1, and top_p 1 must still keep them all
        top_p_R1 = cuts.top_p_R.masked_fill(cuts.top_p_R >= 1.0, 2.0).unsqueeze(1)
        num_kept_R1 = ((p_RC.cumsum(-1) - p_RC) < top_p_R1).sum(-1, keepdim=True).clamp_(min=1)
        last_R1 = best_RC.gather(1, num_kept_R1 - 1)
        uncut_R1 = ((cuts.top_k_R < 1) & (cuts.top_p_R >= 1.0)).unsqueeze(1)
        threshold_R1 = torch.maximum(threshold_R1, torch.maximum(last_R1, kth_R1).masked_fill(uncut_R1, -torch.inf))
    return logits_RV.masked_fill(logits_RV < threshold_R1, -torch.inf)
