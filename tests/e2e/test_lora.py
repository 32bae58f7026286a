"""Runs that train adapters only."""

import json
import signal

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from miles.model.load import load_model
from tests.e2e.harness import MODEL, assert_same

KILL = int(signal.SIGKILL)
LORA = {"lora_rank": 4, "lora_dropout": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.01}


def test_a_killed_lora_run_ends_as_one_that_was_not(miles, server, tmp_path_factory):
    whole = type(miles)(server, tmp_path_factory.mktemp("whole-lora"))
    assert whole.train(**LORA, save_hf="adapter").code == 0
    assert miles.train(**LORA, before=[["signal_at_stage", "publish", KILL, 2]]).code == -KILL
    assert miles.train(**LORA).code == 0
    assert_same(miles.state(), whole.state())

    for version in range(4):
        for row in pyarrow.parquet.read_table(whole.run / "samples" / f"rollout_{version}.parquet").to_pylist():
            assert row["weight_versions"] == [version] * row["response_length"]
    last = whole.run / "checkpoints" / "iter_0000004"
    saved = load_file(last / "adapter" / "adapter_model.safetensors")
    exported = load_file(whole.folder / "adapter" / "adapter_model.safetensors")
    assert saved.keys() == exported.keys() and all(torch.equal(saved[name], exported[name]) for name in saved)
    assert any(tensor.count_nonzero() for name, tensor in saved.items() if "lora_B" in name)
    assert json.loads((last / "adapter" / "adapter_config.json").read_text())["lora_dropout"] == 0.1
    log = (whole.run / "log.txt").read_text()
    assert log.count("Load weight end") == 1  # the reference is the policy without its adapters
    assert "LoRA of rank 4" in log


def test_an_adapter_goes_on_in_another_run_and_merged_weights_are_a_model(miles):
    assert miles.train(lora_rank=4, num_rollout=2).code == 0
    other = {"run_name": "other", "num_rollout": 1, "lr": 0.0, "lora_rank": 4}
    assert miles.train(**other, lora_adapter_path="runs/run").code == 0
    saved, kept = (
        load_file(miles.runs / name / "checkpoints" / step / "adapter" / "adapter_model.safetensors")
        for name, step in (("run", "iter_0000002"), ("other", "iter_0000001"))
    )
    assert all(torch.equal(saved[name], kept[name]) for name in saved)

    checkpoint = miles.run / "checkpoints" / "iter_0000002"
    refused = miles.train(run_name="third", init_from=str(checkpoint))
    assert refused.code != 0 and "a LoRA run saves its adapter only" in refused.message
    refused = miles.train(run_name="fourth", lora_rank=8, lora_adapter_path=str(checkpoint))
    assert refused.code != 0 and "was made with --lora-rank 4 --lora-alpha 16" in refused.message
    merged = miles.folder / "merged"
    assert miles.start("convert", "--input-dir", str(checkpoint), "--output-dir", str(merged)).wait().code == 0
    before, after = (load_model(folder, dtype=torch.float32, device="cpu") for folder in (MODEL, merged))
    assert not torch.equal(before.layers[0].attention.qkv.weight, after.layers[0].attention.qkv.weight)
    assert torch.equal(before.embedding.weight, after.embedding.weight)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1])
def test_training_adapters_only_solves_the_task_of_the_quickstart(miles, seed):
    lora = ["--lora-rank", "8", "--lr", "2e-3"]
    command = ["quickstart", *lora, "--seed", str(seed), "--json", "outcome.json", "--runs-dir", "runs"]
    assert miles.start(*command).wait(timeout_s=1100).code == 0
    outcome = json.loads((miles.folder / "outcome.json").read_text())
    assert outcome["held_out_before"] < 0.4 and outcome["held_out_after"] > 0.9
