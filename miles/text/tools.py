"""Tool calls in the text of an answer."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

END_OF_THINKING = "</think>"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`problem` says why a call cannot be read; the model gets to see it."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None


def tool_calls(text: str) -> list[ToolCall]:
    """The calls in an answer, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, in their order."""
    return [_read(found) for found in _CALL.findall(text.rpartition(END_OF_THINKING)[2])]


def without_calls(text: str) -> str:
    """The answer without its calls."""
    thought, end, said = text.rpartition(END_OF_THINKING)
    return thought + end + _CALL.sub("", said).strip()


def _read(text: str) -> ToolCall:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return ToolCall("", {}, f"error: the tool call cannot be read as JSON with name and arguments ({error})")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("", {}, "error: the name of a tool call is a text and its arguments are a mapping")
    return ToolCall(name, arguments)
