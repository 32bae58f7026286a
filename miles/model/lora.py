"""LoRA: adapters beside the products of a decoder whose own weights are frozen, and their names in PEFT's files.

An adapter belongs to one Hugging Face module. `ops/lora.py` says how those of a fused product are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from miles.config.lora_section import LoraConfig
from miles.model.context import ForwardContext
from miles.model.decoder import Decoder
from miles.model.layers import Linear
from miles.model.names import name_table
from miles.model.spec import ModelSpec
from miles.ops import lora as ops

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Adapter:
    """Of the module `hf_module`: rows `start` to `stop - 1` of our product `linear`, where it is the `place`-th."""

    hf_module: str
    linear: str
    place: int
    start: int
    stop: int

    @property
    def key(self) -> str:
        return self.hf_module.rpartition(".")[2]


class Lora(nn.Module):
    """The adapters of one product. B starts at 0, so nothing changes before the first update."""

    blocks: Tensor

    def __init__(self, base: Linear, adapters: list[Adapter], config: LoraConfig, *, first_key: int) -> None:
        super().__init__()
        rank, width = config.lora_rank, len(adapters) * config.lora_rank
        num_outputs, num_inputs = base.weight.shape
        self.scale, self.dropout, self.first_key = config.scale, config.lora_dropout, first_key
        self.starts = [adapter.start for adapter in adapters]
        self.a = nn.Parameter(base.weight.new_empty(width, num_inputs))
        # Not part of the state: it is what the parts below are views of.
        self.register_buffer("blocks", base.weight.new_zeros(num_outputs, width), persistent=False)
        self.b = nn.ParameterDict(
            [  # pairs: of a dict it would sort the keys
                (one.key, nn.Parameter(self.blocks[one.start : one.stop, one.place * rank : (one.place + 1) * rank]))
                for one in adapters
            ]
        )

    def forward(self, out_TO: Tensor, x_TI: Tensor, context: ForwardContext) -> Tensor:
        if context.dropout_seed is not None:
            x_TI = ops.drop(x_TI, self.dropout, context.dropout_seed + self.first_key)
        parts = tuple(self.b.values())
        return ops.add_lora(out_TO, x_TI, self.a, self.blocks, parts, self.starts, self.scale)


def adapters_of(spec: ModelSpec, config: LoraConfig) -> dict[str, list[Adapter]]:
    """The adapters that these flags ask for, by our product. `ConfigError` when there is none."""
    found: dict[str, list[Adapter]] = {}
    for entry in name_table(spec):
        module, _, kind = entry.hf_name.rpartition(".")
        if kind == "weight" and module.endswith("_proj") and config.adapts(module):
            linear = entry.name.removesuffix(".weight")
            mine = found.setdefault(linear, [])
            mine.append(Adapter(module, linear, len(mine), entry.start, entry.stop))
    if not found:
        raise config.names_nothing()
    return found


@torch.no_grad()
def add_lora(model: Decoder, config: LoraConfig, *, seed: int) -> None:
    """Freeze the decoder and give it trainable adapters: A uniform within 1 / sqrt(inputs), as PEFT draws it, B 0."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    model.lora = config
    for number, (name, adapters) in enumerate(adapters_of(model.spec, config).items()):
        base = model.get_submodule(name)
        assert isinstance(base, Linear), "adapters stand beside products"
        base.lora = Lora(base, adapters, config, first_key=number)
        drawn = torch.rand(base.lora.a.shape, generator=generator)
        base.lora.a.copy_((2 * drawn - 1) / base.weight.shape[1] ** 0.5)


def to_peft(model: Decoder, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of our tensors under PEFT's names. `tensors` must hold everything that is trained."""
    assert model.lora is not None, "the model has no adapters"
    rank, named = model.lora.lora_rank, {}
    for adapters in adapters_of(model.spec, model.lora).values():
        for one in adapters:
            stem, ours = f"{PEFT_PREFIX}{one.hf_module}", f"{one.linear}.lora"
            named[f"{stem}.lora_A.weight"] = tensors[f"{ours}.a"][one.place * rank : (one.place + 1) * rank]
            named[f"{stem}.lora_B.weight"] = tensors[f"{ours}.b.{one.key}"]
    return named
