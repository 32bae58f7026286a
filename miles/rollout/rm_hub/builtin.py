"""`--rm-type`: the built-in rewards by name, and weighted sums of them such as `math+0.1*format`."""

from __future__ import annotations

import asyncio
import difflib
import re
from dataclasses import dataclass
from typing import Any

from miles.errors import ConfigError
from miles.rollout.reward_value import checked_reward
from miles.rollout.rm_hub.choice_reward import ChoiceGrader
from miles.rollout.rm_hub.code_reward import CodeGrader
from miles.rollout.rm_hub.grader import SCORE, Boxed, Grader, MakeGrader, Reward, Tools, unboxed
from miles.rollout.rm_hub.math_reward import DapoGrader, DeepscalerGrader, GemmaMathGrader, Gsm8kGrader, MathGrader
from miles.rollout.rm_hub.pattern_reward import JsonSchemaGrader, RegexGrader
from miles.rollout.rm_hub.random_reward import DeterministicRandomGrader, RandomGrader
from miles.rollout.rm_hub.remote_reward import RemoteGrader
from miles.rollout.rm_hub.text_reward import ExactGrader, F1Grader, FormatGrader
from miles.types import RAW_ACCURACY, Sample

BOXED = "boxed_"
BUILTIN: dict[str, MakeGrader] = {
    "math": MathGrader,
    "gsm8k": Gsm8kGrader,
    "deepscaler": DeepscalerGrader,
    "gemma_math": GemmaMathGrader,
    "dapo": DapoGrader,
    "f1": F1Grader,
    "gpqa": ChoiceGrader,
    "code": CodeGrader,
    "json_schema": JsonSchemaGrader,
    "regex": RegexGrader,
    "exact": ExactGrader,
    "format": FormatGrader,
    "remote_rm": RemoteGrader,
    "random": RandomGrader,
    "deterministic_random": DeterministicRandomGrader,
}
_WEIGHT = r"(?P<weight>(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*\*"
_TERM = re.compile(rf"\s*(?P<sign>[+-]?)\s*(?:{_WEIGHT})?\s*(?P<name>[a-z]\w*)\s*(?=[+-]|$)")


@dataclass(frozen=True, slots=True)
class Term:
    weight: float
    name: str
    grader: Grader


class BuiltinReward:
    """One reward, or a weighted sum of several.

    In a sum a part that is a dict counts with its `score`. The sum itself is a number, and with `--reward-key` a dict
    with the sum as `score` and each part under its name. The first part is noted in the metadata of the sample.
    """

    def __init__(self, spec: str, tools: Tools) -> None:
        """Raises `ConfigError` for a name that does not exist or a sum that cannot be read."""
        self.spec = spec
        self._tools = tools
        self.terms = parse_spec(spec, tools)
        self._is_sum = len(self.terms) > 1 or self.terms[0].weight != 1.0

    @property
    def place(self) -> str:
        """Where the answer is read, in words."""
        return "; ".join(dict.fromkeys(term.grader.place for term in self.terms))

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of a dict reward; none when it is a number. A service may give any."""
        return (SCORE, *(term.name for term in self.terms)) if self._is_sum else self.terms[0].grader.fields

    @property
    def is_open(self) -> bool:
        """Whether it may give any field: what a service returns is its own business."""
        return not self._is_sum and isinstance(self.terms[0].grader, RemoteGrader)

    def find(self, response: str) -> str | None:
        """The answer of the first part that finds one."""
        return next((found for term in self.terms if (found := term.grader.find(response)) is not None), None)

    def label_problem(self, label: Any, metadata: dict[str, Any]) -> str | None:
        problems = (term.grader.label_problem(label, metadata) for term in self.terms)
        return next((problem for problem in problems if problem is not None), None)

    @property
    def full(self) -> float:
        """What a right answer gets."""
        return sum(term.weight for term in self.terms if term.weight > 0)

    def right_answer(self, label: Any, metadata: dict[str, Any]) -> str | None:
        """An answer that must get `full`; None when the label does not tell."""
        return self._checkable.right_answer(label, metadata)

    def write(self, answer: str) -> str:
        """A response with this answer."""
        return self._checkable.write(answer)

    @property
    def _checkable(self) -> Grader:
        """The first part that knows right answers."""
        knowing = [t.grader for t in self.terms if type(unboxed(t.grader)).right_answer is not Grader.right_answer]
        return (knowing or [self.terms[0].grader])[0]

    async def score(self, sample: Sample) -> Reward:
        """The reward of a sample. Raises `RewardError` when it could not be graded."""
        if self._is_sum:
            rewards = await asyncio.gather(*(_score(term.grader, sample) for term in self.terms))
            parts = [self._number(reward, sample) for reward in rewards]
            sample.metadata[RAW_ACCURACY] = parts[0]
            return self._sum(parts)
        reward, key = await _score(self.terms[0].grader, sample), self._tools.config.reward.reward_key
        if isinstance(reward, dict) and key is None:
            reward = reward.get(SCORE, reward)
        return self._checked(reward, sample, key=key if isinstance(reward, dict) else None)

    def _number(self, reward: Reward, sample: Sample) -> float:
        number = self._checked(reward.get(SCORE) if isinstance(reward, dict) else reward, sample, key=None)
        assert not isinstance(number, dict)
        return number

    def _checked(self, reward: Any, sample: Sample, *, key: str | None) -> Reward:
        return checked_reward(reward, reward_key=key, source=f"--rm-type {self.spec}", who=f"sample {sample.index}")

    def _sum(self, parts: list[float]) -> Reward:
        total = float(sum(term.weight * part for term, part in zip(self.terms, parts, strict=True)))
        if self._tools.config.reward.reward_key is None:
            return total
        return {SCORE: total, **{term.name: part for term, part in zip(self.terms, parts, strict=True)}}


def number_of(reward: Reward) -> float:
    """A reward without its other fields."""
    return reward[SCORE] if isinstance(reward, dict) else reward


async def _score(grader: Grader, sample: Sample) -> Reward:
    answer = grader.find(sample.response)
    return grader.missing if answer is None else await grader.compare(answer, sample)


def parse_spec(spec: str, tools: Tools) -> list[Term]:
    """The parts of a reward: names with an optional weight, joined by + or -. Raises `ConfigError`."""
    terms: list[Term] = []
    position = 0
    while position < len(spec) or not terms:
        match = _TERM.match(spec, position)
        if match is None or (position > 0 and not match["sign"]):
            raise ConfigError(
                f"--rm-type {spec}: cannot be read at {spec[position:]!r}; write a name, or a sum such as "
                "math+0.1*format"
            )
        weight = float(match["weight"] or 1) * (-1 if match["sign"] == "-" else 1)
        terms.append(Term(weight, match["name"], _grader(match["name"], spec, tools)))
        position = match.end()
    names = [term.name for term in terms]
    if len(set(names)) < len(names):
        raise ConfigError(f"--rm-type {spec}: a name stands in it twice; add the weights up")
    return terms


def _grader(name: str, spec: str, tools: Tools) -> Grader:
    plain = name.removeprefix(BOXED)
    if plain not in BUILTIN:
        close = difflib.get_close_matches(name, [*BUILTIN, *(BOXED + known for known in BUILTIN)], n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(BUILTIN)}, each also as {BOXED}..."
        raise ConfigError(f"--rm-type {spec}: there is no such reward as {name}; {hint}")
    grader = BUILTIN[plain](tools)
    return grader if plain == name else Boxed(grader)
