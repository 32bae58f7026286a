"""`samples/*.parquet`: every answer of a rollout or an evaluation, as it was trained on or graded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from miles.errors import StorageError
from miles.types import Sample

SCHEMA = pyarrow.schema(
    [
        ("set", pyarrow.string()),  # name of the evaluation set; "train" for a rollout
        ("group_index", pyarrow.int64()),
        ("index", pyarrow.int64()),
        ("prompt", pyarrow.string()),  # rendered text, or JSON of the messages
        ("response", pyarrow.string()),
        ("label", pyarrow.string()),
        ("reward", pyarrow.float64()),
        ("status", pyarrow.string()),
        ("tokens", pyarrow.list_(pyarrow.int32())),
        ("response_length", pyarrow.int32()),
        ("loss_mask", pyarrow.list_(pyarrow.int8())),
        ("rollout_log_probs", pyarrow.list_(pyarrow.float32())),
        ("weight_versions", pyarrow.list_(pyarrow.int32())),
        ("metadata", pyarrow.string()),  # JSON
    ]
)


def write_samples(path: Path, samples_by_set: Mapping[str, Sequence[Sample]], *, reward_key: str | None = None) -> None:
    """Write samples; a file of that name is replaced whole. A dict reward is stored as its `reward_key` field. Raises
    `StorageError` when the file cannot be written."""
    rows = [_row(name, sample, reward_key) for name, samples in samples_by_set.items() for sample in samples]
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=SCHEMA), file)
        temporary.replace(path)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot write the samples: {error.strerror or error}; make room or get the rights there, then "
            "resume the run"
        ) from error


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The rows of a file written by `write_samples`, with the columns of `SCHEMA`."""
    return pyarrow.parquet.read_table(path).to_pylist()


def _row(name: str, sample: Sample, reward_key: str | None) -> dict[str, Any]:
    reward = sample.reward
    return {
        "set": name,
        "group_index": sample.group_index,
        "index": sample.index,
        "prompt": _text(sample.prompt),
        "response": sample.response,
        "label": None if sample.label is None else _text(sample.label),
        "reward": reward[reward_key] if isinstance(reward, dict) and reward_key else reward,
        "status": sample.status.value,
        "tokens": sample.tokens,
        "response_length": sample.response_length,
        "loss_mask": sample.loss_mask,
        "rollout_log_probs": sample.rollout_log_probs,
        "weight_versions": sample.weight_versions,
        "metadata": _text(sample.metadata),
    }


def _text(value: Any) -> str:
    """Of anything that a data file can hold: dates and bytes as Python shows them, half a surrogate pair escaped."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode(errors="backslashreplace").decode()
