"""Runs inside a jail of its own as `python tester.py`: the data's test code, against functions of another jail.

The functions of the program are stand-ins that send their arguments over descriptor 4 and read the result from 3 (see
candidate.py). Descriptor 5 gets the word that stands in `token` when the last line of the tests has been passed.
"""

from __future__ import annotations

import ast
import builtins
import os
from collections.abc import Callable
from typing import Any

from_program, to_program = os.fdopen(3, "rb"), os.fdopen(4, "wb")


def stand_in(name: str) -> Callable[..., Any]:
    """A function that is called in the other jail."""

    def call(*args: Any, **kwargs: Any) -> Any:
        to_program.write(repr((name, args, kwargs)).encode() + b"\n")
        to_program.flush()
        line = from_program.readline()
        if not line.endswith(b"\n"):
            raise RuntimeError(f"the program ended in {name}")
        kind, *reply = ast.literal_eval(line.decode())
        if kind == "error":
            known = vars(builtins).get(reply[0])
            if isinstance(known, type) and issubclass(known, Exception) and known is not AssertionError:
                raise known(reply[1])
            raise RuntimeError(reply[1])
        value, after = reply
        for ours, theirs in zip(args, after, strict=True):
            if isinstance(ours, list):
                ours[:] = theirs
            elif isinstance(ours, (dict, set)):
                ours.clear()
                ours.update(theirs)
        return value

    call.__name__ = name
    return call


def main() -> None:
    names = ast.literal_eval(from_program.readline().decode())
    with open("tests.py", "rb") as file:
        tests = file.read()
    with open("token", "rb") as file:
        token = file.read()
    exec(compile(tests, "tests.py", "exec"), {"__name__": "tests", **{name: stand_in(name) for name in names}})
    os.write(5, token)


main()
