# ruff: noqa: E501 (lines of real logs)
from datetime import datetime

import pytest

from miles.errors import ConfigError, StorageError
from miles.report.logs import command_settings, read_log
from miles.report.runs import open_run

# The lines of the manual's section 1.1, cut as it cuts them.
MANUAL = """\
[2026-10-17 15:53:16.726 launcher] common.py:290 - EXEC: export PYTHONUNBUFFERED=1 && ray start --head --num-gpus 1 …
(CommandActor pid=2546) [2026-10-17 15:54:38] Load weight end. elapsed=5.85 s, type=Qwen3ForCausalLM, mem usage=1.40 GB.
(CommandActor pid=2546) [2026-10-17 15:54:40] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 345645, K size: 18.46 GB
(FSDPTrainRayActor pid=2551) [2026-10-17 15:56:48.271 actor_cell00000_rank00000] log_utils.py:125 - rollout 0: {'rollout/response_lengths': 739.92578125, … 'rollout/raw_reward': 0.62890625, …
(FSDPTrainRayActor pid=2551) [2026-10-17 15:58:15.687 actor_cell00000_rank00000] log_utils.py:554 - step 0: { … 'train/train_rollout_logprob_abs_diff': 0.015336457639932632, …
(FSDPTrainRayActor pid=2551) [2026-10-17 15:58:15.688 actor_cell00000_rank00000] perf.py:56 - perf 0: {'perf/sleep_time': 2.1116080284118652, … 'perf/update_weights_time': 0.6647534370422363, … 'perf/step_time': 233.29494333267212, …
"""


def _write(tmp_path, text):
    path = tmp_path / "plain.log"
    path.write_text(text)
    return path


def test_lines_of_the_manual_are_read(tmp_path):
    run = open_run(_write(tmp_path, MANUAL))
    assert run.log.kv_tokens == 345645
    assert run.log.is_public
    (step,) = run.steps
    assert step.number == 0
    assert step.metrics == {
        "rollout/response_lengths": 739.92578125,
        "rollout/raw_reward": 0.62890625,
        "train/train_rollout_logprob_abs_diff": 0.015336457639932632,
        "perf/sleep_time": 2.1116080284118652,
        "perf/update_weights_time": 0.6647534370422363,
        "perf/step_time": 233.29494333267212,
    }
    assert (step.whole.end - step.whole.start).total_seconds() == pytest.approx(233.294943, abs=1e-5)
    assert step.whole.end.replace(tzinfo=None) == datetime(2026, 10, 17, 15, 58, 15, 688000)


def test_numbers_of_any_spelling(tmp_path):
    body = "{'train/loss': nan, 'train/grad_norm': np.float64(1.5e-05), 'train/pg_loss': -inf, 'a': 'text 3', 'train/step': 4}"
    log = read_log(_write(tmp_path, f"[2026-10-17 15:58:15.687 actor] a.py:1 - step 4: {body}\n"))
    values = log.records[0].values
    assert values["train/loss"] != values["train/loss"]
    assert values["train/grad_norm"] == 1.5e-05
    assert values["train/pg_loss"] == float("-inf")
    assert values["train/step"] == 4 and "a" not in values


def test_several_optimizer_steps_belong_to_their_rollout(tmp_path):
    lines = []
    for rollout in range(2):
        lines.append(f"rollout {rollout}: {{'rollout/raw_reward': 0.{rollout + 1}}}")
        lines += [f"step {2 * rollout + k}: {{'train/grad_norm': {k + rollout}.0}}" for k in range(2)]
        lines.append(f"perf {rollout}: {{'perf/step_time': 1.0}}")
    stamped = "\n".join(f"[2026-10-17 15:58:15.687 actor] a.py:1 - {line}" for line in lines)
    run = open_run(_write(tmp_path, stamped + "\n"))
    assert run.series("train/grad_norm") == [(0, 0.5), (1, 1.5)]


def test_a_resumed_run_counts_what_it_did_again(tmp_path):
    stamp = "[2026-10-17 15:58:15.687 actor] a.py:1 - "
    steps = [(0, 0.1), (1, 0.2), (2, 0.3), (1, 0.7)]  # went on from the checkpoint after step 0
    lines = [
        f"{stamp}rollout {n}: {{'rollout/raw_reward': {r}}}\n{stamp}step {n}: {{'train/loss': {r}}}" for n, r in steps
    ]
    run = open_run(_write(tmp_path, "\n".join(lines) + "\n"))
    assert run.series("train/loss") == [(0, 0.1), (1, 0.7)]
    assert run.series("rollout/raw_reward") == [(0, 0.1), (1, 0.7), (2, 0.3)][:2]


def test_refused_requests_are_counted_with_repeats(tmp_path):
    refused = (
        "(R pid=1) [2026-10-17 21:03:30.637 rollout_executor] h.py:241 - Error: Server error '503 Service Unavailable'"
    )
    log = read_log(_write(tmp_path, f"{refused}\n{refused} [repeated 148x across cluster]\n"))
    assert len(log.unavailable) == 149


def test_flags_of_a_command():
    found = command_settings("python train.py --colocate --lr=1e-6 --eval-prompt-data set 'a file' --use-kl-loss")
    assert found == {"colocate": "true", "lr": "1e-6", "eval_prompt_data": "set a file", "use_kl_loss": "true"}


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(ConfigError, match="no run folder and no log"):
        open_run(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"config\.yaml is missing"):
        open_run(tmp_path)
    with pytest.raises(StorageError, match="cannot read"):
        read_log(tmp_path)
