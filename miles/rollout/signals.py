"""Signs of a bad reward in the samples of a run: each is a warning that says what was seen and what to look at."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

from miles.observe.log import get_logger
from miles.rollout.reward_value import reward_value
from miles.types import WATCH, Sample

logger = get_logger(__name__)

NUM_SHOWN = 3
MIN_GROUPS = 4  # fewer equal groups can be chance
MIN_EQUAL_PAIRS = 3
NUM_DEVIATIONS = 5.0  # above chance
WINDOW, MIN_WINDOW = 20, 8  # rollouts of a trend
MIN_T = 3.0  # of a trend's slope


class RewardSignals:
    """Watches rollout after rollout. A warning comes when a sign appears, not again while it lasts."""

    def __init__(self, reward_key: str | None) -> None:
        self._reward_key = reward_key
        self._lasting: set[str] = set()
        self._trend: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # mean reward and watching reward
        self._watch_mean: float | None = None

    def watch(self, samples: Sequence[Sample]) -> None:
        """Look at the scored samples of a rollout."""
        groups: dict[int, list[Sample]] = defaultdict(list)
        for sample in samples:
            groups[sample.group_index].append(sample)
        self._report("equal rewards", self._equal_groups(list(groups.values())))
        self._report("duplicates", duplicates_above_chance(groups.values()))
        self._report("disagreement", self._disagreement(samples))

    def take(self) -> dict[str, float]:
        """The mean of the watching reward over the last rollout, under its metric name."""
        return {} if self._watch_mean is None else {"rollout/watch_reward": self._watch_mean}

    def _report(self, sign: str, text: str | None) -> None:
        if text is not None and sign not in self._lasting:
            logger.warning(text)
        (self._lasting.discard if text is None else self._lasting.add)(sign)

    def _equal_groups(self, groups: Sequence[Sequence[Sample]]) -> str | None:
        compared = [group for group in groups if len(group) > 1]
        values = [{reward_value(sample, self._reward_key) for sample in group} for group in compared]
        if len(values) < MIN_GROUPS or any(len(of_group) > 1 for of_group in values):
            return None
        counts = Counter(of_group.pop() for of_group in values).most_common(3)
        shown = ", ".join(f"{count} with {value:g}" for value, count in counts)
        return (
            f"in all {len(compared)} groups the answers have equal rewards ({shown}), so nothing can be learned from "
            f"this rollout: the prompts are too hard or too easy, or the reward is wrong:\n"
            f"{show_samples([group[0] for group in compared])}"
        )

    def _disagreement(self, samples: Sequence[Sample]) -> str | None:
        watched = [(reward_value(s, self._reward_key), s.metadata.get(WATCH)) for s in samples]
        pairs = [(reward, watch) for reward, watch in watched if watch is not None]
        if not pairs:
            return None
        reward_mean, self._watch_mean = (statistics.fmean(column) for column in zip(*pairs, strict=True))
        self._trend.append((reward_mean, self._watch_mean))
        if len(self._trend) < MIN_WINDOW:
            return None
        rewards, watches = zip(*self._trend, strict=True)
        if slope_t(rewards) < MIN_T or slope_t(watches) > -MIN_T:
            return None
        apart = sorted(samples, key=lambda s: (s.metadata.get(WATCH) or 0) - reward_value(s, self._reward_key))
        return (
            f"over the last {len(self._trend)} rollouts the reward rose from {rewards[0]:.3f} to {rewards[-1]:.3f} "
            f"while --rm-watch-type fell from {watches[0]:.3f} to {watches[-1]:.3f}: the model may have found answers "
            f"that only please the reward:\n{show_samples(apart)}"
        )


def show_samples(samples: Sequence[Sample]) -> str:
    """The ends of the first few responses, for a warning."""
    return "\n".join(
        f"  sample {s.index}, label ends with: {str(s.label)[-80:]!r}, response ends with: {s.response[-300:]!r}"
        for s in samples[:NUM_SHOWN]
    )


def duplicates_above_chance(groups: Iterable[Sequence[Sample]]) -> str | None:
    """A warning when more answers of a group are equal than independent draws would be.

    Two draws are equal with probability sum p^2, and the mean probability of the drawn answers estimates it without
    bias. The variance of the number of equal pairs in a group is at most (number of pairs) x (expected number).
    """
    num_equal, expected, variance, num_answers = 0, 0.0, 0.0, 0
    for group in groups:
        drawn = [s for s in group if s.rollout_log_probs and len(s.rollout_log_probs) == s.response_length]
        if len(drawn) < 2:
            continue
        counts = Counter(tuple(sample.tokens[sample.prompt_length :]) for sample in drawn)
        num_equal += sum(math.comb(count, 2) for count in counts.values())
        num_pairs = math.comb(len(drawn), 2)
        chance = statistics.fmean(math.exp(min(0.0, math.fsum(s.rollout_log_probs or ()))) for s in drawn)
        expected += num_pairs * chance
        variance += num_pairs * num_pairs * chance
        num_answers += len(drawn)
    if num_equal < max(MIN_EQUAL_PAIRS, expected + NUM_DEVIATIONS * math.sqrt(variance)):
        return None
    return (
        f"{num_equal} pairs of equal answers in the groups of {num_answers} answers, where {expected:.2g} are expected "
        "by chance: answers of a group may share their random draws (the same seed on every device, a cache that "
        "replays answers)"
    )


def slope_t(values: Sequence[float]) -> float:
    """t statistic of the slope of a straight line through the values; 0 when they do not change."""
    steps = range(len(values))
    slope, intercept = statistics.linear_regression(steps, values)
    residual = math.fsum((value - slope * step - intercept) ** 2 for step, value in zip(steps, values, strict=True))
    spread = math.fsum((step - statistics.fmean(steps)) ** 2 for step in steps)
    error = math.sqrt(residual / (len(values) - 2) / spread)
    return math.copysign(math.inf, slope) if error == 0 and slope else slope / error if error else 0.0
