"""The rules of `docs/testing.md` as functions from a package folder to a list of violations.

Each has a case in `test_rules_break.py` that breaks it.
"""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.contracts.tree import Module, functions, imports, modules, within

MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 80
MAX_PACKAGE_CODE_LINES = 23_600  # lines that hold code: not blank, no comment, no docstring
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
MAX_TEXT_BYTES = 1_000_000  # larger files are data
FORBIDDEN_FOLDERS = {"utils", "common", "helpers", "misc"}

# A folder imports only lower ranks and itself; top-level files of rank 0 may import each other.
RANKS = {
    "": -1,
    **dict.fromkeys(("types", "errors", "plugins"), 0),
    **dict.fromkeys(("config", "ops"), 1),
    **dict.fromkeys(("observe", "text"), 2),
    **dict.fromkeys(("model", "data", "report", "quickstart"), 3),
    **dict.fromkeys(("weights", "checkpoint", "router", "plan"), 4),
    **dict.fromkeys(("engine", "trainer", "rollout"), 5),
    "evals": 6,
    "loop": 7,
    "cli": 8,
    "__main__": 9,
}

# Heavy packages and the files or folders that may import them.
HOMES = {
    "ray": ("loop/on_ray.py",),
    "wandb": ("observe/trackers.py",),
    "tensorboard": ("observe/trackers.py",),
    "torch.utils.tensorboard": ("observe/trackers.py",),
    "transformers": ("text/tokenizer.py", "model/spec.py"),
    "starlette": ("engine/server.py", "router/", "report/server.py"),
    "uvicorn": ("engine/server.py", "router/", "report/server.py"),
    "triton": ("ops/",),
    "rich": ("observe/", "cli/", "quickstart/show.py"),
}

# Files that are imported where torch must not be: its import takes seconds.
TORCH_FREE = (
    *("types.py", "errors.py", "plugins.py", "__init__.py", "__main__.py"),
    *("config/", "observe/", "cli/", "report/", "text/", "data/", "plan/", "rollout/rm_hub/"),
    *("loop/supervisor.py", "loop/recover.py", "loop/watch.py", "loop/release.py"),
)
TORCH_FREE_EXCEPT = ("observe/gpu.py",)

# They guard a dependency that may be missing.
OPTIONAL_IMPORTS = ("observe/trackers.py", "observe/heat.py", "loop/on_ray.py")

