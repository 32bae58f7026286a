import os
import shutil

import pytest
import torch

from miles.config.flags import flatten, with_values
from miles.config.parse import parse_flags
from miles.config.resolve import resolve
from miles.config.sections import RunConfig
from miles.engine import memory as engine_memory
from miles.errors import StorageError
from miles.loop import preflight
from miles.loop.placement import Placement, place
from miles.loop.preflight import FAIL, OK, WARN
from miles.loop.schedule import Schedule
from miles.model.spec import load_spec
from miles.plan.machine import GIB, cpu_machine, gpu_machine
from miles.plan.shapes import SHAPES
from miles.text.tokenizer import load_tokenizer
from miles.types import Sample
from tests.e2e.loop_fork import MODEL

SPEC = load_spec(MODEL)
TOKENIZER = load_tokenizer(MODEL)
CPU = Placement(torch.device("cpu"), torch.float32, 1)
ONE = SPEC.num_parameters * 12 + (64 << 20)


def config_of(**values):
    return resolve(with_values(RunConfig(), {"apply_chat_template": True, **values}))[0]


def schedule(num_rollout=4, save_interval=None):
    return Schedule(num_rollout, 1, eval_interval=None, save_interval=save_interval)


def test_the_end_of_a_turn_must_end_an_answer(tmp_path):
    assert preflight.stop_ids(config_of(), SPEC, TOKENIZER).status == OK
    template = tmp_path / "template.jinja"
    text = (MODEL / "tokenizer_config.json").read_text()
    other = next(token_id for token_id in TOKENIZER.special_token_ids if token_id not in TOKENIZER.eos_token_ids)
    ending = TOKENIZER.decode([other], skip_special_tokens=False)
    template.write_text("{% for m in messages %}{{ m.content }}" + ending + "{% endfor %}")
    assert text
    changed = load_tokenizer(MODEL, chat_template_path=str(template))
    verdict = preflight.stop_ids(config_of(), SPEC, changed)
    assert verdict.status == WARN and f"--rollout-stop-token-ids {other}" in verdict.text
    assert preflight.stop_ids(config_of(rollout_stop_token_ids=(other,)), SPEC, changed).status == OK


def test_a_stop_id_outside_of_the_vocabulary():
    assert preflight.stop_ids(config_of(rollout_stop_token_ids=(99,)), SPEC, TOKENIZER).status == FAIL


def test_round_trip():
    text = "12+34=?"
    assert preflight.round_trip(TOKENIZER, [Sample(prompt=text, tokens=TOKENIZER.encode(text))]).status == OK
    assert preflight.round_trip(TOKENIZER, [Sample(prompt="12+é", tokens=TOKENIZER.encode("12+é"))]).status == WARN


def test_labels():
    samples = [Sample(label="1"), Sample(label="(("), Sample(label="3"), Sample(label="4")]
    verdict = preflight.labels(samples, [None, "no number", None, None])
    assert (verdict.status, verdict.data["parse_rate"]) == (FAIL, 0.75)
    assert verdict.lines == ("label '((': no number",)


def machine(memory_bytes=8 * GIB, disk_bytes=500 * GIB):
    return cpu_machine(host_bytes=memory_bytes, disk_bytes=disk_bytes)


@pytest.mark.parametrize(
    ("free", "changes", "status"),
    [
        (9 * ONE, {}, OK),
        (3 * ONE, {}, WARN),
        (5 * ONE // 2, {"save_keep_last": 1}, OK),
        (5 * ONE // 2, {"save_keep_last": 1, "eval_function_path": "mine.Elsewhere", "eval_interval": 1}, WARN),
        (ONE // 2, {}, FAIL),
    ],
)
def test_disk(free, changes, status):
    config = config_of(save_interval=1, **changes)
    verdict = preflight.memory_and_disk(config, SPEC, machine(disk_bytes=free), schedule(save_interval=1))
    assert verdict.status == status


def test_a_run_that_could_not_save_does_not_start(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 1))
    with pytest.raises(StorageError, match="not one fits"):
        preflight.report_at_start(config_of(), SPEC, TOKENIZER, CPU, save=tmp_path, schedule=schedule())
    assert "check of memory and disk" in caplog.text


def test_a_run_that_cannot_fit_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "available_bytes", lambda device: 100 << 20)
    with pytest.raises(StorageError, match="does not fit.*smaller model or another machine"):
        preflight.report_at_start(config_of(), SPEC, TOKENIZER, CPU, save=tmp_path, schedule=schedule())


@pytest.mark.parametrize("gib", [30, 50, 70])
def test_the_refusal_names_flags_with_which_it_fits(gib):
    """4B on a GPU that is too small: what the sentence says is typed, and the plan fits."""
    gpu = gpu_machine("H200", memory_gib=gib, host_bytes=128 * GIB, disk_bytes=500 * GIB)
    spec, flags = SHAPES["Qwen3-4B"], {"rollout_max_response_len": 1024, "max_tokens_per_gpu": 8192}
    verdict = preflight.memory_and_disk(config_of(**flags), spec, gpu, schedule())
    assert verdict.status == FAIL
    if gib == 30:  # weights and gradients alone take 22 GiB, masters 15
        assert "no setting is enough" in verdict.text
        return
    assert ". set --" in verdict.text
    for way in verdict.text.rpartition(". set ")[2].split("; or "):
        given = parse_flags(way.split())
        typed = {name: value for name, value in flatten(given.config).items() if given.sources[name] == "command line"}
        assert preflight.memory_and_disk(config_of(**flags, **typed), spec, gpu, schedule()).status == OK, way


def test_memory_by_states():
    def needed(**changes):
        config = config_of(max_tokens_per_gpu=512, **changes)
        return preflight.memory_and_disk(config, SPEC, machine(), schedule()).data["needed_bytes"]

    assert needed(use_kl_loss=True) - needed() == SPEC.num_parameters * 4
    assert needed(advantage_estimator="ppo") - needed() == SPEC.num_parameters * 16
    for share, status in ((2.0, OK), (1.0, WARN), (0.9, FAIL)):
        used = preflight.memory_and_disk(config_of(), SPEC, machine(), schedule()).data["share"] * 8 * GIB
        assert preflight.memory_and_disk(config_of(), SPEC, machine(int(share * used)), schedule()).status == status
    assert engine_memory.available_bytes(torch.device("cpu")) > 0


def test_the_machine_at_hand(tmp_path):
    here = preflight.machine_here(CPU, tmp_path / "not" / "made")
    assert not here.on_gpu and here.shares_memory
    assert here.memory_bytes > engine_memory.available_bytes(torch.device("cpu")) // 2
    assert here.disk_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


def test_what_is_trained_on_is_marked():
    ids = TOKENIZER.encode("12+34")
    sample = Sample(tokens=ids, response_length=3, loss_mask=[1, 0, 1])
    shown = preflight.shown_with_mask(TOKENIZER, [sample])[0]
    assert shown.replace("[[", "").replace("]]", "") == repr("12+34")
    assert shown.count("[[") == 2


@pytest.mark.parametrize("given", [None, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_of_a_gpu_grows_in_one_piece_unless_the_user_wants_it_otherwise(given, monkeypatch):
    """PyTorch reads the newer name first."""
    environment = {} if given is None else {given: "max_split_size_mb:64"}
    monkeypatch.setattr(os, "environ", environment)
    place(config_of(num_threads=torch.get_num_threads()).model, SPEC)
    expected = "expandable_segments:True" if given is None else "max_split_size_mb:64"
    assert environment["PYTORCH_ALLOC_CONF"] == expected
