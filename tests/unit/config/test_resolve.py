"""Defaults that are filled in, the identity of a run, and what is stored and shown of the settings."""

import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from miles.config.dump import dump_config, load_config
from miles.config.explain import explain_text
from miles.config.flags import FLAGS, Args, flatten, with_values
from miles.config.parse import parse_train
from miles.config.resolve import identity, identity_diff, resolve
from miles.config.sections import RunConfig

ENOUGH = "--hf-checkpoint models/Tiny-1B/ --prompt-data data/sums.jsonl@[0:9] --num-rollout 3 --rm-type random".split()


def resolved(*argv: str) -> RunConfig:
    return parse_train([*ENOUGH, *argv]).config


def test_defaults_come_from_the_flags_they_name():
    config = resolved("--eps-clip", "0.3", "--rollout-temperature", "0.7", "--label-key", "answer")
    assert config.algorithm.eps_clip_high == 0.3
    assert config.batch.global_batch_size == 32 * 8
    assert config.eval.eval_temperature == 0.7
    assert config.eval.eval_label_key == "answer"
    assert config.run_dir.save == f"runs/{config.run_dir.run_name}/checkpoints"
    assert config.run_dir.load == config.run_dir.save


def test_values_that_were_given_stay():
    argv = "--eps-clip-high 0.28 --global-batch-size 64 --eval-temperature 0 --save ck --run-name a"
    config = resolved(*argv.split())
    assert config.algorithm.eps_clip_high == 0.28
    assert config.batch.global_batch_size == 64
    assert config.eval.eval_temperature == 0.0
    assert (config.run_dir.save, config.run_dir.load, config.run_dir.run_name) == ("ck", "ck", "a")
    assert resolved("--load", "old").run_dir.load == "old"


def test_steps_of_a_rollout_set_the_batch():
    assert resolved("--num-steps-per-rollout", "4").batch.global_batch_size == 64
    assert resolved("--loss-type", "sft_loss").batch.global_batch_size == 32


def test_learning_rate_0_is_0_at_every_step():
    optim = resolved(
        *"--lr 0 --min-lr 1e-5 --lr-warmup-init 1e-6 --lr-warmup-iters 2 --lr-decay-style linear".split()
    ).optim
    assert (optim.lr, optim.min_lr, optim.lr_warmup_init) == (0, 0, 0)


@pytest.mark.parametrize("device, dtype", [("cpu", "float32"), ("cuda", "bfloat16"), ("auto", "auto")])
def test_dtype_follows_a_device_that_is_named(device, dtype):
    assert resolved("--device", device).model.dtype == dtype


def test_run_name_tells_model_data_and_settings():
    name = resolved().run_dir.run_name
    assert name is not None
    model, data, digest = name.rsplit("-", 2)
    assert (model, data, len(digest)) == ("Tiny-1B", "sums", 8)
    assert resolved("--lr", "1e-6", "--eps-clip-high", "0.2").run_dir.run_name == name  # the defaults, spelled out
    assert resolved("--num-rollout", "9", "--in-process").run_dir.run_name == name  # may differ on resume
    assert resolved("--lr", "2e-6").run_dir.run_name != name


def test_run_name_of_awkward_paths_is_one_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    name = resolved("--hf-checkpoint", ".", "--prompt-data", "d/x y.parquet").run_dir.run_name
    assert name is not None and name.startswith(f"{tmp_path.name}-x-y-")


def test_identity_ignores_what_may_differ_and_what_has_no_effect():
    known = identity(resolved())
    assert {"lr", "seed", "rollout_batch_size"} <= known.keys()
    assert not {"num_rollout", "run_name", "eval_interval", "colocate", "progress"} & known.keys()


def test_identity_diff_names_flag_and_both_values():
    assert identity_diff(identity(resolved()), identity(resolved("--num-rollout", "4"))) == []
    assert identity_diff(identity(resolved()), identity(resolved("--lr", "0.01", "--seed", "3"))) == [
        "--lr: 1e-06 in the run folder, 0.01 now",
        "--seed: 1234 in the run folder, 3 now",
    ]


