"""Grade stored answers and labels without a run: what `miles reward test` and `miles reward check` do."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from miles.config.sections import RewardConfig, RunConfig
from miles.data.rows import Row, missing_column, read_rows
from miles.errors import DataError, RewardError
from miles.observe.samples import read_samples
from miles.rollout.custom_reward import Scored
from miles.rollout.rewards import RewardRunner
from miles.rollout.rm_hub.builtin import number_of
from miles.types import Sample

RECORDED = "recorded"  # in place of a second reward: the rewards that the file holds
FLOAT_NOISE = 1e-9  # rewards that differ by less are equal
LABEL_COLUMNS = ("label", "answer")  # looked for when --label-key is not given
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored answer. `place` says where it lies: `file.jsonl row 3`."""

    place: str
    sample: Sample
    recorded: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reward says of an answer: a number, or what went wrong. `answer` is what it read in the response."""

    reward: float | None
    answer: str | None
    seconds: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    """An answer with the verdicts of one or two rewards."""

    number: int  # counted from 1, over all files
    stored: Stored
    verdict: Verdict
    other: float | None = None
    has_other: bool = False

    @property
    def disagrees(self) -> bool:
        if not self.has_other or self.verdict.reward is None or self.other is None:
            return self.has_other and self.verdict.reward is not self.other
        return abs(self.verdict.reward - self.other) > FLOAT_NOISE


def read_stored(spec: str, *, response_key: str, label_key: str | None, metadata_key: str) -> list[Stored]:
    """The answers of a JSONL or parquet file (`FILE@[a:b]`), or of all samples of a run folder. Raises `DataError`."""
    folder = Path(spec)
    if folder.is_dir():
        return [stored for file in _sample_files(folder) for stored in _read_run_file(file)]
    path, rows = read_rows(spec, flag="FILE")
    keys = (response_key, label_column(rows[0][1], label_key), metadata_key)
    return [_stored(f"{path.name} row {number}", row, number, keys) for number, row in rows]


def label_column(columns: Iterable[str], wanted: str | None) -> str:
    """The column of the label: the one that was asked for, else the first usual one that is there."""
    names = set(columns)
    return wanted or next((name for name in LABEL_COLUMNS if name in names), LABEL_COLUMNS[0])


def _sample_files(folder: Path) -> list[Path]:
    files = [*folder.glob("samples/*.parquet"), *folder.glob("*.parquet")]
    if not files:
        raise DataError(f"{folder}: there are no samples/*.parquet in this folder; give a run folder or a file")
    return sorted(files, key=lambda file: (file.stem.rpartition("_")[0], _number_in(file.stem)))


def _number_in(stem: str) -> int:
    digits = stem.rpartition("_")[2]
    return int(digits) if digits.isdigit() else -1


def _read_run_file(file: Path) -> list[Stored]:
    keys = ("response", "label", "metadata")
    return [_stored(f"{file.name} row {n}", row, n, keys) for n, row in enumerate(read_samples(file), start=1)]


def _stored(place: str, row: Row, number: int, keys: tuple[str, str, str]) -> Stored:
    response_key, label_key, metadata_key = keys
    response = row.get(response_key)
    if not isinstance(response, str):
        problem = missing_column(response_key, row, flag="--response-key") if response is None else "has no text in it"
        raise DataError(f"{place} {problem}")
    metadata = row.get(metadata_key) or {}
    sample = Sample(
        group_index=row["group_index"] if isinstance(row.get("group_index"), int) else number,
        index=row["index"] if isinstance(row.get("index"), int) else number,
        prompt=row.get("prompt") or "",
        tokens=row.get("tokens") or [],
        response=response,
        response_length=row.get("response_length") or 0,
        label=row.get(label_key),
        metadata=json.loads(metadata) if isinstance(metadata, str) else dict(metadata),
    )
    recorded = row.get("reward", row.get("correct"))
    return Stored(place, sample, float(recorded) if isinstance(recorded, (int, float)) else None)


def config_of(reward: str, settings: RunConfig) -> RunConfig:
    """Settings with this reward: an import path, else a built-in one."""
    is_path = _IMPORT_PATH.fullmatch(reward) is not None
    changed: dict[str, Any] = {"custom_rm_path": reward} if is_path else {"rm_type": reward, "custom_rm_path": None}
    return dataclasses.replace(settings, reward=dataclasses.replace(settings.reward, **changed))


def grade(stored: Sequence[Stored], config: RunConfig) -> list[Verdict]:
    """The verdict on each answer. Raises `RewardError`, `ConfigError` or `PluginError` when the reward cannot run."""
    runner = RewardRunner(config)
    try:
        runner.start()
        problems = [_label_problem(item, runner) for item in stored]
        runner.probe(stored[0].sample)
        readable = [item for item, problem in zip(stored, problems, strict=True) if problem is None]
        verdicts = iter(asyncio.run(_grade_all(readable, runner, config.reward)))
        return [
            next(verdicts) if problem is None else Verdict(None, None, 0.0, f"its label cannot be read: {problem}")
            for problem in problems
        ]
    finally:
        runner.close()


def _label_problem(item: Stored, runner: RewardRunner) -> str | None:
    return runner.check_label(item.sample.label, item.sample.metadata) if runner.check_label is not None else None


async def _grade_all(stored: Sequence[Stored], runner: RewardRunner, settings: RewardConfig) -> list[Verdict]:
    """As many answers at a time as there are processes, so that the time of an answer holds no waiting; a group whole
    where the reward wants groups."""
    slots = asyncio.Semaphore(settings.rm_num_workers)

    async def grade_some(samples: list[Sample]) -> list[Verdict]:
        async with slots:
            start = time.perf_counter()
            scored = await runner.grade(samples)
            seconds = (time.perf_counter() - start) / len(samples)
        return [_verdict(s, r, runner, seconds, settings) for s, r in zip(samples, scored, strict=True)]

    parts: list[list[Sample]] = []
    for item in stored:
        joins = settings.group_rm and parts and parts[-1][0].group_index == item.sample.group_index
        if joins:
            parts[-1].append(item.sample)
        else:
            parts.append([item.sample])
    try:
        return [verdict for part in await asyncio.gather(*map(grade_some, parts)) for verdict in part]
    finally:
        await runner.disconnect()


def _verdict(sample: Sample, reward: Scored, runner: RewardRunner, seconds: float, settings: RewardConfig) -> Verdict:
    answer = runner.find(sample)
    if isinstance(reward, RewardError):
        return Verdict(None, answer, seconds, str(reward))
    value = reward[settings.reward_key or "score"] if isinstance(reward, dict) else reward
    return Verdict(float(value), answer, seconds)


def compare(stored: Sequence[Stored], config: RunConfig, *, against: str | None) -> list[Compared]:
    """Verdicts of the reward of `config`, beside those of another one or the recorded ones."""
    verdicts = grade(stored, config)
    others: list[float | None] = [None] * len(stored)
    if against == RECORDED:
        others = [item.recorded for item in stored]
    elif against is not None:
        others = [verdict.reward for verdict in grade(stored, config_of(against, config))]
    rows = zip(stored, verdicts, others, strict=True)
    return [
        Compared(number, item, verdict, other, against is not None)
        for number, (item, verdict, other) in enumerate(rows, start=1)
    ]


def page(rows: Sequence[Compared], *, reward: str, against: str | None) -> str:
    """One HTML page with all rows, that needs nothing else: filters, search, and test cases to download."""
    data = [
        {
            "number": row.number,
            "place": row.stored.place,
            "label": row.stored.sample.label,
            "response": row.stored.sample.response,
            "answer": row.verdict.answer,
            "reward": row.verdict.reward,
            "other": row.other,
            "disagrees": row.disagrees,
            "milliseconds": round(row.verdict.seconds * 1000, 3),
            "problem": row.verdict.problem,
        }
        for row in rows
    ]
    return _template().render(rows=data, reward=reward, against=against)


@functools.cache
def _template() -> jinja2.Template:
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(loader=folder, autoescape=True).get_template("reward_lab.jinja")


def append_cases(path: Path, rows: Sequence[Compared], chosen: Mapping[int, bool]) -> None:
    """Add rows by number to a file of cases, each with the verdict that a person gave it. Raises `DataError`."""
    missing = [number for number in chosen if not 1 <= number <= len(rows)]
    if missing:
        raise DataError(f"there is no answer {missing[0]}: they are numbered from 1 to {len(rows)}")
    cases = [
        {"label": rows[n - 1].stored.sample.label, "response": rows[n - 1].stored.sample.response, "correct": correct}
        for n, correct in chosen.items()
    ]
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(case, ensure_ascii=False) + "\n" for case in cases)


@dataclass(slots=True)
class LabelCheck:
    """What became of the labels of a data set; each list holds the places of rows with a text."""

    num_labels: int = 0
    num_tried: int = 0  # labels that tell a right answer
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    unequal: list[tuple[str, str]] = field(default_factory=list)  # the right answer did not get the full reward
    blind: list[tuple[str, str]] = field(default_factory=list)  # a wrong answer got the full reward

    @property
    def is_good(self) -> bool:
        return not (self.unreadable or self.unequal or self.blind)


def check_labels(specs: Iterable[str], config: RunConfig, *, label_key: str | None, metadata_key: str) -> LabelCheck:
    """Write each label as an answer, and again with one digit or letter changed: the first must get the full reward,
    the second must not."""
    runner = RewardRunner(config)
    try:
        runner.start()
        return asyncio.run(_check_labels(specs, runner, label_key=label_key, metadata_key=metadata_key))
    finally:
        runner.close()


async def _check_labels(
    specs: Iterable[str], runner: RewardRunner, *, label_key: str | None, metadata_key: str
) -> LabelCheck:
    checked = LabelCheck()
    for spec in specs:
        path, rows = read_rows(spec, flag="FILE")
        key = label_column(rows[0][1], label_key)
        for number, row in rows:
            place = f"{path.name} row {number}"
            if key not in row:
                raise DataError(f"{place} {missing_column(key, row, flag='--label-key')}")
            checked.num_labels += 1
            await _check_label(place, row[key], row.get(metadata_key) or {}, runner, checked)
    return checked


async def _check_label(
    place: str, label: Any, metadata: dict[str, Any], runner: RewardRunner, checked: LabelCheck
) -> None:
    problem = runner.check_label(label, metadata) if runner.check_label is not None else None
    if problem is not None:
        checked.unreadable.append((place, f"{label!r:.80}: {problem}"))
        return
    reward = runner.builtin_for(metadata)
    right = reward.right_answer(label, metadata)
    if right is None:
        return
    checked.num_tried += 1
    wrong = perturb(right)
    answers = [Sample(label=label, metadata=metadata, response=reward.write(answer)) for answer in (right, wrong)]
    own, other = [number_of(await reward.score(sample)) for sample in answers]
    if own < reward.full - FLOAT_NOISE:
        checked.unequal.append((place, f"{right!r:.80} got {own:g}, not {reward.full:g}"))
    if other > reward.full - FLOAT_NOISE:
        checked.blind.append((place, f"{wrong!r:.80} got {other:g} where {right!r:.80} is right"))


def perturb(answer: str) -> str:
    """The answer with its last digit changed to another; without a digit its last letter; else with a 1 after it."""
    for position in reversed(range(len(answer))):
        if answer[position] in "0123456789":
            return f"{answer[:position]}{(int(answer[position]) + 1) % 10}{answer[position + 1 :]}"
    for position in reversed(range(len(answer))):
        letter = answer[position]
        if letter.isascii() and letter.isalpha():
            following = "A" if letter == "Z" else "a" if letter == "z" else chr(ord(letter) + 1)
            return f"{answer[:position]}{following}{answer[position + 1 :]}"
    return f"{answer}1"