# Where a broad except may stand, as file::function: each turns what it catches into a counted or reported failure.
FAULT_BOUNDARIES = {
    "plugins.py::_import_module",
    "plugins.py::run",
    "text/tokenizer.py::load_tokenizer",
    "loop/worker.py::run_guarded",
    "checkpoint/background.py::_run",
    "engine/local.py::_serve",
    "trainer/hooks.py::_call",
    "rollout/client.py::_dispatch",
    "rollout/custom_reward.py::_call",
    "rollout/hooks.py::run",
    "rollout/hooks.py::at_once",
    "rollout/generate_hub/agentic_tool_call.py::generate",
    "rollout/generate_hub/multi_turn.py::_run",
    "rollout/rm_hub/fork_server.py::work",
    "rollout/rm_hub/sandbox/candidate.py::main",
    "report/sample_view.py::_tokenizer",
}

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {
    *("torch.load", "torch.hub.load", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
}
SANDBOX = "rollout/rm_hub/sandbox/"  # runs the programs that models write, behind the walls of docs/rewards.md

HOOK_READERS = ("rollout/hooks.py", "rollout/generate_hub/agentic_tool_call.py")

METRIC = re.compile(r"(rollout|train|perf|eval|passrate)/[\w@][\w@/-]*")
WORKPLACE = re.compile(r"(?<![\w.-])/(work|opt/wheels|opt/pypi)\b")


def import_ranks(package: Path) -> Iterator[str]:
    for module in modules(package):
        if module.home not in RANKS:
            yield f"{module.path}: {module.home} has no rank; give it one in RANKS"
            continue
        for name, line in imports(module.tree):
            if not within(name, package.name) or name == package.name:
                continue
            home = name.split(".")[1]
            if home == module.home or home not in RANKS:  # a name of the package's own __init__ has no rank
                continue
            rank, other = RANKS[module.home], RANKS[home]
            if other > rank or (other == rank and rank > 0):
                yield f"{module.path}:{line}: {module.home} (rank {rank}) imports {home} (rank {other})"


def import_cycles(package: Path) -> Iterator[str]:
    names = {module.name for module in modules(package)}
    graph = {module.name: sorted(_targets(module, names)) for module in modules(package)}
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> Iterator[str]:
        if name in trail:
            yield " -> ".join([*trail[trail.index(name) :], name])
        elif name not in done:
            for target in graph[name]:
                yield from visit(target, [*trail, name])
            done.add(name)

    for name in graph:
        yield from visit(name, [])


def _targets(module: Module, names: set[str]) -> set[str]:
    """Modules that `module` imports; `from a import b` is module `a.b` when there is one, else `a`."""
    targets = {name if name in names else name.rpartition(".")[0] for name, _ in imports(module.tree)}
    return targets & names


def heavy_packages_have_one_home(package: Path) -> Iterator[str]:
    for module in modules(package):
        for name, line in imports(module.tree):
            for heavy, homes in HOMES.items():
                if within(name, heavy) and not module.path.startswith(homes):
                    yield f"{module.path}:{line}: {heavy} is imported only in {', '.join(homes)}"


def torch_free_files(package: Path) -> Iterator[str]:
    for module in modules(package):
        if module.path.startswith(TORCH_FREE) and module.path not in TORCH_FREE_EXCEPT:
            for name, line in imports(module.tree):
                if within(name, "torch"):
                    yield f"{module.path}:{line}: imports torch, which takes seconds"


def imports_at_the_top(package: Path) -> Iterator[str]:
    for module in modules(package):
        if module.path not in OPTIONAL_IMPORTS:
            for function in functions(module.tree):
                for name, line in imports(function):
                    yield f"{module.path}:{line}: {name} is imported inside {function.name}"


def absolute_imports(package: Path) -> Iterator[str]:
    for module in modules(package):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                yield f"{module.path}:{node.lineno}: relative import"


def no_unsafe_calls(package: Path) -> Iterator[str]:
    """Nothing is unpickled, no shell reads a text, no model brings code, no server listens to the network unasked."""
    for module in modules(package):
        for name, line in imports(module.tree):
            if name.split(".")[0] in UNSAFE_MODULES:
                yield f"{module.path}:{line}: imports {name}"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and node.value == "0.0.0.0":
                yield f"{module.path}:{node.lineno}: a server listens on loopback unless the user says otherwise"
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            settings = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called in UNSAFE_CALLS or (called in ("eval", "exec") and not module.path.startswith(SANDBOX)):
                yield f"{module.path}:{node.lineno}: calls {called}"
            if settings.get("shell", "False") != "False" or settings.get("trust_remote_code", "False") != "False":
                yield f"{module.path}:{node.lineno}: shell or trust_remote_code is on"


def file_sizes(package: Path) -> Iterator[str]:
    total = 0
    for module in modules(package):
        lines = module.text.count("\n")
        total += len(code_lines(module))
        if lines > MAX_FILE_LINES:
            yield f"{module.path}: {lines} lines, at most {MAX_FILE_LINES}"
    if total > MAX_PACKAGE_CODE_LINES:
        yield f"{package.name}: {total} lines of code in all, at most {MAX_PACKAGE_CODE_LINES}"


def code_lines(module: Module) -> set[int]:
    """Numbers of the lines that hold code. A text that stands alone, such as a docstring, is none."""
    texts = {
        line
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    held = {
        line
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline)
        if token.type not in LAYOUT_TOKENS
        for line in range(token.start[0], token.end[0] + 1)
    }
    return held - texts


def function_sizes(package: Path) -> Iterator[str]:
    for module in modules(package):
        for function in functions(module.tree):
            assert function.end_lineno is not None
            lines = function.end_lineno - function.lineno + 1
            kernel = any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
            if lines > MAX_FUNCTION_LINES and not kernel:
                place = f"{module.path}:{function.lineno}"
                yield f"{place}: {function.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"


def folder_names(package: Path) -> Iterator[str]:
    for folder in sorted(package.rglob("*/")):
        if folder.name in FORBIDDEN_FOLDERS:
            yield f"{folder.relative_to(package)}: a folder is named by what it does"


def broad_excepts(package: Path) -> Iterator[str]:
    for module in modules(package):
        for line, function in _swallowing_handlers(module.tree, "module"):
            place = f"{module.path}::{function}"
            if place not in FAULT_BOUNDARIES:
                yield f"{module.path}:{line}: broad except; name the errors, or add {place!r} to FAULT_BOUNDARIES"


def _swallowing_handlers(node: ast.AST, function: str) -> Iterator[tuple[int, str]]:
    """Broad handlers that do not end with a bare `raise`, with the innermost function around each."""
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        if isinstance(child, ast.ExceptHandler) and _is_broad(child):
            last = child.body[-1]
            if not (isinstance(last, ast.Raise) and last.exc is None):
                yield child.lineno, inside
        yield from _swallowing_handlers(child, inside)


def _is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in caught)