def test_stored_settings_are_read_back_exactly(tmp_path):
    config = resolved(*"--lr 1e-5 --rollout-stop null -x 1e-5 --use-kl-loss --run-name 007 --ref-load ~".split())
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config
    assert resolve(load_config(file)) == (config, frozenset())
    plain = yaml.safe_load(file.read_text())  # a standard reader sees the same values
    assert (plain["lr"], plain["run_name"], plain["use_kl_loss"]) == (1e-5, "007", True)


LEAVES = st.one_of(st.booleans(), st.none(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text())


@given(
    kwargs=st.dictionaries(st.text(max_size=8), st.one_of(LEAVES, st.lists(LEAVES, max_size=3)), max_size=3),
    stop=st.lists(st.text(), max_size=3),
    lr=st.floats(allow_nan=False, allow_infinity=False),
    name=st.text(),
)
def test_any_value_is_stored_and_read_back(tmp_path_factory, kwargs, stop, lr, name):
    values = {"apply_chat_template_kwargs": kwargs, "rollout_stop": tuple(stop), "lr": lr, "run_name": name}
    config = with_values(RunConfig(), values)
    file = tmp_path_factory.mktemp("dump") / "config.yaml"
    file.write_bytes(dump_config(config).encode())
    assert load_config(file) == config


def test_explain_shows_every_flag_with_value_and_source(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("seed: 5\n")
    parsed = parse_train([*ENOUGH, "--config", str(file), "--explain", "--num-epoch", "2"])
    assert parsed.explain
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in explain_text(parsed).splitlines() if "--" in line}
    assert lines.keys() >= {flag.spelling for flag in FLAGS.values()}
    assert lines["--seed"] == f"5 [config {file}]"
    assert lines["--num-rollout"] == "3 [command line]"
    assert lines["--num-epoch"] == "2 [command line] no effect here: --num-rollout is set"
    assert lines["--global-batch-size"] == "256 [resolved]"
    assert lines["--lr"] == "1e-06 [default]"
    assert lines["--colocate"] == "on [default] no effect here"
    assert lines["--device"] == "auto [default] found when the worker starts: a GPU when there is one"
    assert lines["--critic-lr"] == "- [default] no effect here: --advantage-estimator is not ppo"
    assert lines["--tis-clip"] == "- [default] found when the worker starts: by correction"
    assert lines["--num-threads"] == "- [default] found when the worker starts: by model size"


@pytest.mark.parametrize(
    "argv, decision",
    [
        ("", "needs no extra pass"),
        ("--global-batch-size 64", "one extra pass of the trainer before the 4 optimizer steps"),
        ("--global-batch-size 64 --use-rollout-logprobs", "Old log-probs: the engine's"),
        ("--loss-type sft_loss", "no engine writes answers"),
        ("", "Off-policy correction: tis, from the first sample on that is older"),
        ("--rollout-top-p 0.9", "Sampling replay: every model is scored over the tokens that"),
    ],
)
def test_explain_says_what_was_decided(argv, decision):
    assert decision in explain_text(parse_train([*ENOUGH, *argv.split()]))


def test_args_of_hooks_are_flat_and_read_only():
    args = Args(resolved())
    assert args.rollout_batch_size == 32
    with pytest.raises(AttributeError, match="did you mean rollout_top_p"):
        args.rollout_topp  # noqa: B018
    with pytest.raises(AttributeError, match="read-only"):
        args.seed = 3


def test_with_values_changes_only_what_is_named():
    before, after = flatten(RunConfig()), flatten(with_values(RunConfig(), {"seed": 1, "rollout_seed": 2}))
    assert {name: value for name, value in after.items() if before[name] != value} == {"seed": 1, "rollout_seed": 2}


def test_settings_need_no_torch():
    modules = "miles.config.explain, miles.config.dump"
    code = f"import sys, {modules}; print(*{{'torch', 'transformers', 'rich'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
