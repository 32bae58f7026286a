"""The reward of a run, whatever kind it is: started, probed, scoring groups, counted, closed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from miles.config.sections import RunConfig
from miles.errors import ConfigError
from miles.observe.log import get_logger
from miles.rollout.custom_reward import CustomReward
from miles.rollout.rm_hub.math_answer import extract_boxed
from miles.rollout.rm_hub.math_reward import MathReward
from miles.rollout.rm_hub.pool import DIED, RAISED, TIMEOUT
from miles.rollout.rm_hub.random_reward import deterministic_random_reward, random_reward
from miles.types import Sample

logger = get_logger(__name__)

BOXED = "boxed_"
BUILTIN = ("math", "random", "deterministic_random")
NUM_SHOWN = 3


class RewardRunner:
    """Scores samples with the custom reward, or else the built-in one.

    Order of use: construct (loads and checks the hook, `PluginError`; unknown type, `ConfigError`), `start` before
    torch is imported where that is possible, `check_label` while data is loaded, `probe`, then `score_group` for each
    group and `end_batch` after each rollout, `close`.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._custom: CustomReward | None = None
        self._math: MathReward | None = None
        self._counted: dict[str, int] = {}
        self._warned = False
        if config.reward.custom_rm_path is not None:
            self._custom = CustomReward(config)
            return
        name, boxed = _builtin_name(config.reward.rm_type)
        self._name, self._boxed = name, boxed
        if name == "math":
            self._math = MathReward(
                boxed=boxed, num_workers=config.reward.rm_num_workers, timeout_s=config.reward.rm_timeout
            )

    def start(self) -> None:
        """Start the worker processes, if there are any. Returns at once."""
        if self._math is not None:
            self._math.start()

    @property
    def check_label(self) -> Callable[[Any], str | None] | None:
        """For `load_prompts`; None when any label will do. Needs `start`."""
        return self._math.check_label if self._math is not None else None

    def probe(self, example: Sample | None = None) -> None:
        """Call the custom reward once. `example` is an unanswered prompt of the data, so that labels and metadata look
        as they will. Raises `PluginError`."""
        if self._custom is not None:
            self._custom.probe(example)

    async def score_group(self, samples: list[Sample]) -> None:
        """Set the reward of each sample. Raises `RewardError`."""
        for sample, reward in zip(samples, await self._score(samples), strict=True):
            sample.reward = reward

    async def _score(self, samples: list[Sample]) -> Sequence[float | dict[str, Any]]:
        if self._custom is not None:
            return await self._custom.score(samples)
        if self._math is not None:
            return await self._math.score(samples)
        if self._name == "random":
            return [random_reward(sample, seed=self._config.data.rollout_seed) for sample in samples]
        return [
            deterministic_random_reward(
                sample.tokens, extract_boxed(sample.response) if self._boxed else sample.response
            )
            for sample in samples
        ]

    def end_batch(self, samples: Sequence[Sample]) -> None:
        """Warn once, with examples, when no answer could be found in any response of a batch: a reward of 0 then says
        nothing about the answers."""
        if self._math is None or self._warned or not samples:
            return
        if any(self._math.extract(sample.response) is not None for sample in samples):
            return
        self._warned = True
        shown = "\n".join(
            f"  sample {s.index}, label {s.label!r:.80}, response ends with: {s.response[-300:]!r}"
            for s in samples[:NUM_SHOWN]
        )
        logger.warning(
            f"no answer was found in any of {len(samples)} responses, so all rewards are 0. --rm-type "
            f"{self._config.reward.rm_type} reads, after the thinking part, the last \\boxed{{...}}"
            f"{'' if self._boxed else ' or the line after ####'}:\n{shown}"
        )

    def take_counts(self) -> dict[str, float]:
        """Grader failures since the last call, under their metric names."""
        if self._math is None:
            return {}
        total = self._math.counts()
        new = {kind: number - self._counted.get(kind, 0) for kind, number in total.items()}
        self._counted = total
        return {
            "rollout/grader_timeouts": float(new.get(TIMEOUT, 0)),
            "rollout/grader_errors": float(new.get(RAISED, 0) + new.get(DIED, 0)),
        }

    def close(self) -> None:
        if self._math is not None:
            self._math.close()
        if self._custom is not None:
            self._custom.close()


def _builtin_name(rm_type: str | None) -> tuple[str, bool]:
    """Name without the `boxed_` prefix, and whether it was there."""
    assert rm_type is not None, "the rules of the config ask for a reward"
    name = rm_type.removeprefix(BOXED)
    if name not in BUILTIN:
        known = [*BUILTIN, *(BOXED + name for name in BUILTIN)]
        close = difflib.get_close_matches(rm_type, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(BUILTIN)}, each also as {BOXED}..."
        raise ConfigError(f"--rm-type {rm_type}: there is no such reward; {hint}")
    return name, rm_type != name
