import json
import sys

from miles.observe.environment import describe_environment, fingerprint, hide_secrets


def test_secrets_are_hidden_and_other_flags_are_not():
    command = [
        "miles", "train", "--wandb-key", "abc", "--hf-token=xyz", "WANDB_API_KEY=q", "--input-key", "question",
        "--max-tokens-per-gpu", "4096", "--rollout-stop-token-ids", "7", "--save", "a b", "hf_abcdefghijklmnopqr",
    ]  # fmt: skip
    shown = hide_secrets(command)
    assert shown == (
        "miles train --wandb-key *** '--hf-token=***' 'WANDB_API_KEY=***' --input-key question"
        " --max-tokens-per-gpu 4096 --rollout-stop-token-ids 7 --save 'a b' ***"
    )


def test_environment_is_json_and_says_what_ran(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    environment = describe_environment(command=["miles", "train"], model_folder=tmp_path, seeds={"seed": 1})
    assert json.loads(json.dumps(environment)) == environment
    assert environment["versions"]["python"] == sys.version.split()[0]
    assert environment["hardware"]["num_cpus"] >= 1
    assert environment["seeds"] == {"seed": 1}
    assert environment["checkpoint_fingerprint"] == fingerprint(tmp_path)


def test_fingerprint_follows_every_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"a" * (3 << 20))
    first = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"a" * (3 << 20) + b"b")
    assert fingerprint(tmp_path) != first
