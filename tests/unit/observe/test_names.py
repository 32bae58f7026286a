import pytest

from miles.observe import names


@pytest.mark.parametrize(
    "name",
    [
        "rollout/raw_reward",
        "rollout/zero_std/count_1",
        "rollout/zero_std/count_0.0",
        "train/lr-pg_0",
        "eval/gsm8k",
        "eval/gsm8k-truncated_ratio",
        "eval/gsm8k-pass@4",
        "perf/actor_train_time",
    ],
)
def test_known_names_have_a_unit_and_a_meaning(name):
    metric = names.describe(name)
    assert metric.unit and metric.meaning


@pytest.mark.parametrize(
    "name", ["rollout/reward", "raw_reward", "rollout/zero_std/count_", "perf/nap_time", "train/lr-pg_0/x"]
)
def test_unknown_names_fail(name):
    with pytest.raises(AssertionError, match="observe/names.py"):
        names.describe(name)


def test_the_most_exact_name_wins():
    assert names.describe("eval/step").unit == "rollouts"
    assert names.describe("eval/gsm8k-truncated_ratio").unit == "share"
