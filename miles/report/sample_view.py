"""The answers of a step as a page shows them: reward, status, and every token coloured by its log-prob."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from miles.observe.samples import read_samples
from miles.report.runs import RunData
from miles.report.summary import number

MAX_TOKENS = 1_500  # of one answer on a page
NUM_SHADES = 6


@dataclass(frozen=True, slots=True)
class Token:
    """`shade` 0 is a token the engine was sure of, NUM_SHADES - 1 one it hardly expected."""

    text: str
    shade: int
    trained: bool
    title: str


@dataclass(frozen=True, slots=True)
class Answer:
    index: int
    reward: float | None
    status: str
    num_tokens: int
    num_trained: int
    mean_log_prob: float | None
    text: str
    tokens: tuple[Token, ...]  # empty when there is no tokenizer to cut the text with


@dataclass(frozen=True, slots=True)
class Group:
    group: int
    name: str  # evaluation set, or "train"
    prompt: str
    label: str | None
    mean_reward: float | None
    answers: tuple[Answer, ...]

    @property
    def teaches_nothing(self) -> bool:
        return len(self.answers) > 1 and len({answer.reward for answer in self.answers}) == 1


def load_groups(run: RunData, file: str) -> list[Group]:
    """All groups of `samples/<file>.parquet`, in order. Raises `FileNotFoundError`."""
    assert run.folder is not None, "a log alone has no samples"
    rows = read_samples(run.folder / "samples" / f"{file}.parquet")
    tokenizer = find_tokenizer(run)
    by_group: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        by_group.setdefault((row["set"], row["group_index"]), []).append(row)
    return [_group(name, group, members, tokenizer) for (name, group), members in by_group.items()]


def _group(name: str, group: int, rows: Sequence[dict[str, Any]], tokenizer: Tokenizer | None) -> Group:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return Group(
        group,
        name,
        rows[0]["prompt"],
        rows[0]["label"],
        sum(rewards) / len(rewards) if rewards else None,
        tuple(_answer(row, tokenizer) for row in rows),
    )


def _answer(row: dict[str, Any], tokenizer: Tokenizer | None) -> Answer:
    length = row["response_length"] or 0
    mask = row["loss_mask"] if row["loss_mask"] is not None else [1] * length
    log_probs = row["rollout_log_probs"] or []
    versions = row["weight_versions"] or []
    tokens: tuple[Token, ...] = ()
    if tokenizer is not None and length:
        ids = row["tokens"][-length:][:MAX_TOKENS]
        tokens = tuple(
            _token(
                tokenizer.decode([token], skip_special_tokens=False),
                log_probs[place] if place < len(log_probs) else None,
                trained=bool(mask[place]) if place < len(mask) else True,
                version=versions[place] if place < len(versions) else None,
            )
            for place, token in enumerate(ids)
        )
    trained_log_probs = [value for value, kept in zip(log_probs, mask, strict=False) if kept]
    return Answer(
        row["index"],
        row["reward"],
        row["status"],
        length,
        sum(mask),
        sum(trained_log_probs) / len(trained_log_probs) if trained_log_probs else None,
        row["response"] or "",
        tokens,
    )


def _token(text: str, log_prob: float | None, *, trained: bool, version: int | None) -> Token:
    details = []
    shade = 0
    if log_prob is not None:
        shade = min(NUM_SHADES - 1, int(-log_prob * 1.5)) if log_prob < 0 else 0
        details.append(f"log-prob {number(log_prob)}, probability {number(math.exp(min(log_prob, 0.0)))}")
    if not trained:
        details.append("masked: not trained on")
    if version is not None:
        details.append(f"weights {version}")
    return Token(text, shade, trained, ", ".join(details))


def find_tokenizer(run: RunData) -> Tokenizer | None:
    """The run's tokenizer: of its newest checkpoint, else of the model folder it started from."""
    folders = [Path(str(run.setting("hf_checkpoint")))] if run.setting("hf_checkpoint") else []
    if run.folder is not None:
        folders = sorted((run.folder / "checkpoints").glob("iter_*/model"), reverse=True) + folders
    path = next((folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()), None)
    return _tokenizer(path) if path is not None else None


@functools.lru_cache(maxsize=4)
def _tokenizer(path: Path) -> Tokenizer | None:
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # the library raises nothing more exact; without it the text is shown whole
        return None


def choose(groups: Sequence[Group], count: int) -> list[Group]:
    """A few groups to look at: those that teach first, with low and high mean rewards among them."""
    mixed = [group for group in groups if not group.teaches_nothing]
    rest = [group for group in groups if group.teaches_nothing]
    mixed.sort(key=lambda group: group.mean_reward if group.mean_reward is not None else -1.0)
    if len(mixed) > count:
        stride = (len(mixed) - 1) / max(count - 1, 1)
        mixed = [mixed[round(index * stride)] for index in range(count)]
    return (mixed + rest)[:count]


def search(groups: Sequence[Group], text: str, *, reward: str = "all") -> list[Group]:
    """Groups whose prompt, label or an answer holds `text`, in any case; `reward` keeps `right`, `wrong` or `mixed`."""
    needle = text.casefold()
    found = []
    for group in groups:
        texts = [group.prompt, group.label or "", *(answer.text for answer in group.answers)]
        if needle and not any(needle in text.casefold() for text in texts):
            continue
        rewards = {(answer.reward or 0.0) > 0 for answer in group.answers}
        if reward == "all" or rewards == {"right": {True}, "wrong": {False}, "mixed": {True, False}}[reward]:
            found.append(group)
    return found
