"""The commands of the user's pages.

A block marked `sh` is run; after `sh fails` a `text` block has parts of the message. One marked `sh gpu`, `sh network`,
`sh long` or `sh live` needs what this machine may not have, or does not end by itself: it is only parsed.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from miles.cli.main import COMMANDS
from miles.config.flags import FLAGS
from miles.config.parse import parse_train
from miles.config.resolve import resolve
from miles.config.sections import RunConfig
from miles.model.activations import Recompute
from miles.observe.names import METRICS
from miles.plan.advice import changed, fastest
from miles.plan.machine import cpu_machine, gpu_machine
from miles.plan.memory import DEFAULT_PROMPT_LEN, DEFAULT_ROWS, Job, estimate, state_bytes, token_bytes
from miles.plan.seconds import step_seconds
from miles.plan.shapes import SHAPES
from tests.e2e.harness import REPOSITORY, is_one_error

DOCS = REPOSITORY / "docs"
PAGES = ("start", "size_it", "recipes", "lora", "speed_and_stability", "trainer", "debug", "how_it_works")
IN_DEPTH = ("reliability", "rewards", "sampling", "gap", "see_the_run", "shared_prompts")  # may be longer
SLOW = {"see_the_run"}
MARKS = {"": True, "fails": True, "gpu": False, "network": False, "long": False, "live": False}  # whether it is run
PARSED_AS_TRAIN = {"train", "check", "rehearse"}
IN_PROCESS = {"train", "eval"}


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text()


def blocks(page: str) -> list[tuple[str, str]]:
    """(mark, content) of each shell block."""
    return re.findall(r"^```sh ?(\w*)\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)


def commands(content: str) -> list[list[str]]:
    """The words of each line that begins with `miles`; a backslash continues a line."""
    lines = content.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("miles ")]


def named_flags() -> set[str]:
    """All flags: those of `miles train`, and of other commands as their files spell them."""
    known = {flag.spelling for flag in FLAGS.values()} | {"--config", "--explain"}
    files = [*(REPOSITORY / "miles" / "cli").glob("*.py"), REPOSITORY / "recipes" / "grpo_gsm8k.py"]
    return known | {flag for file in files for flag in re.findall(r"[\"'`](--[a-z][a-z-]+)", file.read_text())}


def shell(content: str, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(["bash", "-ec", content], cwd=folder, env=environment, check=True, timeout=30)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in (*PAGES, *IN_DEPTH)]
)
def test_blocks_that_can_run_here_run(miles, page):
    for name in ("miles/quickstart/model", "recipes"):
        place = miles.folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(REPOSITORY / name)
    if page not in ("start", "recipes"):
        shell(blocks("recipes")[0][1], miles.folder)
    for mark, content in blocks(page):
        if not MARKS[mark]:
            continue
        lines = commands(content)
        for argv in lines:
            extra = ["--device", "cpu", "--in-process"] if argv[0] in IN_PROCESS else []
            ended = miles.start(*argv, *extra).wait()
            if mark == "fails":
                parts = re.search(re.escape(content) + r"```\n+```text\n(.*?)```", text_of(page), re.DOTALL)
                is_one_error(ended, 2, *parts[1].splitlines())
            else:
                assert ended.code == 0, (argv, ended.out[-2000:], ended.err[-2000:])
        if not lines:
            shell(content, miles.folder)


@pytest.mark.parametrize("page", (*PAGES, *IN_DEPTH))
def test_blocks_that_need_more_are_well_formed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shell(blocks("recipes")[0][1], tmp_path)
    for mark, content in blocks(page):
        for argv in commands(content):
            assert argv[0] in COMMANDS, argv
            if argv[0] in PARSED_AS_TRAIN and not MARKS[mark]:
                parse_train(argv[1 : argv.index("--faults") if "--faults" in argv else None])
        for target in re.findall(r"^make (\w+)", content, re.MULTILINE):
            assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        for script in re.findall(r"\bpython (\S+\.py)", content):
            assert (REPOSITORY / script).is_file(), script
        assert not MARKS[mark] or "$" not in content, "a run block has no variables of the reader's shell"


@pytest.mark.parametrize("page", [*sorted(path.stem for path in DOCS.glob("*.md")), "../README"])
def test_what_a_page_names_exists(page):
    text, flags = re.sub(r"^```sh fails\n.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL), named_flags()
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])", text)):
        plain = flag.replace("--sglang-", "--engine-")
        assert {plain, plain.replace("--no-", "--")} & flags, flag
    for command in set(re.findall(r"(?:`|^ *)miles ([a-z]+)", text, re.MULTILINE)):
        assert command in COMMANDS, command
    for metric in set(re.findall(r"`((?:rollout|train|perf)/[\w/]+)`", text)):
        assert metric in METRICS, metric
    for link in set(re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text)):
        assert ((DOCS / f"{page}.md").parent / link).exists(), link
    for path in set(re.findall(r"`(miles/[\w/]+\.py)`", text)):
        assert (REPOSITORY / path).is_file(), path
    assert page not in PAGES or len(text.splitlines()) <= 150


def test_a_reader_can_run_all_pages_in_one_folder():
    """A run name belongs to one page: another page's command with the same name would be refused."""
    pages: dict[str, set[str]] = {}
    for page in sorted(path.stem for path in DOCS.glob("*.md")):
        for mark, content in blocks(page):
            for name in re.findall(r"--run-name (\S+)|MILES_RUN=(\S+)", content if mark != "fails" else ""):
                pages.setdefault("".join(name), set()).add(page)
    assert len(pages) > 20
    assert {name: found for name, found in pages.items() if len(found) > 1} == {}


