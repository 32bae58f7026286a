"""`miles check`: say before a run whether it can work, one verdict a line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from miles.config.flags import with_values
from miles.config.numerics_rules import numerics_violations
from miles.config.parse import parse_flags, parse_train
from miles.errors import ConfigError
from miles.loop.exactness import check_exactness
from miles.loop.preflight import FAIL, OK, SKIP, WARN, Verdict
from miles.loop.trial import check_run

_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red", SKIP: "dim"}
_FLAG, _EXACT = "--json", "--true-on-policy"


def run(argv: list[str]) -> int:
    """Takes the flags of `miles train`, `--json` and `--true-on-policy`. Exit code 1 when a check failed."""
    as_json, only_exactness = _FLAG in argv, _EXACT in argv
    if "--help" in argv or "-h" in argv:
        print(
            "miles check takes every flag of `miles train`, --json for one JSON object instead of lines, and "
            "--true-on-policy to see only, with any answers, whether engine and trainer agree bit for bit.\n"
        )
    flags = [token for token in argv if token not in (_FLAG, _EXACT)]
    config = None if only_exactness else parse_train(flags, command="check").config
    console = Console(highlight=False, soft_wrap=True)
    start = time.monotonic()
    say = (lambda verdict: None) if as_json else (lambda verdict: _show(console, verdict))
    verdicts = _exactness(flags, say) if config is None else check_run(config, say)
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


def _exactness(flags: list[str], say: Callable[[Verdict], None]) -> list[Verdict]:
    config = with_values(parse_flags(flags).config, {"true_on_policy_mode": True})
    violations = list(numerics_violations(config))
    if config.model.hf_checkpoint is None:
        violations.append("miles check --true-on-policy needs --hf-checkpoint, the model to try")
    if violations:
        raise ConfigError(*violations)
    verdict = check_exactness(config)
    say(verdict)
    return [verdict]


def _show(console: Console, verdict: Verdict) -> None:
    status = Text(f"{verdict.status:<5}", style=_STYLES[verdict.status])
    console.print(status + Text(f"{verdict.name:<11} {verdict.text}"))
    for line in verdict.lines:
        console.print(Text(f"{'':<17} {line}"))
