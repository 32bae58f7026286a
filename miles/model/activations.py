"""What a training forward keeps for its backward pass, and what is computed again so that it fits.

A layer that is computed again keeps its two inputs only. The first layers are: their activations would live longest.
Before whole layers, all layers make again what costs one pass over memory (`ops/remake.py`).
The numbers are those of the GPU kernels; the CPU's padded attention keeps about a third more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from miles.model.spec import ModelSpec


def layer_numbers(spec: ModelSpec) -> int:
    """Numbers that one decoder layer keeps of a token: the inputs of its norms and matrix products, the fused
    projection, queries, keys and values as the kernel writes them, and the attention's result with its float32 sums."""
    heads = spec.num_heads * spec.head_dim
    attention = 2 * spec.qkv_size + heads + 2 * spec.num_heads
    return 4 * spec.hidden_size + attention + 3 * spec.intermediate_size


def remade_numbers(spec: ModelSpec) -> int:
    """Those of them that a kernel without a product makes again from the others: the normed inputs of the two fused
    projections, queries, keys and values, and the product of the gate."""
    return 2 * spec.hidden_size + spec.qkv_size + spec.intermediate_size


@dataclass(frozen=True, slots=True)
class Recompute:
    """What is computed again: the first `num_layers` layers, and with `selective` the cheap parts of the others."""

    selective: bool = False
    num_layers: int = 0

    def __str__(self) -> str:
        return f"computed again: {self.num_layers} layers{', cheap parts of the others' * self.selective}"

    def kept_numbers(self, spec: ModelSpec) -> int:
        """Numbers that all layers keep of a token."""
        kept = layer_numbers(spec) - self.selective * remade_numbers(spec)
        return (spec.num_layers - self.num_layers) * kept + self.num_layers * 2 * spec.hidden_size


@dataclass(frozen=True, slots=True)
class ActivationBudget:
    """`max_bytes` is what all layers may keep at one time; `fixed` says what is computed again instead."""

    spec: ModelSpec
    bytes_per_number: int
    max_bytes: int
    fixed: Recompute | None = None

    def recompute_for(self, num_tokens: int) -> Recompute:
        """What to compute again in the backward pass of so many tokens: as little as the budget allows."""
        spec, num_layers = self.spec, self.spec.num_layers
        if self.fixed is not None:
            return replace(self.fixed, num_layers=min(self.fixed.num_layers, num_layers))
        most = self.max_bytes // (num_tokens * self.bytes_per_number)
        if Recompute().kept_numbers(spec) <= most:
            return Recompute()
        kept, one_less = (Recompute(True, number).kept_numbers(spec) for number in (0, 1))
        return Recompute(True, min(max(-(-(kept - most) // (kept - one_less)), 0), num_layers))

    def default_tokens(self, *, fewest: int) -> int:
        """Token budget of a micro-batch: what fits without computing anything again; `fewest`, for which layers are,
        when that is less; and at least 512 and at most 32,768 whatever fits."""
        most, ways = self.max_bytes // self.bytes_per_number, (Recompute(), Recompute(False, self.spec.num_layers))
        fits, fits_recomputed = (most // again.kept_numbers(self.spec) for again in ways)
        return min(max(fits, min(fewest, fits_recomputed), 512), 32768)
