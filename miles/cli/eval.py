"""`miles eval`: one evaluation of a model folder or a checkpoint, with the flags of `miles train`.

miles eval --hf-checkpoint MODEL [--init-from CHECKPOINT] --eval-prompt-data NAME FILE --rm-type math ...
"""

from __future__ import annotations

from miles.cli.train import start
from miles.config.parse import parse_train

EVALUATE = "miles.loop.run.evaluate"
NO_PROMPTS = "miles.evals.no_prompts.NoPrompts"
PRESET = ("--num-rollout", "1", "--eval-interval", "1", "--debug-rollout-only", "--data-source-path", NO_PROMPTS)


def run(argv: list[str]) -> int:
    """Evaluate, print the numbers and write a run folder with `eval 0`; returns the exit code."""
    parsed = parse_train(argv, command="eval", preset=PRESET, preset_name="miles eval")
    return start(parsed, command=["miles", "eval", *argv], function=EVALUATE)
