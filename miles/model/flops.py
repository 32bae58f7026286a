"""Floating-point operations that a forward or training pass executes: matrix products and attention.

A multiplication and an addition count as two. Norms, rotary embedding, activation and softmax are left out: together
they are below one percent for models of useful size.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles.model.spec import ModelSpec


def forward_flops(
    spec: ModelSpec, lengths: Sequence[int], *, num_head_tokens: int | None = None, shared: Sequence[int] = ()
) -> int:
    """FLOPs of one forward over whole packed sequences of these lengths, causal attention counted as causal.

    `num_head_tokens` is the number of positions whose logits are computed; all of them by default. `shared` has for
    each sequence the number of its first tokens that another sequence computes. Each product has two of the same size
    in the backward pass.
    """
    num_tokens = sum(lengths) - sum(shared)
    num_pairs = sum(n * (n + 1) // 2 for n in lengths) - sum(n * (n + 1) // 2 for n in shared)
    products = 2 * num_tokens * spec.num_layer_matrix_parameters
    attention = 2 * 2 * num_pairs * spec.num_heads * spec.head_dim  # queries by keys, then weights by values
    head = 2 * (num_tokens if num_head_tokens is None else num_head_tokens) * spec.vocab_size * spec.hidden_size
    return spec.num_layers * (products + attention) + head