def test_commands_of_the_readme_are_well_formed():
    train = [argv for argv in commands(text_of("../README")) if argv[0] == "train"]
    assert len(train) == 1
    parse_train(train[0][1:])


def test_quoted_messages_are_those_of_the_code():
    """The first column of the tables of debug.md, as it stands in the source."""
    files = (REPOSITORY / "miles").rglob("*.py")
    source = re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text() for file in files))
    quoted = re.findall(r"^\| `([^`]+)`", text_of("debug"), re.MULTILINE)
    assert len(quoted) > 30
    assert [text for text in quoted if text not in source] == []


def test_sizes_are_those_of_the_code():
    text = text_of("size_it")
    gpu = gpu_machine("H200", host_bytes=0, disk_bytes=0)
    cpu = cpu_machine(host_bytes=0, disk_bytes=0)
    jobs = [Job(RunConfig(), SHAPES["Qwen3-0.6B"], machine, 100, 1000) for machine in (gpu, cpu)]
    num = jobs[0].spec.num_parameters
    together = " | ".join(f"**{sum(state_bytes(job).values()) // num}**" for job in jobs)
    assert f"| **together** | {together} |" in text
    assert f"master and moments | {' | '.join(str(job.checkpoint_bytes // num) for job in jobs)} |" in text
    assert f"({DEFAULT_ROWS['cuda']} on a GPU, {DEFAULT_ROWS['cpu']} on" in text
    assert f"{token_bytes(jobs[0].spec, 2):,} bytes a token" in text
    assert f"({num / 1e6:.0f} million)" in text
    assert f"takes {num * 18 / 2**30:.1f} GiB, and" in text
    small, large = SHAPES["Qwen3-0.6B"], SHAPES["Qwen3-4B"]
    for spec, again in ((small, Recompute()), (large, Recompute()), (large, Recompute(num_layers=36))):
        assert f"{2 * again.kept_numbers(spec) / 1e6:.1f} MB" in text
    left = [f"{2 * Recompute(selective=True).kept_numbers(spec) / 1e6:.1f}" for spec in (small, large)]
    assert f"{' and '.join(left)} MB are left" in text
    unified = gpu_machine("", memory_gib=128, unified=True, host_bytes=0, disk_bytes=0)
    planned = Job(resolve(RunConfig())[0], large, unified, DEFAULT_PROMPT_LEN, 1024)
    memory, best = estimate(planned), changed(planned, fastest(planned) or {})
    assert f"a cache of {memory.cache_tokens:,} tokens is left" in text
    seconds = [step_seconds(one, estimate(one)).step for one in (planned, best)]
    assert f"a step takes up to {seconds[0]:.0f} s. It is fastest, up to {seconds[1]:.0f} s, with a cache" in text
