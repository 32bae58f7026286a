from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from miles.rollout.rm_hub.builtin import BuiltinReward
from tests.unit.rollout.rm_hub.graders import grade, make_reward

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def schema_reward() -> Iterator[BuiltinReward]:
    with make_reward("json_schema", rm_timeout=5.0) as made:
        yield made


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"name": "Ada", "age": 36}', 1),
        ('<think>{"x": 1}</think>\n{"name": "Ada", "age": 36}', 1),
        ('Here:\n```json\n{"name": "Ada", "age": 36}\n```\nDone.', 1),
        ('```json\n{"name": 1}\n```\n```json\n{"name": "Ada", "age": 36}\n```', 1),
        ('Here: {"name": "Ada", "age": 36}', 0),
        ('{"name": "Ada", "age": 36.5}', 0),
        ('{"name": "Ada", "age": -1}', 0),
        ('{"name": "Ada"}', 0),
        ('{"name": "Ada", "age": 36, "more": 1}', 0),
        ('{"name": "Ada", "age": NaN}', 0),
        ('{"name": "Ada", "age": 36', 0),
        ("[" * 100_000, 0),
        ("", 0),
    ],
)
def test_json_schema(schema_reward: BuiltinReward, response: str, expected: int) -> None:
    assert grade(schema_reward, [(SCHEMA, response), (json.dumps(SCHEMA), response)]) == [expected] * 2
    assert grade(schema_reward, [(None, response)], {"json_schema": SCHEMA}) == [expected]


@pytest.mark.parametrize(
    "label", [None, "no schema", 5, {"type": "strnig"}, {"$ref": "https://example.org/schema.json"}, ["type"]]
)
def test_a_label_that_is_no_schema_is_refused(schema_reward: BuiltinReward, label: Any) -> None:
    assert schema_reward.label_problem(label, {}) is not None


def test_a_schema_is_accepted(schema_reward: BuiltinReward) -> None:
    local = {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}
    assert [schema_reward.label_problem(label, {}) for label in (SCHEMA, json.dumps(SCHEMA), local)] == [None] * 3
    assert grade(schema_reward, [(local, "7"), (local, "7.5")]) == [1, 0]


def test_regex_searches_the_answer_within_its_deadline() -> None:
    with make_reward("regex", rm_timeout=0.5) as reward:
        pairs = [(r"^\d+$", "42"), (r"^\d+$", "42 "), (r"\d", "<think>1</think>x"), ("(a+)+$", "a" * 40 + "b")]
        assert grade(reward, pairs) == [1, 1, 0, 0]
        assert grade(reward, [("^x", "xyz")], {"regex": "^y"}) == [0]
        assert "not a regular expression" in (reward.label_problem("(", {}) or "")
        assert reward.label_problem(None, {}) is not None
