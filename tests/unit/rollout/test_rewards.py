from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from miles.config.sections import DataConfig, RewardConfig, RunConfig
from miles.errors import ConfigError, PluginError, RewardError
from miles.rollout.rewards import RewardRunner
from miles.types import Sample, SampleStatus


def runner(**reward: Any) -> RewardRunner:
    return RewardRunner(RunConfig(data=DataConfig(rollout_seed=3, label_key="answer"), reward=RewardConfig(**reward)))


def samples(*responses: str, label: Any = "7") -> list[Sample]:
    return [
        Sample(group_index=2, index=10 + i, tokens=[1, 2, 3], response=text, response_length=1, label=label)
        for i, text in enumerate(responses)
    ]


def score(made: RewardRunner, group: list[Sample]) -> list[Any]:
    asyncio.run(made.score_group(group))
    return [sample.reward for sample in group]


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a module with a function `score` and make its runner."""
    monkeypatch.syspath_prepend(str(tmp_path))
    count = 0

    def make(source: str, **reward: Any) -> RewardRunner:
        nonlocal count
        count += 1
        (tmp_path / f"custom_rm_{tmp_path.name}_{count}.py".replace("-", "_")).write_text(source)
        return runner(custom_rm_path=f"custom_rm_{tmp_path.name}_{count}.score".replace("-", "_"), **reward)

    return make


def test_math_needs_no_process_for_numbers() -> None:
    assert score(runner(rm_type="math"), samples("#### 7", r"\boxed{8}", "nothing")) == [1, 0, 0]


def test_random_rewards_repeat_and_differ() -> None:
    group = samples(*["x"] * 40)
    rewards = score(runner(rm_type="random"), group)
    assert score(runner(rm_type="random"), group) == rewards and set(rewards) == {0, 1}
    assert set(score(runner(rm_type="deterministic_random"), samples(*map(str, range(40))))) == {0, 1}
    boxed = score(runner(rm_type="boxed_deterministic_random"), samples(r"a \boxed{5}", r"b \boxed{5}"))
    assert boxed[0] == boxed[1]


def test_an_unknown_type_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="--rm-type maths: there is no such reward as maths; did you mean math?"):
        runner(rm_type="maths")
    with pytest.raises(ConfigError, match="known: math, gsm8k, .*, deterministic_random, each also as boxed_"):
        runner(rm_type="qqq")


PLAIN = "def score(args, sample, **kwargs):\n    return len(sample.response) + args.rollout_seed\n"
ASYNC = (
    "import asyncio\nasync def score(args, sample):\n    await asyncio.sleep(0)\n    return float(sample.label) / 2\n"
)
GROUP = "def score(args, samples):\n    return [i for i, sample in enumerate(samples)]\n"
DICT = "def score(args, sample):\n    return {'score': 0.5, 'format': 'ok'}\n"


def test_rewards_can_be_plain_async_for_a_group_or_a_dict(custom: Any) -> None:
    assert score(custom(PLAIN), samples("ab", "abc")) == [5, 6]
    assert score(custom(ASYNC), samples("ab")) == [3.5]
    assert score(custom(GROUP, group_rm=True), samples("a", "b", "c")) == [0, 1, 2]
    assert score(custom(DICT, reward_key="score"), samples("a")) == [{"score": 0.5, "format": "ok"}]


def test_numbers_of_other_libraries_become_plain(custom: Any) -> None:
    source = (
        "import numpy\ndef score(args, sample):\n"
        "    return {'a': numpy.float32(0.5), 'b': True, 'c': 3**40}[sample.response]\n"
    )
    rewards = score(custom(source), samples("a", "b", "c"))
    assert rewards == [0.5, 1, float(3**40)] and [type(reward) for reward in rewards] == [float, int, float]
    assert not isinstance(rewards[0], numpy.floating)


BAD = [
    ("sample.loss_mask = [1, 1]; return 1", "left 2 loss_mask for 1 tokens for sample 10"),
    ("return None", "returned None for sample 10; expected a finite number"),
    ("return float('nan')", "returned nan for sample 10"),
    ("return float('inf')", "returned inf for sample 10"),
    ("return '1'", "returned the str '1' for sample 10"),
    ("return [1]", "returned the list [1] for sample 10"),
    ("return {'score': 1}", "returned a dict for sample 10; say with --reward-key which of score is the reward"),
    ("\n    raise ValueError('no key')", ".py:3: ValueError: no key"),
    ("raise TimeoutError('their service')", "TimeoutError: their service"),
    ("raise SystemExit(3)", "RuntimeError: it called sys.exit(3)"),
]


@pytest.mark.parametrize(("body", "expected"), BAD)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_a_reward_does_wrong_names_the_sample_and_the_line(
    custom: Any, kind: str, body: str, expected: str
) -> None:
    made = custom(f"{kind} score(args, sample):\n    {body}\n")
    with pytest.raises(RewardError) as caught:
        score(made, samples("x"))
    assert "--custom-rm-path custom_rm_" in str(caught.value) and ".score" in str(caught.value)
    assert expected in str(caught.value)
    assert re.search(r"\.py:1\)|\.py:[23]: |sys\.exit", str(caught.value))
    assert "sample 10" in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "import time\ndef score(args, sample):\n    time.sleep(1.5)\n",
        "import time\nasync def score(args, sample):\n    time.sleep(1.5)\n",
        "import asyncio\nasync def score(args, sample):\n    await asyncio.sleep(60)\n",
    ],
)
def test_a_reward_that_hangs_ends_in_an_error(custom: Any, source: str) -> None:
    with pytest.raises(RewardError, match=r"did not return within 0.2 s for sample 10; .* --custom-rm-timeout"):
        score(custom(source, custom_rm_timeout=0.2), samples("x"))


def test_slow_plain_rewards_do_not_time_out_while_they_wait_for_each_other(custom: Any) -> None:
    source = "import time\ndef score(args, sample):\n    time.sleep(0.06)\n    return 1\n"
    assert score(custom(source, custom_rm_timeout=0.4), samples(*"abcdefghij")) == [1] * 10


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def score(args, samples):\n    return [1]\n", "returned 1 for group 2 (samples 10 to 11); with --group-rm"),
        ("def score(args, samples):\n    return 3\n", "returned a int for group 2"),
        ("def score(args, samples):\n    return [1, None]\n", "returned None for sample 11"),
    ],
)
def test_group_rewards_are_matched_by_length_and_order(custom: Any, source: str, expected: str) -> None:
    with pytest.raises(RewardError) as caught:
        score(custom(source, group_rm=True), samples("a", "b"))
    assert expected in str(caught.value)


def test_a_reward_key_must_be_there(custom: Any) -> None:
    with pytest.raises(RewardError, match="returned a dict without 'scroe'.*it has score, format"):
        score(custom(DICT, reward_key="scroe"), samples("a"))
    with pytest.raises(RewardError, match="--reward-key score asks for a dict"):
        score(custom(PLAIN, reward_key="score"), samples("a"))


def test_a_hook_is_refused_before_the_run(custom: Any) -> None:
    with pytest.raises(PluginError, match=r"called as f\(args, sample\) but is defined as f\(sample\)"):
        custom("def score(sample):\n    return 1\n")
    with pytest.raises(PluginError, match=r"--custom-rm-path no_such_module_x.score: there is no module"):
        runner(custom_rm_path="no_such_module_x.score")


def test_the_probe_shows_the_hook_a_finished_answer_of_the_data(custom: Any) -> None:
    source = (
        "def score(args, sample):\n"
        "    assert sample.metadata['level'] == 3 and sample.response == sample.label\n"
        "    assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs)\n"
        "    assert sample.status == sample.Status.COMPLETED\n"
        "    sample.metadata['level'] = 4\n"
        "    return 1\n"
    )
    example = Sample(prompt="q", tokens=[4, 5], label="7", metadata={"level": 3})
    custom(source).probe(example)
    assert (example.tokens, example.response, example.metadata, example.reward) == ([4, 5], "", {"level": 3}, None)
    assert example.status is SampleStatus.PENDING
    with pytest.raises(PluginError, match=r"the probe before the run, .*KeyError: 'level'"):
        custom(source).probe()


@pytest.mark.parametrize("body", ["return None", "return float('nan')", "return 'x'", "raise OSError('down')"])
def test_a_bad_reward_fails_its_probe(custom: Any, body: str) -> None:
    with pytest.raises(PluginError, match="the probe before the run"):
        custom(f"def score(args, sample):\n    {body}\n").probe()


def test_the_settings_are_read_only_for_hooks(custom: Any) -> None:
    with pytest.raises(RewardError, match="args is read-only"):
        score(custom("def score(args, sample):\n    args.lr = 1\n    return 1\n"), samples("a"))


def test_field_note_44_a_batch_without_any_answer_is_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    made = runner(rm_type="math")
    made.end_batch(samples("#### 7", "the answer is seven"))
    assert caplog.text == ""
    silent = samples(*[f"I think it is {i}" for i in range(5)])
    made.end_batch(silent)
    made.end_batch(silent)
    assert caplog.text.count("no answer was found in any of 5 responses") == 1
    assert caplog.text.count("response ends with: 'I think it is") == 3


def test_grader_failures_are_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    made = runner(rm_type="math", rm_timeout=0.3, rm_num_workers=1)
    made.start()
    assert score(made, samples(r"\boxed{2x}", r"\boxed{x^{9^{9^{9}}}}", label="x+x")) == [1, 0]
    assert made.take_counts() == {"rollout/grader_timeouts": 1.0, "rollout/grader_errors": 0.0}
    assert made.take_counts() == {"rollout/grader_timeouts": 0.0, "rollout/grader_errors": 0.0}
    made.close()


FAILS_SOMETIMES = """
def score(args, sample):
    if 'bad' in sample.response:
        raise ValueError(sample.response)
    return 1
