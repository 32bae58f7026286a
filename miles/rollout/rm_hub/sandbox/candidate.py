"""Runs inside a jail as `python candidate.py`: loads the model's program and calls its functions on request.

Requests come on descriptor 3 and replies go to 4, one Python literal a line: first the names that can be called, then
for each `(name, args, kwargs)` an `("ok", value, args)` with the arguments as they are after the call, or an
`("error", exception type, text)`. Only plain data crosses, so that no object of the program can pretend to be equal.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable
from typing import Any


def literal(value: Any, depth: int = 0) -> str:
    """Text of a value made of builtin types; values of their subclasses become plain."""
    if depth > 50:
        raise TypeError("it is nested too deeply")
    if value is None or value is True or value is False:
        return repr(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        text = float.__repr__(value)
        return {"inf": "1e999", "-inf": "-1e999"}.get(text, text)
    if isinstance(value, complex):
        return complex.__repr__(value)
    if isinstance(value, str):
        return str.__repr__(value)
    if isinstance(value, (bytes, bytearray)):
        return repr(bytes(value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k, depth + 1)}: {literal(v, depth + 1)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [literal(item, depth + 1) for item in value]
        if isinstance(value, list):
            return "[" + ", ".join(items) + "]"
        if isinstance(value, tuple):
            return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"
        return "{" + ", ".join(items) + "}" if items else "set()"
    raise TypeError(f"a {type(value).__name__} is not plain data")


def callables(namespace: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Public functions and classes by name, and the methods of a class Solution."""
    found = {name: value for name, value in namespace.items() if callable(value) and not name.startswith("_")}
    if isinstance(found.get("Solution"), type):
        solution = found["Solution"]()
        methods = [name for name in dir(solution) if not name.startswith("_")]
        found = {**{name: getattr(solution, name) for name in methods}, **found}
    return found


def main() -> None:
    requests, replies = os.fdopen(3, "rb"), os.fdopen(4, "wb")
    with open("program.py", "rb") as file:
        source = file.read()
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, "program.py", "exec"), namespace)
    found = callables(namespace)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    replies.write(repr(sorted(found)).encode() + b"\n")
    replies.flush()
    for line in requests:
        name, args, kwargs = ast.literal_eval(line.decode())
        try:
            reply = f"('ok', {literal(found[name](*args, **kwargs))}, {literal(args)})"
        except Exception as error:  # fault boundary: the tests decide what an error means
            reply = repr(("error", type(error).__name__, str(error)[:500]))
        replies.write(reply.encode() + b"\n")
        replies.flush()


main()
