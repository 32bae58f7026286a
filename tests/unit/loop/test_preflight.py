import shutil

import pytest
import torch

from miles.config.flags import with_values
from miles.config.resolve import resolve
from miles.config.sections import RunConfig
from miles.engine import memory as engine_memory
from miles.errors import StorageError
from miles.loop import preflight
from miles.loop.placement import Placement
from miles.loop.preflight import FAIL, OK, WARN
from miles.loop.schedule import Schedule
from miles.model.spec import load_spec
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


@pytest.mark.parametrize(
    ("free", "changes", "status"),
    [(9 * ONE, {}, OK), (3 * ONE, {}, WARN), (3 * ONE, {"save_keep_last": 1}, OK), (ONE // 2, {}, FAIL)],
)
def test_disk(tmp_path, monkeypatch, free, changes, status):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free))
    verdict = preflight.disk(
        config_of(save_interval=1, **changes), SPEC, tmp_path / "a" / "b", schedule(save_interval=1)
    )
    assert verdict.status == status


def test_a_run_that_could_not_save_does_not_start(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 1))
    with pytest.raises(StorageError, match="not one fits"):
        preflight.report_at_start(config_of(), SPEC, TOKENIZER, CPU, save=tmp_path, schedule=schedule())
    assert "check of memory" in caplog.text or "check of disk" in caplog.text


def test_memory(monkeypatch):
    needed = SPEC.num_parameters * 16
    for share, status in ((2.0, OK), (1.1, WARN), (0.9, FAIL)):
        monkeypatch.setattr(preflight, "available_bytes", lambda device, share=share: int(needed * share))
        assert preflight.memory(config_of(), SPEC, CPU).status == status
    assert preflight.memory(config_of(use_kl_loss=True), SPEC, CPU).data["needed_bytes"] == SPEC.num_parameters * 20
    assert preflight.memory(config_of(advantage_estimator="ppo"), SPEC, CPU).data["needed_bytes"] == 2 * needed
    assert engine_memory.available_bytes(torch.device("cpu")) > 0


def test_what_is_trained_on_is_marked():
    ids = TOKENIZER.encode("12+34")
    sample = Sample(tokens=ids, response_length=3, loss_mask=[1, 0, 1])
    shown = preflight.shown_with_mask(TOKENIZER, [sample])[0]
    assert shown.replace("[[", "").replace("]]", "") == repr("12+34")
    assert shown.count("[[") == 2