"""


def test_on_error_zero_and_drop_go_on_and_count(custom: Any, caplog: pytest.LogCaptureFixture) -> None:
    group = samples("a", "bad 1", "b")
    zero = custom(FAILS_SOMETIMES, rm_on_error="zero")
    assert score(zero, group) == [1, 0.0, 1]
    assert zero.take_counts() == {"rollout/grader_timeouts": 0.0, "rollout/grader_errors": 1.0}
    assert zero.take_counts() == {}
    group = samples("a", "bad 1", "b")
    assert score(custom(FAILS_SOMETIMES, rm_on_error="drop"), group) == [1, None, 1]
    assert [s.status for s in group] == [SampleStatus.PENDING, SampleStatus.FAILED, SampleStatus.PENDING]
    assert "ValueError: bad 1; by --rm-on-error drop" in caplog.text
    keyed = "def score(args, sample):\n    return {'score': {'a': 1}.get(sample.response)}\n"
    assert score(custom(keyed, rm_on_error="zero", reward_key="score"), samples("a", "x")) == [
        {"score": 1},
        {"score": 0.0},
    ]
    with pytest.raises(RewardError, match="ValueError: bad 1"):
        score(custom(FAILS_SOMETIMES), samples("a", "bad 1"))


@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_more_than_one_percent_failing_stops_with_three_examples(custom: Any, policy: str) -> None:
    made = custom(FAILS_SOMETIMES, rm_on_error=policy)
    score(made, samples(*["fine"] * 297, "bad 0", "bad 1"))  # 2 of 299
    with pytest.raises(RewardError) as caught:
        score(made, samples("bad 2", "bad 3"))  # 4 of 301
    assert "--custom-rm-path: 4 of 301 answers could not be graded, more than 1%" in str(caught.value)
    assert [f"ValueError: bad {i}" in str(caught.value) for i in range(4)] == [False, True, True, True]


def test_a_whole_group_fails_together(custom: Any) -> None:
    source = "def score(args, samples):\n    return [1]\n"
    group = samples("a", "b")
    assert score(custom(source, group_rm=True, rm_on_error="drop"), group) == [None, None]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("    samples.sort(key=lambda s: -s.index)\n    return [s.index for s in samples]\n", "changed the list"),
        ("    return [{'score': 1, 'index': s.index} for s in reversed(samples)]\n", "in the order of the samples"),
    ],
)
def test_rewards_in_another_order_than_the_samples_are_refused(custom: Any, body: str, expected: str) -> None:
    with pytest.raises(RewardError, match=expected):
        score(custom(f"def score(args, samples):\n{body}", group_rm=True, reward_key="score"), samples("a", "b"))


def test_metadata_chooses_the_reward_of_a_row() -> None:
    made = runner(rm_type="gsm8k")
    group = samples("#### 7", "7", "A: 7")
    group[1].metadata = {"rm_type": "exact"}
    group[2].metadata = {"rm_type": "f1+0.5*exact"}
    assert score(made, group) == [1, 1, pytest.approx(2 / 2)]
    assert made.check_label is not None
    assert made.check_label("x", {}) == "it is not a number" and made.check_label("x", {"rm_type": "exact"}) is None
    assert "no such reward as exakt; did you mean exact" in str(made.check_label("x", {"rm_type": "exakt"}))
    assert "remote_rm needs --rm-url" in str(made.check_label("x", {"rm_type": "remote_rm"}))
    assert "expected the name of a reward" in str(made.check_label("x", {"rm_type": 5}))


def test_a_custom_reward_goes_before_metadata(custom: Any) -> None:
    group = samples("a")
    group[0].metadata = {"rm_type": "exact"}
    assert score(custom(PLAIN), group) == [4]


def test_a_reward_key_that_no_built_in_reward_gives_is_refused() -> None:
    with pytest.raises(ConfigError, match="--reward-key score: --rm-type math gives a number"):
        runner(rm_type="math", reward_key="score")
    with pytest.raises(ConfigError, match="gives a dict with score, acc, pred"):
        runner(rm_type="dapo", reward_key="accuracy")


def test_the_watching_reward_is_never_trained_on(custom: Any) -> None:
    made = custom(PLAIN, rm_watch_type="gsm8k")
    group = samples("#### 7", "#### 8")
    assert score(made, group) == [9, 9]
    made.end_batch(group, training=True)
    assert made.take_counts()["rollout/watch_reward"] == 0.5
    assert made.check_label is not None and made.check_label("x", {}) == "it is not a number"


def test_field_note_41_the_verdict_is_the_same_in_another_process_and_its_threads() -> None:
    source = (
        "import asyncio\n"
        "from tests.unit.rollout.test_rewards import runner, samples, score\n"
        "made = runner(rm_type='math', rm_timeout=5.0)\n"
        "made.start()\n"
        "group = samples(r'\\boxed{2\\sqrt{2}}', r'\\boxed{\\sqrt{9}}', '#### 8', label=r'\\sqrt{8}')\n"
        "async def in_a_thread():\n"
        "    return await asyncio.to_thread(score, made, group)\n"
        "print([score(made, group), asyncio.run(in_a_thread())])\n"
        "made.close()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "[[1, 0, 0], [1, 0, 0]]", done.stderr
