"""The one decoder: the engine generates with it and the trainer trains it.

Covers Llama, Qwen2, Qwen2.5 and Qwen3 (dense); their differences are switches of `ModelSpec`. The output head is not
applied here: engine and trainer project only the hidden states they need (`ops/matmul.py`, `ops/logprob.py`).

Shapes: T packed tokens, D hidden, V vocabulary, S positions, H head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from miles.config.lora_section import LoraConfig
from miles.model.activations import Recompute
from miles.model.attention import Attention
from miles.model.context import ForwardContext
from miles.model.layers import Linear, RmsNorm
from miles.model.mlp import Mlp
from miles.model.spec import ModelSpec
from miles.ops.numerics import as_in_the_forward_pass
from miles.ops.rope import llama3_frequencies, rope_at, rope_frequencies, rope_table


def nothing_again(num_tokens: int) -> Recompute:
    return Recompute()


class Embedding(nn.Module):
    """Rows of a V x D table."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device))

    def forward(self, ids_T: Tensor) -> Tensor:
        return F.embedding(ids_T, self.weight)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normalised input and added to it.

    What the feed-forward adds is returned beside the stream: the norm that comes next adds it in the same pass.
    """

    def __init__(self, spec: ModelSpec, layer: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.attention = Attention(spec, layer, dtype=dtype, device=device)
        self.mlp_norm = RmsNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.mlp = Mlp(spec, dtype=dtype, device=device)

    def forward(
        self, x_TD: Tensor, added_TD: Tensor | None, cos_T1H: Tensor, sin_T1H: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        if added_TD is None:
            normed_TD, make = self.attention_norm(x_TD), partial(self.attention_norm.forward, x_TD)
        else:
            normed_TD, x_TD = self.attention_norm.after_adding(x_TD, added_TD)
            make = partial(self.attention_norm.of_sum, x_TD)
        attended_TD = self.attention(normed_TD, cos_T1H, sin_T1H, context, make)
        normed_TD, x_TD = self.mlp_norm.after_adding(x_TD, attended_TD)
        return x_TD, self.mlp(normed_TD, context, partial(self.mlp_norm.of_sum, x_TD))


class Decoder(nn.Module):
    """Token ids to final hidden states. Parameters start uninitialised: `load_model` makes a usable one."""

    rope_table_SH: Tensor
    lora: LoraConfig | None = None  # set by `lora.py: add_lora`

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = Embedding(spec, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer, dtype=dtype, device=device) for layer in range(spec.num_layers)
        )
        self.norm = RmsNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.head = (
            None
            if spec.tied_head
            else Linear(spec.hidden_size, spec.vocab_size, bias=False, dtype=dtype, device=device)
        )
        frequencies = rope_frequencies(spec.head_dim, spec.rope_theta).to(device)
        if spec.rope_scaling is not None:
            frequencies = llama3_frequencies(frequencies, **asdict(spec.rope_scaling))
        # What a training pass of so many tokens computes again in its backward pass.
        self.recompute_for: Callable[[int], Recompute] = nothing_again
        # Not part of the state: it follows from the spec, and stays float32 whatever the dtype of the weights.
        table_SH = rope_table(frequencies, spec.max_position_embeddings)
        self.register_buffer("rope_table_SH", table_SH, persistent=False)

    @property
    def head_weight(self) -> Tensor:
        """The V x D output projection; the embedding itself when they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, input_ids_T: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states after the final norm, T x D. Positions must be below `max_position_embeddings`."""
        cos_T1H, sin_T1H = rope_at(self.rope_table_SH, context.positions_T)
        x_TD, added_TD = self.embedding(input_ids_T), None
        again = self.recompute_for(len(input_ids_T)) if torch.is_grad_enabled() else Recompute()
        for layer in self.layers[: again.num_layers]:
            x_TD, added_TD = checkpoint(
                *(layer, x_TD, added_TD, cos_T1H, sin_T1H, context),
                use_reentrant=False,
                preserve_rng_state=False,  # nothing in a layer is drawn
                determinism_check="none",
                context_fn=as_in_the_forward_pass,
            )
        if again.selective:
            context = replace(context, remakes=True)
        for layer in self.layers[again.num_layers :]:
            x_TD, added_TD = layer(x_TD, added_TD, cos_T1H, sin_T1H, context)
        normed_TD, _ = self.norm.after_adding(x_TD, added_TD)
        return normed_TD
