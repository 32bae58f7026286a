from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.data.rows import read_rows, split_slice
from miles.errors import ConfigError, DataError

ROWS = [{"input": f"prompt {i}", "label": i} for i in range(7)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "p.parquet")
    return {"jsonl": folder / "p.jsonl", "parquet": folder / "p.parquet"}


bounds = st.none() | st.integers(-9, 9)


@given(start=bounds, stop=bounds, kind=st.sampled_from(["jsonl", "parquet"]))
def test_a_slice_means_what_it_means_in_python(
    files: dict[str, Path], start: int | None, stop: int | None, kind: str
) -> None:
    spec = f"{files[kind]}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    expected = list(enumerate(ROWS, start=1))[start:stop]
    if expected:
        assert read_rows(spec, flag="--prompt-data")[1] == expected
    else:
        with pytest.raises(DataError, match="leaves none of its 7 rows"):
            read_rows(spec, flag="--prompt-data")


@pytest.mark.parametrize("suffix", ["@[3]", "@[1:2:3]", "@[a:b]", "@[1.5:2]", "@[]", "@[1:2", "@[1:2]x", "@[-:2]"])
def test_a_bad_slice_is_a_config_error(suffix: str) -> None:
    with pytest.raises(ConfigError, match="--prompt-data"):
        split_slice("p.jsonl" + suffix, flag="--prompt-data")


def test_line_ends_and_byte_order_mark_are_read(tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"input": "a\xe2\x80\xa8b"}\r\n{"input": "c"}')
    assert [row["input"] for _, row in read_rows(str(file), flag="--prompt-data")[1]] == ["a\u2028b", "c"]


def test_all_bad_rows_are_counted_and_the_first_five_shown(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    lines = ['{"input": "ok"}', "", "{broken", "[1]", b"\xff".decode("latin-1"), "3", "null", '{"input": "ok"}']
    file.write_bytes("\n".join(lines).encode("latin-1") + b"\n")
    with pytest.raises(DataError) as caught:
        read_rows(str(file), flag="--prompt-data")
    message = str(caught.value)
    assert "6 of 8 rows cannot be used" in message
    assert f"{file} row 2: is empty" in message
    assert f"{file} row 3: is not JSON" in message
    assert "row 4: is a JSON list" in message
    assert "row 6: is a JSON int" in message
    assert "row 7" not in message and "and 1 more" in message


def test_row_numbers_are_those_of_the_file_and_rows_outside_the_slice_do_not_matter(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('broken\n{"input": "a"}\nbroken\n')
    assert read_rows(f"{file}@[1:2]", flag="--prompt-data")[1] == [(2, {"input": "a"})]
    with pytest.raises(DataError, match="row 3: is not JSON"):
        read_rows(f"{file}@[1:]", flag="--prompt-data")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.jsonl", b"", "the file is empty"),
        ("text.txt", b"{}", "expected a .jsonl or .parquet file, not '.txt'"),
        ("half.parquet", b"PAR1xxxx", "not a readable parquet file"),
        ("absent.jsonl", None, "there is no file"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, name: str, content: bytes | None, expected: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=expected) as caught:
        read_rows(str(tmp_path / name), flag="--eval-prompt-data")
    assert "--eval-prompt-data" in str(caught.value) and name in str(caught.value)


def test_a_row_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text(json.dumps(ROWS[0]) + '\n{"input": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(DataError, match="row 2: is nested too deeply"):
        read_rows(str(path), flag="--prompt-data")
