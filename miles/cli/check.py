"""`miles check`: say before a run whether it can work, one verdict a line."""

from __future__ import annotations

import json
import time

from rich.console import Console
from rich.text import Text

from miles.config.parse import parse_train
from miles.loop.preflight import FAIL, OK, SKIP, WARN, Verdict
from miles.loop.trial import check_run

_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red", SKIP: "dim"}
_FLAG = "--json"


def run(argv: list[str]) -> int:
    """Takes the flags of `miles train`, and `--json`. Exit code 1 when a check failed."""
    as_json = _FLAG in argv
    if "--help" in argv or "-h" in argv:
        print("miles check takes every flag of `miles train`, and --json for one JSON object instead of lines.\n")
    config = parse_train([token for token in argv if token != _FLAG], command="check").config
    console = Console(highlight=False, soft_wrap=True)
    start = time.monotonic()
    verdicts = check_run(config, (lambda verdict: None) if as_json else lambda verdict: _show(console, verdict))
    failed = [verdict.name for verdict in verdicts if verdict.status == FAIL]
    if as_json:
        checks = [
            {"name": v.name, "status": v.status, "text": v.text, "lines": list(v.lines), **v.data} for v in verdicts
        ]
        print(json.dumps({"ok": not failed, "seconds": round(time.monotonic() - start, 1), "checks": checks}, indent=2))
    else:
        ending = f"failed: {', '.join(failed)}" if failed else "nothing stands in the way"
        console.print(f"{len(verdicts)} checks in {time.monotonic() - start:.1f} s, {ending}")
    return 1 if failed else 0


def _show(console: Console, verdict: Verdict) -> None:
    status = Text(f"{verdict.status:<5}", style=_STYLES[verdict.status])
    console.print(status + Text(f"{verdict.name:<11} {verdict.text}"))
    for line in verdict.lines:
        console.print(Text(f"{'':<17} {line}"))
