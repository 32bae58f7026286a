"""Rewards for the form of an answer: `regex` and `json_schema`."""

from __future__ import annotations

import json
import re
from typing import Any

from miles.rollout.rm_hub.grader import Grader, Reward
from miles.rollout.rm_hub.math_answer import after_thinking
from miles.types import Sample

PATTERN_TASKS = "miles.rollout.rm_hub.pattern_tasks"
_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)


class RegexGrader(Grader):
    """`regex`: 1 when the pattern in `metadata["regex"]`, else in the label, is found in the answer (`re.search`)."""

    def start(self) -> None:
        self.tools.pools.get(PATTERN_TASKS, timeout_s=self.tools.config.reward.rm_timeout)

    def label_problem(self, label: Any, metadata: dict[str, Any]) -> str | None:
        pattern = metadata.get("regex", label)
        if not isinstance(pattern, str) or not pattern:
            return 'there is no pattern in the label or in metadata["regex"]'
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            return f"it is not a regular expression: {error}"
        return None

    async def compare(self, answer: str, sample: Sample) -> Reward:
        task = ("regex", sample.metadata.get("regex", sample.label), answer)
        return int(bool(await self.tools.run(PATTERN_TASKS, task, about=f"pattern {task[1]!r:.80}")))


class JsonSchemaGrader(Grader):
    """`json_schema`: 1 when the answer is JSON that the schema in `metadata["json_schema"]`, else in the label, allows.

    The schema is a mapping or its JSON text, of any draft that `$schema` names (2020-12 when it names none).
    """

    place = "after the thinking part, the last fenced block, else the whole text"

    def start(self) -> None:
        self.tools.pools.get(PATTERN_TASKS, timeout_s=self.tools.config.reward.rm_timeout)

    def find(self, response: str) -> str | None:
        text = after_thinking(response)
        blocks = fenced_blocks(text, languages=("", "json")) if text else []
        return (blocks[-1] if blocks else text) or None

    def label_problem(self, label: Any, metadata: dict[str, Any]) -> str | None:
        try:
            schema = _schema(label, metadata)
            if not isinstance(json.loads(schema), (dict, bool)):
                return "it is not a JSON schema"
        except (ValueError, TypeError) as error:
            return f'no schema can be read in it or in metadata["json_schema"]: {error}'
        pool = self.tools.pools.get(PATTERN_TASKS, timeout_s=self.tools.config.reward.rm_timeout)
        outcome = pool.submit(("schema_problem", schema)).result()
        return outcome.detail if outcome.failure else outcome.value

    async def compare(self, answer: str, sample: Sample) -> Reward:
        task = ("json_schema", _schema(sample.label, sample.metadata), answer)
        return int(bool(await self.tools.run(PATTERN_TASKS, task, about=f"JSON {answer!r:.80}")))


def fenced_blocks(text: str, *, languages: tuple[str, ...]) -> list[str]:
    """The contents of closed fenced blocks of these languages, in order."""
    return [block[2] for block in _FENCED.finditer(text) if block[1].lower() in languages]


def _schema(label: Any, metadata: dict[str, Any]) -> str:
    schema = metadata.get("json_schema", label)
    return schema if isinstance(schema, str) else json.dumps(schema)
