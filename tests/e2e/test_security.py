"""What `docs/security.md` promises, on whole runs."""

import json
import zlib

import pytest

from miles.checkpoint import layout
from miles.errors import CheckpointError
from miles.model.load import weight_files
from miles.model.spec import load_spec
from tests.e2e.loop_fork import run_fork, sums

SECRET = "s3cret-0123456789"


def test_a_secret_that_a_hook_prints_is_in_no_file_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)

    def leak(run):
        print("my key is", SECRET)
        stages_logger().warning("and again %s", SECRET)

    ended = run_fork(tmp_path, sums(tmp_path), each_step=leak)
    assert ended.code == 0
    files = [path for path in ended.folder.rglob("*") if path.is_file()]
    assert files and not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert "and again ***" in (ended.folder / "log.txt").read_text()


def stages_logger():
    from miles.loop.stages import logger

    return logger


def test_a_secret_in_a_flag_is_refused_before_a_folder_is_made(tmp_path):
    settings = sums(tmp_path, rm_type="remote_rm", rm_url="https://me:hunter22@host/score")
    ended = run_fork(tmp_path, settings)
    assert ended.code == 2
    assert "--rm-url carries a password or a key" in ended.text and "hunter22" not in ended.text
    assert not ended.folder.exists()


def test_a_run_name_cannot_leave_the_runs_folder(tmp_path):
    ended = run_fork(tmp_path, sums(tmp_path, run_name="../../elsewhere"))
    assert ended.code == 2 and "--run-name" in ended.text


def test_a_checkpoint_cannot_name_files_outside_of_it(tmp_path):
    body = {"iteration": 1, "files": {"../other.safetensors": {"bytes": 1, "crc32": 1}}, "state": {}}
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    crc = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (folder / "state.json").write_text(json.dumps({"format": layout.FORMAT, "crc32": crc, **body}))
    with pytest.raises(CheckpointError, match="not in the checkpoint"):
        layout.read_manifest(folder)


def test_a_model_index_cannot_name_files_outside_of_the_folder(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../../etc/passwd"}}))
    with pytest.raises(CheckpointError, match="not a file beside it"):
        weight_files(tmp_path)


def test_a_model_with_code_of_its_own_is_named_and_not_run(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    config = {"architectures": ["EvilForCausalLM"], "auto_map": {"AutoModelForCausalLM": "evil.EvilForCausalLM"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"code of its own \(auto_map\), which is never run here"):
        load_spec(tmp_path)
