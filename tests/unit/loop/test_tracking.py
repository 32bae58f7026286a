from contextlib import ExitStack

import pytest

from miles.config.flags import with_values
from miles.config.sections import RunConfig, TrackConfig
from miles.errors import ConfigError
from miles.loop.tracking import check_tracking, follow
from miles.observe.metrics import MetricsWriter, read_records
from miles.report.ranges import Ranges, save_ranges


def _ranges(path):
    save_ranges(path, Ranges(("a", "b"), *[{"grad": (0.2, 0.5)}] * 3))
    return str(path)


def test_leaving_a_healthy_range_is_logged_and_recorded_once(tmp_path, caplog):
    config = with_values(RunConfig(), {"ranges": _ranges(tmp_path / "ranges.json")})
    writer = MetricsWriter(tmp_path, first_step=None)
    with ExitStack() as stack:
        follow(writer, config, tmp_path, first_step=0, stack=stack)
        for step in range(8):
            writer.write(step, {"eval/held_out": 0.5}, kind="eval")
            writer.write(step, {"train/grad_norm": 0.3 if step < 2 else 4.0})
    writer.close()
    (alarm,) = read_records(tmp_path / "events.jsonl")
    assert (alarm["kind"], alarm["step"]) == ("alarm", 4)
    assert "Gradient norm: the mean of the last 5 steps is 2.52" in alarm["text"]
    assert [record.message for record in caplog.records if "healthy range" in record.message] == [
        f"outside the healthy range at step 4: {alarm['text']}"
    ]


def test_a_wrong_file_of_ranges_is_said_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the healthy ranges"):
        check_tracking(TrackConfig(ranges=str(tmp_path / "nothing.json")))
    check_tracking(TrackConfig())
