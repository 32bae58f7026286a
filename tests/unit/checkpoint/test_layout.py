import zlib

import pytest

from miles.checkpoint import layout
from miles.checkpoint.layout import Manifest
from miles.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path):
    """A complete checkpoint of iteration 12 without weights."""
    folder = tmp_path / "iter_0000012"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "optimizer.safetensors").write_bytes(b"moments")
    state = {"rng": [1, 2], "lr": 2.5e-9}
    layout.write_manifest(folder, Manifest(12, layout.mark_files(folder), state))
    layout.write_tracker(tmp_path, 12)
    return folder


def test_names():
    assert layout.checkpoint_path(layout.Path("a"), 12).name == "iter_0000012"
    assert layout.temporary_path(layout.Path("a"), 12, pid=7).name == ".tmp-iter_0000012-7"


def test_checkpoints_are_listed_by_number_and_leftovers_apart(tmp_path):
    for name in ("iter_0000009", "iter_12345678", "iter_0000100", "iter_x", "other", ".tmp-iter_0000101-7"):
        (tmp_path / name).mkdir()
    assert list(layout.checkpoints(tmp_path)) == [9, 100, 12345678]
    assert [path.name for path in layout.leftovers(tmp_path)] == [".tmp-iter_0000101-7"]


def test_manifest_round_trip_has_size_and_crc32_of_every_file(checkpoint):
    manifest = layout.read_manifest(checkpoint)
    assert manifest.state == {"rng": [1, 2], "lr": 2.5e-9}
    assert set(manifest.files) == {"model/config.json", "optimizer.safetensors"}
    mark = manifest.files["optimizer.safetensors"]
    assert (mark.bytes, mark.crc32) == (7, zlib.crc32(b"moments"))
    layout.verify(checkpoint, manifest)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("optimizer.safetensors", b"momentum", "8 bytes, not 7"),
        ("optimizer.safetensors", b"mements", "checksum"),
        ("model/config.json", None, "missing"),
    ],
)
def test_a_damaged_file_is_named_with_the_way_back(checkpoint, name, damage, said):
    (checkpoint.parent / "iter_0000008").mkdir()
    path = checkpoint / name
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(CheckpointError, match=said) as caught:
        layout.verify(checkpoint, layout.read_manifest(checkpoint))
    assert str(path) in str(caught.value)
    assert "latest_checkpointed_iteration.txt to resume from it: 8" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("2.5e-09", "2.5e-08"),
        lambda text: text.replace('"crc32"', '"crc"'),
        lambda text: "[]",
        lambda text: "",
    ],
)
def test_a_damaged_state_file_is_named(checkpoint, change):
    path = checkpoint / "state.json"
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    with pytest.raises(CheckpointError, match="state.json.*move the folder away"):
        layout.read_manifest(checkpoint)


def test_a_newer_format_is_not_guessed_at(checkpoint):
    path = checkpoint / "state.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="format 2"):
        layout.read_manifest(checkpoint)


def test_tracker(tmp_path):
    assert layout.read_tracker(tmp_path) is None
    layout.write_tracker(tmp_path, 12)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12\n"
    assert layout.read_tracker(tmp_path) == 12
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(CheckpointError, match="release"):
        layout.read_tracker(tmp_path)
