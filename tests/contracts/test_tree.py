"""The rules, applied to this repository."""

import subprocess
import sys
from collections import Counter

import pytest

from miles.config.fields import ACTIVE
from miles.config.flags import FLAGS
from miles.observe import names
from tests.conftest import REPOSITORY
from tests.contracts import freeze, rules
from tests.contracts.tree import modules

PACKAGE = REPOSITORY / "miles"

# Modules of the supervisor's side, and what they must not bring in.
LIGHT_MODULES = ("miles.cli.main", "miles.config.explain", "miles.loop.supervisor")
HEAVY = {"torch", "transformers", "numpy", "pyarrow", "sympy"}


@pytest.mark.parametrize("rule", rules.PACKAGE_RULES, ids=lambda rule: rule.__name__)
def test_package_keeps(rule):
    assert list(rule(PACKAGE)) == []


def test_every_metric_in_the_code_is_explained():
    assert list(rules.metric_names(PACKAGE, metrics=names.METRICS)) == []


def test_every_flag_is_read():
    """Flags that are satisfied by the design, or leave no choice, need no reader."""
    active = [name for name, flag in FLAGS.items() if flag.effect == ACTIVE and len(flag.choices) != 1]
    assert list(rules.flags_are_read(PACKAGE, flags=active)) == []


def test_nothing_names_a_path_of_one_machine():
    assert list(rules.no_workplace_paths(REPOSITORY)) == []


@pytest.mark.parametrize("file", freeze.FROZEN)
def test_frozen_list_is_up_to_date(file):
    """A flag or a public name came, went or changed. If that is meant: `python -m tests.contracts.freeze`."""
    written = Counter((freeze.FOLDER / file).read_text().splitlines())
    actual = Counter(freeze.FROZEN[file]())
    assert sorted((written - actual).elements()) == [], "gone or changed"
    assert sorted((actual - written).elements()) == [], "new or changed"


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_module_is_light(module):
    code = f"import sys, {module}; print(*sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["train", "--help"]])
def test_command_is_light(argv):
    code = (
        "import sys\n"
        "from miles.cli.main import main\n"
        "try:\n"
        f"    main({argv})\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print(*sorted({HEAVY} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []


def test_every_name_in_the_tables_exists():
    """A fault boundary that was renamed or removed would silently allow another."""
    places = {f"{module.path}::{name}" for module in modules(PACKAGE) for name in _function_names(module)}
    assert sorted(rules.FAULT_BOUNDARIES - places) == []


def _function_names(module):
    return {function.name for function in rules.functions(module.tree)}
