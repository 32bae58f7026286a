"""`samples/*.parquet`: every answer of a rollout or an evaluation, as it was trained on or graded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from miles.errors import StorageError
from miles.types import Sample, SampleStatus

_IDS = pyarrow.list_(pyarrow.list_(pyarrow.int32()))
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
        ("kept_token_ids", _IDS),
        ("top_token_ids", _IDS),
        ("top_log_probs", pyarrow.list_(pyarrow.list_(pyarrow.float32()))),
        ("exact", pyarrow.string()),  # JSON: what the columns above cannot tell apart
    ]
)
_AS_THEY_ARE = (
    *("group_index", "index", "response", "tokens", "response_length"),
    *("loss_mask", "rollout_log_probs", "weight_versions"),
)
_ARRAYS = {"kept_token_ids": np.int32, "top_token_ids": np.int32, "top_log_probs": np.float32}


def write_samples(path: Path, samples_by_set: Mapping[str, Sequence[Sample]], *, reward_key: str | None = None) -> None:
    """Write samples; a file of that name is replaced whole. A dict reward is stored as its `reward_key` field. Raises
    `StorageError` when the file cannot be written."""
    rows = [
        {"set": name, **to_row(sample, reward_key=reward_key)}
        for name, samples in samples_by_set.items()
        for sample in samples
    ]
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=SCHEMA), file, compression="zstd")
        temporary.replace(path)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot write the samples: {error.strerror or error}; make room or get the rights there, then "
            "resume the run"
        ) from error


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The rows of a file written by `write_samples`, with the columns of `SCHEMA`."""
    return pyarrow.parquet.read_table(path).to_pylist()


def load_samples(path: Path) -> dict[str, list[Sample]]:
    """The samples of a file written by `write_samples`, by set. Raises `StorageError` when there is no such file."""
    try:
        rows = read_samples(path)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise StorageError(f"{path}: cannot read the samples: {error}; give a file that Miles has written") from error
    samples: dict[str, list[Sample]] = {}
    for row in rows:
        samples.setdefault(row["set"], []).append(from_row(row))
    return samples


def to_row(sample: Sample, *, reward_key: str | None = None) -> dict[str, Any]:
    """A sample as plain values of JSON, from which `from_row` makes an equal one."""
    reward = sample.reward
    number = reward[reward_key] if isinstance(reward, dict) and reward_key else reward
    exact = {
        "prompt": None if isinstance(sample.prompt, str) else sample.prompt,
        "label": None if isinstance(sample.label, str) else sample.label,
        "reward": reward if isinstance(reward, (dict, int)) else None,
        "remove_sample": sample.remove_sample or None,
        "cached_tokens": sample.cached_tokens or None,
        "generate_function_path": sample.generate_function_path,
    }
    return {
        **{name: getattr(sample, name) for name in _AS_THEY_ARE},
        **{name: _lists(getattr(sample, name)) for name in _ARRAYS},
        "prompt": _text(sample.prompt),
        "label": None if sample.label is None else _text(sample.label),
        "reward": None if isinstance(number, dict) else number,
        "status": sample.status.value,
        "metadata": _text(sample.metadata),
        "exact": _text({name: value for name, value in exact.items() if value is not None}),
    }


def from_row(row: Mapping[str, Any]) -> Sample:
    """The sample of a row."""
    exact = json.loads(row["exact"])
    arrays: dict[str, Any] = {name: _arrays(row[name], dtype) for name, dtype in _ARRAYS.items()}
    return Sample(
        **{name: row[name] for name in _AS_THEY_ARE},
        **arrays,
        prompt=exact.get("prompt", row["prompt"]),
        label=exact.get("label", row["label"]),
        reward=exact.get("reward", row["reward"]),
        status=SampleStatus(row["status"]),
        metadata=json.loads(row["metadata"]),
        remove_sample=exact.get("remove_sample", False),
        cached_tokens=exact.get("cached_tokens", 0),
        generate_function_path=exact.get("generate_function_path"),
    )


def _lists(arrays: Sequence[np.ndarray] | None) -> list[list[Any]] | None:
    return None if arrays is None else [np.asarray(array).tolist() for array in arrays]


def _arrays(lists: Sequence[Sequence[Any]] | None, dtype: type) -> list[np.ndarray] | None:
    return None if lists is None else [np.array(values, dtype=dtype) for values in lists]


def _text(value: Any) -> str:
    """Of anything that a data file can hold: dates and bytes as Python shows them, half a surrogate pair escaped."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode(errors="backslashreplace").decode()
