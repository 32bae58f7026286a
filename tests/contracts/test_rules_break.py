"""Every rule is broken by a small tree that it must refuse, beside one that it must accept."""

from pathlib import Path

import pytest

from tests.contracts import freeze, rules

LONG_FUNCTION = "def long(x):\n" + "    x += 1\n" * 80
JIT = "import triton\n\n\n@triton.jit\n"

# rule -> (good files, bad files, part of the message)
MANY = rules.MAX_PACKAGE_CODE_LINES // 490 + 1  # files of 490 lines are too many, of 480 not

CASES = {
    "import_ranks": [
        ({"loop/run.py": "from miles.types import Sample\n"}, {"types.py": "from miles.loop import run\n"}, "rank 7"),
        (
            {"engine/a.py": "from miles.engine.b import c\n"},
            {"engine/a.py": "import miles.trainer.step\n"},
            "engine/a.py:1: engine (rank 5) imports trainer (rank 5)",
        ),
        (
            {"trainer/a.py": "def f():\n    from miles.ops import rope\n"},
            {"trainer/a.py": "def f():\n    from miles.engine import core\n"},
            "trainer/a.py:2",
        ),
        ({"errors.py": "from miles.types import Sample\n"}, {"fresh/a.py": ""}, "fresh has no rank"),
        ({"cli/a.py": "from miles import __version__\n"}, {"ops/a.py": "from miles import model\n"}, "imports model"),
    ],
    "import_cycles": [
        (
            {"loop/a.py": "from miles.loop.b import x\n", "loop/b.py": ""},
            {"loop/a.py": "from miles.loop.b import x\n", "loop/b.py": "from miles.loop import a\n"},
            "miles.loop.a -> miles.loop.b -> miles.loop.a",
        ),
    ],
    "heavy_packages_have_one_home": [
        ({"ops/a.py": "import triton.language as tl\n"}, {"engine/a.py": "import triton\n"}, "only in ops/"),
        ({"cli/a.py": "from rich.table import Table\n"}, {"loop/a.py": "import rich\n"}, "only in observe/, cli/"),
        (
            {"text/tokenizer.py": "import transformers\n", "engine/a.py": "import transformers_lite\n"},
            {"text/a.py": "from transformers import AutoTokenizer\n"},
            "text/a.py:1: transformers",
        ),
    ],
    "torch_free_files": [
        ({"observe/gpu.py": "import torch\n"}, {"observe/log.py": "from torch import nn\n"}, "observe/log.py:1"),
        ({"loop/build.py": "import torch\n"}, {"loop/supervisor.py": "import torch\n"}, "loop/supervisor.py:1"),
    ],
    "imports_at_the_top": [
        ({"ops/a.py": "try:\n    import triton\nexcept ImportError:\n    triton = None\n"}, {}, ""),
        ({"loop/on_ray.py": "def f():\n    import ray\n"}, {"loop/a.py": "def f():\n    import ray\n"}, "inside f"),
    ],
    "absolute_imports": [({"ops/a.py": "from miles.ops import b\n"}, {"ops/a.py": "from . import b\n"}, "relative")],
    "no_unsafe_calls": [
        ({"data/a.py": "import json\njson.loads(x)\n"}, {"data/a.py": "import pickle\n"}, "imports pickle"),
        ({"model/a.py": "load_file(x)\n"}, {"model/a.py": "import torch\ntorch.load(x)\n"}, "calls torch.load"),
        ({"cli/a.py": "run(['a'])\n"}, {"cli/a.py": "run('a', shell=True)\n"}, "shell or trust_remote_code"),
        (
            {"text/a.py": "load(x, trust_remote_code=False)\n"},
            {"text/a.py": "load(x, trust_remote_code=flag)\n"},
            "shell or trust_remote_code",
        ),
        ({"router/a.py": "serve('127.0.0.1')\n"}, {"router/a.py": "serve('0.0.0.0')\n"}, "loopback"),
        ({"rollout/rm_hub/sandbox/a.py": "exec(x)\n"}, {"rollout/a.py": "eval(x)\n"}, "calls eval"),
    ],
    "file_sizes": [
        ({"ops/a.py": "x = 1\n" * 500}, {"ops/a.py": "x = 1\n" * 501}, "501 lines, at most 500"),
        (
            {f"ops/a{n}.py": '"""Text."""\n\n# Comment.\n' + "x = 1\n" * 480 for n in range(MANY)},
            {f"ops/a{n}.py": "x = 1\n" * 490 for n in range(MANY)},
            f"{490 * MANY} lines of code in all",
        ),
    ],
    "function_sizes": [
        ({"ops/a.py": JIT + LONG_FUNCTION}, {"ops/a.py": LONG_FUNCTION}, "long has 81 lines, at most 80"),
        ({}, {"ops/a.py": "class A:\n    async " + LONG_FUNCTION.replace("\n", "\n    ")}, "ops/a.py:2"),
    ],
    "folder_names": [({"ops/a.py": ""}, {"ops/helpers/a.py": ""}, "ops/helpers: a folder")],
    "broad_excepts": [
        (
            {"loop/worker.py": "def run_guarded():\n    try:\n        f()\n    except Exception:\n        pass\n"},
            {"loop/worker.py": "def run():\n    try:\n        f()\n    except Exception:\n        pass\n"},
            "add 'loop/worker.py::run'",
        ),
        (
            {"ops/a.py": "try:\n    f()\nexcept BaseException:\n    g()\n    raise\n"},
            {"ops/a.py": "try:\n    f()\nexcept (ValueError, BaseException) as e:\n    raise KeyError from e\n"},
            "ops/a.py:3",
        ),
        (
            {"ops/a.py": "try:\n    f()\nexcept ValueError:\n    pass\n"},
            {"ops/a.py": "try:\n    f()\nexcept:\n    pass\n"},
            "add 'ops/a.py::module'",
        ),
    ],
}


