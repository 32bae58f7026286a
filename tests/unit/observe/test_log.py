import ast
import logging
import math
import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.observe.log import LogFile, fixed, format_record, get_logger, log_record, setup_logging, stop_logging

LINE = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} main\] test_log\.py:\d+ - (.*)\n")


@pytest.fixture
def lines():
    written: list[str] = []
    setup_logging("main", written.append)
    yield written
    stop_logging()


@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_fixed_has_no_exponent_and_reads_back_the_same_number(value):
    text = fixed(value)
    assert "e" not in text.lower()
    assert ast.literal_eval(text) == value
    assert isinstance(ast.literal_eval(text), float)


def test_fixed_on_worked_values():
    assert fixed(1e-6) == "0.000001"
    assert fixed(2.5e-9) == "0.0000000025"
    assert fixed(0.62890625) == "0.62890625"
    assert fixed(1e22) == "10000000000000000000000.0"
    assert fixed(7) == "7"
    assert fixed(True) == "1"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_fixed_refuses_what_is_not_finite(value):
    with pytest.raises(AssertionError, match="finite"):
        fixed(value)


def test_record_is_a_python_dict_of_known_names():
    metrics = {"rollout/raw_reward": 0.62890625, "train/lr-pg_0": 1e-6, "rollout/zero_std/count_1": 7}
    kind, dictionary = format_record("rollout", 0, metrics).split(": ", 1)
    assert kind == "rollout 0"
    assert ast.literal_eval(dictionary) == metrics
    with pytest.raises(AssertionError, match="rollout/raw_rewrad"):
        format_record("rollout", 0, {"rollout/raw_rewrad": 1.0})


def test_line_format_and_levels(lines):
    logger = get_logger("miles.some.module")
    logger.info("KV Cache is allocated. dtype: torch.float32, #tokens: 10")
    logger.warning("low on %s", "disk")
    logger.error("gone")
    log_record("step", 3, {"train/loss": 0.5})
    messages = [LINE.fullmatch(line).group(1) for line in lines]
    assert messages == [
        "KV Cache is allocated. dtype: torch.float32, #tokens: 10",
        "Warning: low on disk",
        "Error: gone",
        "step 3: {'train/loss': 0.5}",
    ]


def test_libraries_are_heard_from_warnings_up(lines):
    logging.getLogger("some_library").info("chatter")
    logging.getLogger("some_library").warning("trouble")
    assert [LINE.fullmatch(line).group(1) for line in lines] == ["Warning: trouble"]


def test_the_greps_of_the_manual(lines, tmp_path):
    for n in range(3):
        log_record("perf", n, {"perf/rollout_time": 1.5})
        log_record("rollout", n, {"rollout/response_lengths": 739.92578125, "rollout/raw_reward": 0.5 + n / 8})
        log_record("step", n, {"train/loss": -1e-7, "train/train_rollout_logprob_abs_diff": 1.5e-5 * (n + 1)})
    log = tmp_path / "log.txt"
    log.write_text("".join(lines))

    def grep(*arguments: str) -> list[str]:
        return subprocess.run(["grep", *arguments, str(log)], capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )

    assert grep("-c", " - step [0-9]*: {")[0] == "3"
    rewards = grep("-o", "'rollout/raw_reward': [0-9.]*")
    assert rewards == [f"'rollout/raw_reward': {value}" for value in (0.5, 0.625, 0.75)] + [""]
    gaps = grep("-o", "'train/train_rollout_logprob_abs_diff': [0-9.]*")
    assert gaps[0] == "'train/train_rollout_logprob_abs_diff': 0.000015"


def test_log_file_counts_writes_that_failed(tmp_path):
    log = LogFile(tmp_path / "log.txt")
    log.write(b"one\n")
    log.close()
    LogFile(tmp_path / "log.txt").write(b"two\n")
    assert (tmp_path / "log.txt").read_bytes() == b"one\ntwo\n"


def test_log_file_survives_a_full_disk():
    log = LogFile("/dev/full")
    log.write(b"lost\n")
    assert log.num_failed_writes == 1
