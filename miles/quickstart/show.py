"""What a quickstart run showed: read from its run folder, printed for a person or given as JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import plotext
from rich.console import Console
from rich.table import Table

from miles.observe.metrics import read_records
from miles.observe.samples import read_samples

NEXT = """
Three things to try next:
  miles quickstart --rm-type random   a reward that knows nothing: nothing is learned
  miles quickstart --explain          every setting and where it came from
  miles train --help                  the same loop on your model, data and reward"""


@dataclass(frozen=True)
class Outcome:
    """Accuracies are shares of held-out questions whose greedy answer is right."""

    held_out_before: float
    held_out_after: float
    seconds: float
    steps: int
    seed: int
    reward_curve: list[float]  # mean training reward of each step
    held_out_curve: list[tuple[int, float]]  # (steps trained, accuracy)
    length_curve: list[float]  # mean answer length of each step, in tokens
    answers: list[dict[str, Any]]  # question, label, answer and verdict before and after

    def as_json(self) -> dict[str, Any]:
        return {
            "held_out_before": self.held_out_before,
            "held_out_after": self.held_out_after,
            "seconds": round(self.seconds, 2),
            "steps": self.steps,
            "seed": self.seed,
            "reward_curve": self.reward_curve,
            "held_out_curve": self.held_out_curve,
            "held_out_answers": self.answers,
        }


def read_outcome(folder: Path, *, seconds: float, seed: int) -> Outcome:
    """Collect the outcome of a finished run with the evaluation set `held_out`.

    Answers are graded here, by the exact sum: the reward of the run may be another one, as in a control.
    """
    records = read_records(folder / "metrics.jsonl")
    evaluated = [record["step"] for record in records if record["kind"] == "eval"]
    steps = [record for record in records if record["kind"] == "step"]
    answers = [read_samples(folder / "samples" / f"eval_{step}.parquet") for step in evaluated]
    curve = [(step, mean(map(is_right, rows))) for step, rows in zip(evaluated, answers, strict=True)]
    return Outcome(
        held_out_before=curve[0][1],
        held_out_after=curve[-1][1],
        seconds=seconds,
        steps=len(steps),
        seed=seed,
        reward_curve=[record["rollout/raw_reward"] for record in steps],
        held_out_curve=curve,
        length_curve=[record["rollout/response_lengths"] for record in steps],
        answers=[_answer(*pair) for pair in zip(answers[0], answers[-1], strict=True)],
    )


def is_right(row: dict[str, Any]) -> bool:
    """The answer ends with `####` and exactly the label."""
    return row["response"].rpartition("####")[2].strip() == row["label"] and "####" in row["response"]


def show(outcome: Outcome, folder: Path, console: Console) -> None:
    """Print two answers before and after, the curve, the figures, the run folder and what to try next."""
    console.print()
    console.print(_answers_table(outcome.answers))
    console.print(_curve(outcome), markup=False, highlight=False)
    learned = "It learned to show its working." if outcome.held_out_before < 0.4 < 0.9 < outcome.held_out_after else ""
    first, last = mean(outcome.length_curve[:3]), mean(outcome.length_curve[-3:])
    console.print(
        f"Held-out questions answered right: {outcome.held_out_before:.3f} before, {outcome.held_out_after:.3f} after "
        f"{outcome.steps} steps, in {outcome.seconds:.0f} s. {learned}",
        soft_wrap=True,
    )
    console.print(f"Answers went from {first:.0f} to {last:.0f} tokens. Run folder: {folder}", soft_wrap=True)
    console.print(NEXT, markup=False, highlight=False, soft_wrap=True)


def _answer(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    assert before["prompt"] == after["prompt"], "both evaluations ask the same questions in the same order"
    return {
        "question": _question(before["prompt"]),
        "label": before["label"],
        "before": before["response"],
        "before_right": is_right(before),
        "after": after["response"],
        "after_right": is_right(after),
    }


def _question(prompt: str) -> str:
    """The user's words in a rendered prompt."""
    found = re.search(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    return found[1] if found else prompt


def _answers_table(answers: list[dict[str, Any]]) -> Table:
    # Two that it got wrong before and right after tell the story; in a control run there may be none.
    changed = [answer for answer in answers if answer["after_right"] > answer["before_right"]]
    table = Table("question", "right answer", "before", "after", title="Two held-out questions", show_lines=True)
    for answer in (changed + answers)[:2]:
        table.add_row(answer["question"], answer["label"], answer["before"], answer["after"])
    return table


def _curve(outcome: Outcome) -> str:
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(76, 16)
    plotext.plot(range(1, outcome.steps + 1), outcome.reward_curve, marker="braille", label="training reward")
    steps, accuracy = zip(*outcome.held_out_curve, strict=True)
    plotext.scatter(steps, accuracy, marker="o", label="held-out, greedy")
    plotext.ylim(0, 1)
    plotext.xlabel("step")
    return str(plotext.uncolorize(plotext.build()))
