"""The flags of how exactly numbers repeat (docs/gap.md)."""

from __future__ import annotations

from dataclasses import dataclass

from miles.config.fields import SATISFIED, flag


@dataclass(frozen=True)
class NumericsConfig:
    """Repeatable numbers (docs/gap.md)"""

    true_on_policy_mode: bool = flag(
        False, "engine and trainer give every token the same log-prob, bit for bit; switches on both flags below"
    )
    deterministic_mode: bool = flag(
        False,
        "the same run repeats bit for bit on the same hardware; --engine-enable-deterministic-inference adds that no "
        "request depends on the others",
    )
    recompute_logprobs_via_prefill: bool = flag(
        False,
        "public name of a second pass of the engine over its answers: here it would give the same bits",
        effect=SATISFIED,
    )
