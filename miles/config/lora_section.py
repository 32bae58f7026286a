"""The flags of LoRA, and which modules they name. A module is a Hugging Face one: `model.layers.0.self_attn.q_proj`."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from miles.config.fields import ABOVE_ZERO, FRACTION_BELOW_ONE, NOT_NEGATIVE, SATISFIED, flag
from miles.errors import ConfigError

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Names for several at a time: of PEFT, and of the fused products in public Miles.
_SEVERAL = {
    "all-linear": MODULES,
    "linear_qkv": MODULES[:3],
    "linear_proj": MODULES[3:4],
    "linear_fc1": MODULES[4:6],
    "linear_fc2": MODULES[6:],
}


@dataclass(frozen=True)
class LoraConfig:
    """LoRA: train small matrices beside frozen weights"""

    lora_rank: int = flag(0, "rank of the trained matrices; 0 trains all weights instead", bounds=NOT_NEGATIVE)
    lora_alpha: float = flag(16.0, "what they add is multiplied by alpha / rank", bounds=ABOVE_ZERO)
    lora_dropout: float = flag(
        0.0, "share of their inputs that is dropped in training passes, never in the engine", bounds=FRACTION_BELOW_ONE
    )
    target_modules: tuple[str, ...] = flag(
        ("all-linear",), "modules that get an adapter: q_proj ... down_proj, all-linear, or a part of a path with *"
    )
    exclude_modules: tuple[str, ...] = flag((), "modules that get none, though they are targets")
    lora_adapter_path: str | None = flag(None, "start from this PEFT adapter folder, or checkpoint of a LoRA run")
    lora_type: str = flag(
        "canonical_lora",
        "public name of a layout; here every Hugging Face module has matrices of its own",
        choices=("canonical_lora", "lora"),
        effect=SATISFIED,
    )

    @property
    def is_on(self) -> bool:
        return self.lora_rank > 0

    @property
    def scale(self) -> float:
        return self.lora_alpha / self.lora_rank

    def adapts(self, module: str) -> bool:
        """Whether this module, given by its whole path, has an adapter."""
        return _matches(module, self.target_modules) and not _matches(module, self.exclude_modules)

    def names_nothing(self) -> ConfigError:
        """What to raise where `adapts` is never true."""
        return ConfigError(
            f"--target-modules {' '.join(self.target_modules)}, without --exclude-modules "
            f"{' '.join(self.exclude_modules) or '(none)'}, names no module of this model: LoRA would train nothing"
        )


def module_names(given: tuple[str, ...]) -> list[str]:
    """The values of a flag, which may hold commas, with names for several modules replaced by these."""
    names = [name for value in given for name in value.split(",") if name]
    return [module for name in names for module in _SEVERAL.get(name, (name,))]


def _matches(module: str, given: tuple[str, ...]) -> bool:
    return any(fnmatchcase(f".{module}", f"*.{name}") for name in module_names(given))
