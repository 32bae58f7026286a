"""`miles check` on whole settings: what is fine, and each thing that is not."""

import json

import pytest
from safetensors.torch import load_file

from miles.cli.main import main
from miles.report.ranges import Ranges, save_ranges
from tests.e2e.loop_fork import MODEL, flags, sums


@pytest.fixture
def check(tmp_path, capsys):
    def run(**changes):
        code = main(["check", "--json", *flags(sums(tmp_path, **{"rm_type": "math", **changes}))])
        report = json.loads(capsys.readouterr().out)
        assert report["ok"] == (code == 0)
        return code, {entry["name"]: entry for entry in report["checks"]}

    return run


def test_a_run_that_can_work(check, tmp_path):
    code, found = check(rollout_batch_size=4)
    assert code == 0
    assert {entry["status"] for entry in found.values()} == {"ok"}
    assert {
        "model", "hooks", "stop ids", "data", "reward", "labels", "round trip", "hardware", "memory and disk",
        "log-probs", "loss mask", "step time",
    } == set(found)  # fmt: skip
    assert found["labels"]["parse_rate"] == 1.0
    assert found["log-probs"]["mean"] < 1e-5
    lines = found["loss mask"]["lines"]
    assert len({line.partition("=")[0] for line in lines}) == len(lines) == 3, "three prompts"
    assert "assistant\\n[[" in found["loss mask"]["lines"][0]
    assert found["step time"]["measured"] and found["step time"]["seconds"] > 0
    assert not (tmp_path / "runs").exists(), "nothing is left of the trial"


def test_a_lora_run_needs_memory_and_disk_for_its_adapters_only(check):
    # Inputs and outputs of q, k, v, o, gate, up and down in the three layers of the quickstart's model.
    shapes = [(96, 128), (96, 64), (96, 64), (128, 96), (96, 256), (96, 256), (256, 96)]
    adapters = 3 * sum(4 * (inputs + outputs) for inputs, outputs in shapes)
    parameters = sum(tensor.numel() for tensor in load_file(MODEL / "model.safetensors").values())
    _, full = check(rollout_batch_size=4)
    # The reference is the policy without its adapters: nothing for it.
    code, found = check(rollout_batch_size=4, lora_rank=4, use_kl_loss=True, kl_loss_coef=0.1)
    assert code == 0 and found["log-probs"]["status"] == "ok"
    full, found = full["memory and disk"], found["memory and disk"]
    states = [sum(entry["parts"][name] for name in ("weights", "gradients", "Adam states")) for entry in (full, found)]
    assert states == [16 * parameters, 4 * parameters + 16 * adapters]
    assert "reference and teacher" not in found["parts"]
    assert found["checkpoint_bytes"] - full["checkpoint_bytes"] == 12 * (adapters - parameters)


def test_healthy_ranges_decide_what_gap_is_a_warning(check, tmp_path):
    ranges = Ranges(("a", "b"), {"gap": (1e-12, 2e-12)}, {"gap": (0.0, 1.0)}, {"gap": (0.0, 1.0)})
    save_ranges(tmp_path / "ranges.json", ranges)
    _, found = check(ranges=tmp_path / "ranges.json", rollout_batch_size=4)
    assert found["log-probs"]["limit"] == 4e-12
    assert found["log-probs"]["status"] == "warn", "float32 differs by more than these runs had"


def test_labels_that_cannot_be_graded(check, tmp_path):
    rows = [{"input": "1+1=?", "label": "2"}, {"input": "1+2=?", "label": "(("}, {"input": "1+3=?", "label": "4"}]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, found = check(prompt_data=tmp_path / "bad.jsonl")
    assert code == 1
    assert found["labels"]["status"] == "fail" and found["labels"]["parse_rate"] == pytest.approx(2 / 3)
    assert "'(('" in found["labels"]["lines"][0]
    assert found["log-probs"]["status"] == found["step time"]["status"] == "skip"


def test_a_reward_that_cannot_be_imported_is_found_in_a_second(check):
    """The manual's run stayed up for two hours after this."""
    code, found = check(rm_type=None, custom_rm_path="my_rewards.custom_rm")
    assert code == 1
    assert "my_rewards" in found["reward"]["text"] and "--custom-rm-path" in found["reward"]["text"]


def test_a_model_that_is_not_there_and_hooks_are_both_said(check, tmp_path):
    code, found = check(hf_checkpoint=tmp_path / "none", loss_type="custom_loss", custom_loss_function_path="no.f")
    assert code == 1
    assert found["model"]["status"] == found["hooks"]["status"] == "fail"


def test_a_supervised_run(check, tmp_path):
    rows = [{"input": f"{n}+1=?", "label": f"#### {n + 1}"} for n in range(4)]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"prompt_data": tmp_path / "sft.jsonl", "loss_type": "sft_loss", "n_samples_per_prompt": None}
    code, found = check(**settings, rollout_max_response_len=None)
    assert code == 0, found
    assert "log-probs" not in found
    assert "[[#### 1<|im_end|>" in found["loss mask"]["lines"][0]


def test_lines_for_people(tmp_path, capsys):
    assert main(["check", *flags(sums(tmp_path, save=tmp_path / "save"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok   model       Qwen3ForCausalLM, 337,536 parameters, " + str(MODEL)[:20])
    assert "nothing stands in the way" in lines[-1]


def test_wrong_flags_end_with_2(tmp_path, capsys):
    assert main(["check", "--hf-checkpoint", "x", "--lr", "-1"]) == 2
