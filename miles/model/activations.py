"""What a training forward keeps for its backward pass, and how many layers are computed again so that it fits.

A layer that is computed again keeps its two inputs only. The first layers are: their activations would live longest.
The numbers are those of the GPU kernels; the CPU's padded attention keeps about a third more.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles.model.spec import ModelSpec


def layer_numbers(spec: ModelSpec) -> int:
    """Numbers that one decoder layer keeps of a token: the inputs of its norms and matrix products, the fused
    projection, queries, keys and values as the kernel writes them, and the attention's result with its float32 sums."""
    heads = spec.num_heads * spec.head_dim
    attention = 2 * spec.qkv_size + heads + 2 * spec.num_heads
    return 4 * spec.hidden_size + attention + 3 * spec.intermediate_size


@dataclass(frozen=True, slots=True)
class ActivationBudget:
    """`max_bytes` is what all layers may keep at one time; `num_recomputed` fixes the number of layers instead."""

    spec: ModelSpec
    bytes_per_number: int
    max_bytes: int
    num_recomputed: int | None = None

    def recomputed_for(self, num_tokens: int) -> int:
        """Layers to compute again in the backward pass of so many tokens: as few as the budget allows."""
        if self.num_recomputed is not None:
            return min(self.num_recomputed, self.spec.num_layers)
        kept = num_tokens * self.bytes_per_number * layer_numbers(self.spec)
        excess = self.spec.num_layers * kept - self.max_bytes
        saved = kept - num_tokens * self.bytes_per_number * 2 * self.spec.hidden_size
        return min(max(-(-excess // saved), 0), self.spec.num_layers)

    def default_tokens(self, *, fewest: int) -> int:
        """Token budget of a micro-batch: what fits without computing anything again; `fewest`, for which layers are,
        when that is less; and at least 512 and at most 32,768 whatever fits."""
        per_number = self.bytes_per_number * self.spec.num_layers
        fits = self.max_bytes // (per_number * layer_numbers(self.spec))
        fits_recomputed = self.max_bytes // (per_number * 2 * self.spec.hidden_size)
        return min(max(fits, min(fewest, fits_recomputed), 512), 32768)
