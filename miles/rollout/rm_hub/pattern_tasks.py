"""What a worker process does for `regex` and `json_schema`: a pattern can take forever and hold the interpreter."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry


def run(task: tuple[str, ...]) -> Any:
    """`("regex", pattern, answer)`, `("json_schema", schema, answer)`: whether the answer fits; `("schema_problem",
    schema)`: why it is none."""
    kind, *texts = task
    if kind == "regex":
        pattern, answer = texts
        return re.search(pattern, answer) is not None
    if kind == "json_schema":
        return fits(*texts)
    return schema_problem(*texts)


def fits(schema: str, answer: str) -> bool:
    """Whether the answer is JSON (RFC 8259, so without NaN) that the schema allows."""
    try:
        value = json.loads(answer, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return _validator(schema).is_valid(value)


def schema_problem(schema: str) -> str | None:
    """Why this is no schema; None when it is one."""
    try:
        type(_validator(schema)).check_schema(json.loads(schema))
        _validator(schema).is_valid({})  # follows the references that it needs
    except SchemaError as error:
        return f"it is not a JSON schema: {error.message}"
    return None


@functools.lru_cache(maxsize=64)  # the answers of a group share theirs
def _validator(schema: str) -> Validator:
    # An own registry, since the default one would fetch references from the network.
    loaded = json.loads(schema)
    return validator_for(loaded, default=Draft202012Validator)(loaded, registry=Registry())


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
