"""`miles hooks`: every function of the user that can replace or extend a part of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from miles.config.flags import spelling
from miles.rollout.hook_table import HOOKS


def run(argv: Sequence[str]) -> int:
    """`miles hooks`; returns the exit code."""
    argparse.ArgumentParser(prog="miles hooks", description=__doc__, allow_abbrev=False).parse_args(argv)
    print("Each flag takes an import path module.function; functions may be plain or async. Examples: docs/hooks.md\n")
    for kind in HOOKS:
        print(f"{spelling(kind.name)}\n    f({', '.join(kind.arguments)})\n    {kind.effect}")
    return 0
