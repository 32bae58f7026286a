"""The parsed modules of a package, as the contract rules see them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Module:
    """`path` is relative to the package folder; `name` is dotted, `miles.ops.rope`."""

    path: str
    name: str
    text: str
    tree: ast.Module

    @property
    def home(self) -> str:
        """The folder or top-level file that has a rank: `ops`, `types`; "" for the package's own `__init__`."""
        return "" if self.path == "__init__.py" else self.path.split("/")[0].removesuffix(".py")


@functools.cache
def modules(package: Path) -> tuple[Module, ...]:
    """Every Python file of a package, sorted by path."""
    found = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package).as_posix()
        dotted = ".".join([package.name, *relative.removesuffix(".py").split("/")]).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        found.append(Module(relative, dotted, text, ast.parse(text, filename=relative)))
    return tuple(found)


def imports(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names that are imported below `node`, with their lines. `from a import b` gives `a.b`."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            # A relative import has no module to look up here; rules.absolute_imports refuses it.
            yield from ((f"{child.module}.{alias.name}", child.lineno) for alias in child.names if not child.level)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def within(name: str, package: str) -> bool:
    """Whether a dotted name is `package` or something in it."""
    return name == package or name.startswith(package + ".")