def package(folder: Path, files: dict[str, str]) -> Path:
    root = folder / "miles"
    root.mkdir(parents=True)
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_every_rule_has_a_case():
    assert CASES.keys() == {rule.__name__ for rule in rules.PACKAGE_RULES}


@pytest.mark.parametrize("name, case", [(name, case) for name, cases in CASES.items() for case in cases])
def test_rule_accepts_and_refuses(tmp_path, name, case):
    good, bad, message = case
    rule = getattr(rules, name)
    assert list(rule(package(tmp_path / "good", good))) == []
    if bad:
        assert any(message in violation for violation in rule(package(tmp_path / "bad", bad)))


def test_unknown_metric_is_refused(tmp_path):
    text = (
        '"""train/ of a docstring, and train/... too."""\n'
        'known = ["train/loss", f"train/{x}", "rollout/length", "rollout/count_3", f"rollout/count_{x}"]\n'
        'also = "eval/a-pass@4"\n'
        'wrong = ["train/los", f"train/{x}_time", "rollout/lengt", f"rollout/coun_{x}"]\n'
    )
    tree = package(tmp_path, {"loop/a.py": text, "observe/names.py": 'y = "train/new"\n'})
    metrics = ["train/loss", "rollout/length/mean", "rollout/count_<reward>", "eval/<set>-pass@<k>"]
    assert [violation.split("'")[1] for violation in rules.metric_names(tree, metrics=metrics)] == [
        "train/los",
        "train/{}_time",
        "rollout/lengt",
        "rollout/coun_{}",
    ]


def test_flag_that_nothing_reads_is_refused(tmp_path):
    files = {"loop/a.py": "print(config.optim.lr)\n", "config/rules.py": "print(config.optim.seed)\n"}
    violations = list(rules.flags_are_read(package(tmp_path, files), flags=["lr", "seed"]))
    assert violations == ["seed: no file reads this flag"]


def test_workplace_path_is_refused(tmp_path):
    path = "/" + "work/data"
    for name, text in {"a.md": f"see {path}", "b.md": "see https://x.org/work/ and ../work/b", ".venv/c": path}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\xff\xfe" + path.encode())
    assert [violation.split(":")[0] for violation in rules.no_workplace_paths(tmp_path)] == ["a.md"]


def test_public_names_are_those_a_module_defines():
    names = set(freeze.public_name_lines())
    assert "miles.types.Sample.rollout_log_probs" in names
    assert "miles.types.SampleStatus.ABORTED" in names
    assert "miles.types.Generator.submit" in names  # a method of a protocol
    assert "miles.errors.DataError" in names
    assert not any("dataclass" in name or "._" in name for name in names)


def test_a_flag_that_changes_changes_its_line(monkeypatch):
    before = set(freeze.flag_lines())
    changed = dict(freeze.FLAGS)
    del changed["seed"]
    monkeypatch.setattr(freeze, "FLAGS", changed)
    assert before - set(freeze.flag_lines()) == {"--seed  int  1234"}