def metric_names(package: Path, *, metrics: Iterable[str]) -> Iterator[str]:
    """Every text in the code that looks like a metric is one of `metrics`, the names that `observe/names.py` explains.

    A `<part>` of a metric and a `{part}` of an f-string stand for anything; a text may also be all but the last part,
    as in `rollout/response_len` for its `/mean`.
    """
    patterns = [re.compile(re.sub(r"<\w+>", "[^/]+", name)) for name in metrics]
    groups = {name.rpartition("/")[0] for name in metrics}

    def is_known(pieces: list[str]) -> bool:
        if len(pieces) == 1:
            return pieces[0] in groups or any(pattern.fullmatch(pieces[0]) for pattern in patterns)
        open_ended = re.compile(".+".join(map(re.escape, pieces)))
        return any(open_ended.fullmatch(name) for name in metrics)

    for module in modules(package):
        if module.path != "observe/names.py":
            for line, pieces in _texts(module.tree):
                name = "{}".join(pieces)
                if METRIC.fullmatch(name.replace("{}", "x")) and not is_known(pieces):
                    yield f"{module.path}:{line}: metric {name!r} is not in observe/names.py"


def _texts(node: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Line and literal pieces of each text; an f-string has several pieces, with a value between two of them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr):
            pieces = [""]
            for part in child.values:
                if isinstance(part, ast.Constant):
                    pieces[-1] += str(part.value)
                else:
                    pieces.append("")
            yield child.lineno, pieces
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.lineno, [child.value]
        else:
            yield from _texts(child)


def flags_are_read(package: Path, *, flags: Iterable[str]) -> Iterator[str]:
    """A flag that nothing outside `config/` reads does nothing, whatever its help says. The functions of the user are
    read by the name of their flag."""
    read: set[str] = set()
    for module in modules(package):
        if module.home != "config":
            read |= {node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)}
        if module.path in HOOK_READERS:
            read |= {node.value for node in ast.walk(module.tree) if isinstance(node, ast.Constant)}
    for flag in flags:
        if flag not in read:
            yield f"{flag}: no file reads this flag"


def no_workplace_paths(repository: Path) -> Iterator[str]:
    """Takes the repository, not the package: nothing that is committed may name a path of one machine."""
    for folder, subfolders, files in os.walk(repository):
        kept = [name for name in subfolders if name == ".ci" or not name.startswith(".")]
        subfolders[:] = sorted(set(kept) - {"runs", "build", "dist", "__pycache__"})
        for file in sorted(set(files) - {".git"}):  # a file in a worktree of git
            path = Path(folder, file)
            if path.name == ".git":  # of a linked working tree: names where the repository is
                continue
            if path.stat().st_size > MAX_TEXT_BYTES:
                continue
            try:
                lines = path.read_text(encoding="utf-8").split("\n")
            except UnicodeDecodeError:
                continue
            for number, line in enumerate(lines, start=1):
                if match := WORKPLACE.search(line):
                    yield f"{path.relative_to(repository)}:{number}: names {match[0]}, a path of one machine"


PACKAGE_RULES: tuple[Callable[[Path], Iterator[str]], ...] = (
    import_ranks,
    import_cycles,
    heavy_packages_have_one_home,
    torch_free_files,
    imports_at_the_top,
    absolute_imports,
    no_unsafe_calls,
    file_sizes,
    function_sizes,
    folder_names,
    broad_excepts,
)
