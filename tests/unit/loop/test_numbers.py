from pathlib import Path

import pytest

from miles.loop.numbers import Hardware, decoding_bytes, of_rollout, rollout_perf, trainer_perf
from miles.model.flops import forward_flops
from miles.model.spec import load_spec
from miles.observe import names
from miles.observe.gpu import Rates
from miles.types import Sample, TrainResult

MODEL = Path(__file__).parents[3] / "miles" / "quickstart" / "model"


@pytest.fixture
def hardware():
    return Hardware(load_spec(MODEL), 4, Rates(matrix_flops_per_s=1e9, copy_bytes_per_s=1e8))


def sample(prompt: int, answer: int) -> Sample:
    return Sample(tokens=[0] * (prompt + answer), response_length=answer)


def test_decoding_reads_the_weights_once_a_step_and_what_stands_before_each_token(hardware):
    spec = hardware.spec
    read = decoding_bytes([sample(5, 2)], num_engine_steps=3, hardware=hardware)
    per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
    # The first token sees 5 + 1 places, the second 5 + 2.
    assert read == 3 * spec.num_parameters * 4 + (6 + 7) * per_token


def test_shares_are_of_the_measured_rates(hardware):
    groups = [[sample(5, 2), sample(5, 4)]]
    perf = rollout_perf(groups, seconds=2.0, num_engine_steps=4, hardware=hardware)
    assert perf["perf/tokens_per_gpu_per_sec"] == 3.0
    flops = forward_flops(hardware.spec, [7, 9], num_head_tokens=6)
    assert perf["perf/rollout_mfu"] == pytest.approx(flops / 2.0 / 1e9)
    read = decoding_bytes(groups[0], num_engine_steps=4, hardware=hardware)
    assert perf["perf/rollout_bandwidth_share"] == pytest.approx(read / 2.0 / 1e8)
    for name in perf:
        names.describe(name)


def test_training_speed_counts_what_was_executed(hardware):
    result = TrainResult({}, [{"train/tflop": 0.001}, {"train/tflop": 0.003}], {})
    seconds = {"rollout": 3.0, "train": 1.0, "actor_train": 0.5, "log_probs": 0.0}
    perf = trainer_perf([[sample(5, 2)]], result, seconds=seconds, hardware=hardware)
    assert perf["perf/actor_train_tflops"] == pytest.approx(0.008)
    assert perf["perf/actor_train_mfu"] == pytest.approx(8.0)
    assert (perf["perf/step_time"], perf["perf/wait_time_ratio"]) == (4.0, 0.75)
    assert perf["perf/sleep_time"] == 0.0 and "perf/log_probs_tflops" not in perf
    for name in perf:
        names.describe(name)


def test_a_rollout_without_a_trained_token_has_no_training_speed(hardware):
    seconds = {"rollout": 3.0, "train": 1.0, "actor_train": 0.0, "log_probs": 0.0}
    perf = trainer_perf(
        [[sample(5, 2)]], TrainResult({}, [{"train/tflop": 0.0}], {}), seconds=seconds, hardware=hardware
    )
    assert perf["perf/step_time"] == 4.0 and "perf/actor_train_tflops" not in perf


def test_the_record_of_a_rollout_has_means_extremes_and_sums_of_its_steps():
    skipped = {"train/num_skipped_steps": 1, "train/num_not_finite": 2}
    steps = [
        {"train/loss": 1.0, "train/step": 6.0, "train/ratio_min": 0.5, "train/ratio_max": 2.0, **skipped},
        {"train/loss": 3.0, "train/step": 7.0, "train/ratio_min": 0.9, "train/ratio_max": 9.0, "train/kl_loss": 0.5},
    ]
    extremes = {"train/ratio_min": 0.5, "train/ratio_max": 9.0}
    assert of_rollout(steps) == {"train/loss": 2.0, "train/step": 7.0, "train/kl_loss": 0.5, **extremes, **skipped}
