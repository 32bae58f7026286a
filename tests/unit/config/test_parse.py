"""Flags, YAML files and their errors. Expected values are written out by hand."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config.flags import FLAGS, flatten
from miles.config.parse import help_text, parse_flags, parse_train
from miles.errors import ConfigError

ENOUGH = "--hf-checkpoint models/tiny --prompt-data data/sums.jsonl --num-rollout 3 --rm-type random".split()


def errors_of(argv: list[str], *, parse=parse_flags) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    return list(caught.value.violations)


def test_every_kind_of_flag_is_read():
    config = parse_flags(
        [
            *("--rollout-batch-size", "16"),
            *("--lr", "-1e-5"),
            *("--hf-checkpoint", "models/tiny"),
            *("--rollout-stop", "User:", "-end", "--rollout-shuffle"),
            *("--rollout-stop-token-ids", "7", "8"),
            *("--apply-chat-template-kwargs", '{"enable_thinking": false}'),
            *("--phase-deadlines", '{"generate": 600}'),
            "--no-rollout-skip-special-tokens",
            "--progress=plain",
        ]
    ).config
    assert config.rollout.rollout_batch_size == 16
    assert config.optim.lr == -1e-5
    assert config.model.hf_checkpoint == "models/tiny"
    assert config.rollout.rollout_stop == ("User:", "-end")
    assert config.rollout.rollout_stop_token_ids == (7, 8)
    assert config.data.rollout_shuffle is True
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert config.process.phase_deadlines == {"generate": 600.0}
    assert config.rollout.rollout_skip_special_tokens is False
    assert config.process.progress == "plain"


def test_unset_stays_default_and_sources_tell():
    parsed = parse_flags(["--seed", "5"])
    assert {name for name, source in parsed.sources.items() if source != "default"} == {"seed"}
    assert parsed.sources["seed"] == "command line"


def test_last_value_wins_also_for_lists():
    config = parse_flags("--seed 1 --rollout-stop a b --seed 2 --rollout-stop c".split()).config
    assert config.optim.seed == 2
    assert config.rollout.rollout_stop == ("c",)


def test_sglang_is_the_same_flag_as_engine():
    parsed = parse_flags("--engine-page-size 4 --sglang-page-size 8 --sglang-disable-radix-cache".split())
    assert parsed.config.engine.engine_page_size == 8
    assert parsed.config.engine.engine_disable_radix_cache is True
    assert parse_flags(["--no-sglang-disable-radix-cache"]).config.engine.engine_disable_radix_cache is False


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--rollout-bach-size 3", "unknown flag --rollout-bach-size (did you mean --rollout-batch-size?)"),
        ("--rollout-batch 3", "unknown flag --rollout-batch (did you mean --rollout-batch-size?)"),
        ("--sglang-page-sise 3", "unknown flag --sglang-page-sise (did you mean --sglang-page-size?)"),
        ("--engine-page-sise 3", "unknown flag --engine-page-sise (did you mean --engine-page-size?)"),
        ("--no-use-kl-los", "unknown flag --no-use-kl-los (did you mean --no-use-kl-loss?)"),
        ("--qqqq", "unknown flag --qqqq"),
        ("--sglang-page-size big", "--sglang-page-size: 'big' is not a whole number"),
        ("--seed 1.5", "--seed: '1.5' is not a whole number"),
        ("--lr fast", "--lr: 'fast' is not a number"),
        ("--lr nan", "--lr: 'nan' is not a finite number"),
        ("--lr=-inf", "--lr: '-inf' is not a finite number"),
        ("--lr", "--lr: needs a value"),
        ("--lr 1 2", "--lr: takes one value, got 2: 1 2"),
        ("--rollout-stop", "--rollout-stop: needs at least one value"),
        ("--use-kl-loss yes", "--use-kl-loss: takes no value, not 'yes'; --no-use-kl-loss switches it off"),
        ("--no-lr", "--no-lr: --lr is not a switch, so there is no --no-lr"),
        (
            "--lr-decay-style cosin",
            "--lr-decay-style: 'cosin' is not one of constant, linear, cosine (did you mean cosine?)",
        ),
        ("--actor-num-nodes 2", "--actor-num-nodes: '2' is not one of 1"),
        ("--apply-chat-template-kwargs [1]", """: '[1]' is not a JSON mapping such as {"name": 1}"""),
        ("--phase-deadlines {a", "--phase-deadlines: '{a' is not JSON"),
        ('--phase-deadlines {"a":NaN}', "NaN is not a finite number"),
        ('--phase-deadlines {"a":"x"}', "'a': 'x' is not a number"),
        ("train.jsonl --seed 1", "'train.jsonl' stands before any flag"),
        ("--explain all", "--explain takes no value, not 'all'"),
        ("--config", "--config needs one YAML file, got 0"),
    ],
)
def test_mistakes_are_named(argv, message):
    (error,) = errors_of(argv.split())
    assert message in error


def test_all_mistakes_are_reported_together_with_the_rules():
    errors = errors_of([*ENOUGH, *"--lr fast --seeed 3 --global-batch-size 100".split()], parse=parse_train)
    assert len(errors) == 3
    assert "--lr: 'fast'" in errors[0]
    assert "--seeed (did you mean --seed?)" in errors[1]
    assert "--global-batch-size 100" in errors[2]


def test_a_rule_about_a_flag_that_could_not_be_read_is_silent():
    assert len(errors_of([*ENOUGH[2:], "--hf-checkpont", "models/tiny"], parse=parse_train)) == 1
    assert len(errors_of([*ENOUGH[:-1], "--rm-tipe", "random"], parse=parse_train)) == 2  # --rm-type needs a value


def test_a_file_that_cannot_be_read_is_the_only_mistake(tmp_path):
    assert len(errors_of(["--config", str(tmp_path / "none.yaml")], parse=parse_train)) == 1
    (tmp_path / "run.yaml").write_text("hf_checkpoint: a\nprompt_dat: b\nnum_rollout: 1\nrm_type: random\nlr: -1\n")
    wrong_key, rule = errors_of(["--config", str(tmp_path / "run.yaml")], parse=parse_train)
    assert "prompt_dat" in wrong_key and "--lr must be at least 0" in rule


def test_file_gives_defaults_and_the_command_line_wins(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "# a comment\n"
        "lr: 1e-5\n"
        "min-lr: 1_0.5e-7\n"
        "seed: 7\n"
        "use_kl_loss: yes\n"
        "rollout_skip_special_tokens: off\n"
        "progress: off\n"
        "run_name: 2026-10-15\n"
        "ref_load: null\n"
        "rollout_stop: ['null', -end, \"--x\"]\n"
        "rollout_stop_token_ids: 9\n"
        "sglang_page_size: 8\n"
        "apply_chat_template_kwargs: {enable_thinking: false, style: 'true', temperature: 1e-3, note: on}\n"
    )
    parsed = parse_flags(["--seed", "8", "--config", str(file)])
    config = parsed.config
    assert config.optim.lr == 1e-5
    assert config.optim.min_lr == 10.5e-7
    assert config.optim.seed == 8
    assert config.algorithm.use_kl_loss is True
    assert config.rollout.rollout_skip_special_tokens is False
    assert config.process.progress == "off"
    assert config.run_dir.run_name == "2026-10-15"
    assert config.model.ref_load is None
    assert config.rollout.rollout_stop == ("null", "-end", "--x")
    assert config.rollout.rollout_stop_token_ids == (9,)
    assert config.engine.engine_page_size == 8
    kwargs = {"enable_thinking": False, "style": "true", "temperature": 1e-3, "note": "on"}
    assert config.data.apply_chat_template_kwargs == kwargs
    assert parsed.sources["seed"] == "command line"
    assert parsed.sources["lr"] == f"config {file}"
    assert parsed.sources["ref_load"] == "default"


@pytest.mark.parametrize(
    "text, message",
    [
        ("seed: 1\nleraning_rate: 2\n", "run.yaml, line 2: leraning_rate is not a setting"),
        ("rollout_batch_sizes: 2\n", "line 1: rollout_batch_sizes is not a setting (did you mean rollout_batch_size?)"),
        ("config: other.yaml\n", "run.yaml, line 1: config is not a setting"),
        ("seed: x\n", "run.yaml, line 1: seed: 'x' is not a whole number"),
        ("seed: true\n", "run.yaml, line 1: seed: 'true' is not a whole number"),
        ("lr: .nan\n", "run.yaml, line 1: lr: '.nan' is not a number"),
        ("seed: [1, 2]\n", "run.yaml, line 1: seed: expected one value, not a list"),
        ("seed: {a: 1}\n", "run.yaml, line 1: seed: expected one value, not a mapping"),
        ("seed: null\n", "run.yaml, line 1: seed: needs a value"),
        ("use_kl_loss: 2\n", "run.yaml, line 1: use_kl_loss: expected true or false, not '2'"),
        ("rollout_stop: {a: b}\n", "rollout_stop: expected a list of values, not a mapping"),
        ("rollout_stop: [[a]]\n", "rollout_stop: every entry of the list must be a plain value"),
        ("phase_deadlines: 3\n", "phase_deadlines: '3' is not"),
        ("seed: 1\nseed: 2\n", "run.yaml, line 2: seed is set twice"),
        ("- seed\n", "run.yaml: must be a mapping of settings"),
        ("seed: [1\n", "run.yaml: is not valid YAML"),
    ],
)
def test_mistakes_in_a_file_name_file_line_and_key(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    (error,) = errors_of(["--config", str(file)])
    assert message in error


def test_missing_and_unreadable_files_are_named(tmp_path):
    missing = tmp_path / "none.yaml"
    assert errors_of(["--config", str(missing)]) == [f"--config {missing}: there is no such file"]
    assert "cannot be read" in errors_of(["--config", str(tmp_path)])[0]
    (tmp_path / "empty.yaml").write_text("")
    assert parse_flags(["--config", str(tmp_path / "empty.yaml")]).config == parse_flags([]).config


def test_preset_is_below_file_and_command_line(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("seed: 2\n")
    preset = "--seed 1 --lr 1 --clip-grad 3".split()
    argv = [*ENOUGH, "--config", str(file), "--lr", "0"]
    parsed = parse_train(argv, preset=preset, preset_name="quickstart")
    assert (parsed.config.optim.seed, parsed.config.optim.lr, parsed.config.optim.clip_grad) == (2, 0.0, 3.0)
    assert parsed.sources["clip_grad"] == "quickstart"
    assert parsed.sources["run_name"] == "resolved"


def test_help_has_every_flag_with_default_unit_and_section():
    text = " ".join(help_text("train").split())
    for flag in FLAGS.values():
        assert flag.spelling in text
        assert flag.section_title in text
    assert "prompts in a rollout (prompts; at least 1; default 32)" in text
    assert "engine and trainer share the device (default on; no effect here)" in text


def test_help_is_printed_before_anything_is_checked(capsys):
    with pytest.raises(SystemExit) as end:
        parse_train(["--seed", "x", "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: miles train")


TEXT = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1)
VALUES = {
    int: st.integers(min_value=1, max_value=2**62),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: TEXT,
    bool: st.booleans(),
    dict: st.dictionaries(TEXT, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
}


@given(st.data())
def test_any_value_survives_the_command_line(data):
    flag = data.draw(st.sampled_from([flag for flag in FLAGS.values() if not flag.choices]))
    value = data.draw(VALUES[flag.kind])
    if flag.kind is bool:
        argv = [flag.spelling if value else "--no-" + flag.spelling[2:]]
    else:
        argv = [f"{flag.spelling}={json.dumps(value) if flag.kind is dict else value}"]
    read = flatten(parse_flags(argv).config)[flag.name]
    assert read == ((value,) if flag.many else value)


def test_every_flag_has_a_help_line_and_a_title():
    for flag in FLAGS.values():
        assert flag.section_title and flag.help, flag.name
        assert re.fullmatch("[a-z][a-z0-9_]*", flag.name)
        assert not isinstance(flag.default, float) or math.isfinite(flag.default)
