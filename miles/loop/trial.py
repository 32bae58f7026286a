"""Tries a run out in a scratch folder: the same objects, a few answers, one step whose learning rate is 0."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from miles.config.flags import flatten, with_values
from miles.config.resolve import samples_per_rollout
from miles.config.sections import RunConfig
from miles.data.prompts import load_prompts
from miles.errors import ConfigError, MilesError
from miles.loop import preflight, stages
from miles.loop.build import build
from miles.loop.placement import place
from miles.loop.preflight import FAIL, OK, SKIP, WARN, Verdict
from miles.loop.run_folder import open_run_folder, run_folder_of
from miles.loop.schedule import plan_schedule
from miles.loop.stages import Run
from miles.loop.worker import WorkerContext
from miles.model.load import resolve_model
from miles.model.spec import ModelSpec, load_spec
from miles.observe.heartbeat import Heartbeat
from miles.report.ranges import load_ranges
from miles.rollout.hook_table import HOOKS
from miles.rollout.hooks import RolloutHooks
from miles.rollout.rewards import RewardRunner
from miles.text.tokenizer import Tokenizer, load_tokenizer
from miles.trainer.hooks import load_hooks
from miles.types import Sample

T = TypeVar("T")

NUM_ANSWERS = 8
MAX_ANSWER_TOKENS = 128
WHOLE_STEP_S = 20.0  # a whole step that should take less than this is measured, else it is estimated
# Mean distance of the log-probs above which engine and trainer do not compute the same model.
MAX_GAP = {"cpu": 1e-3, "cuda": 0.05}


class Checks:
    """Collects verdicts. After a failed check that others build on, those are skipped."""

    def __init__(self, say: Callable[[Verdict], None]) -> None:
        self._say = say
        self.verdicts: list[Verdict] = []

    @property
    def has_failed(self) -> bool:
        return any(verdict.status == FAIL for verdict in self.verdicts)

    def add(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        self._say(verdict)

    def attempt(self, name: str, work: Callable[[], T]) -> T | None:
        """What `work` returns; an error in it is the verdict of this check, and None is returned."""
        try:
            return work()
        except MilesError as error:
            self.add(Verdict(name, FAIL, str(error)))
            return None


def check_run(config: RunConfig, say: Callable[[Verdict], None]) -> list[Verdict]:
    """All checks of a resolved config, in the order in which they get more expensive."""
    checks = Checks(say)
    _check_inputs(config, checks)
    if checks.has_failed:
        for name in ("log-probs", "loss mask", "step time"):
            checks.add(Verdict(name, SKIP, "the checks before it must pass first"))
        return checks.verdicts
    with tempfile.TemporaryDirectory(prefix="miles-check-") as scratch:
        checks.attempt("trial", lambda: _try_out(config, Path(scratch), checks))
    return checks.verdicts


def _check_inputs(config: RunConfig, checks: Checks) -> None:
    loaded = checks.attempt("model", lambda: _load_files(config, checks))
    checks.attempt("hooks", lambda: _load_hooks(config, checks))
    if loaded is None:
        return
    spec, tokenizer = loaded
    checks.add(preflight.stop_ids(config, spec, tokenizer))
    num_prompts = config.rollout.rollout_batch_size
    if config.algorithm.loss_type != "sft_loss":
        prompts = checks.attempt("data", lambda: _load_data(config, spec, tokenizer, checks)) or []
        checks.attempt("reward", lambda: _try_reward(config, prompts, checks))
        checks.add(preflight.round_trip(tokenizer, prompts))
        num_prompts = len(prompts) or num_prompts
    placement = checks.attempt("hardware", lambda: place(config.model, spec))
    if placement is not None:
        checks.add(preflight.hardware(placement))
        machine = preflight.machine_here(placement, run_folder_of(config, lock_fd=-1).save)
        schedule = plan_schedule(config, num_prompts=num_prompts)
        checks.add(preflight.memory_and_disk(config, spec, machine, schedule))


def _load_files(config: RunConfig, checks: Checks) -> tuple[ModelSpec, Tokenizer]:
    assert config.model.hf_checkpoint is not None, "rules.py demands --hf-checkpoint"
    folder = resolve_model(config.model.hf_checkpoint)
    spec = load_spec(folder)
    tokenizer = load_tokenizer(folder, chat_template_path=config.model.chat_template_path)
    tokenizer.check_vocabulary(spec.vocab_size, model=config.model.hf_checkpoint)
    checks.add(Verdict("model", OK, f"{spec.architecture}, {spec.num_parameters:,} parameters, {folder}"))
    return spec, tokenizer


def _load_hooks(config: RunConfig, checks: Checks) -> None:
    load_hooks(config)
    hooks = RolloutHooks(config)
    try:
        hooks.probe()
    finally:
        hooks.close()
    given = [path for kind in HOOKS if (path := flatten(config)[kind.name]) is not None]
    text = f"{', '.join(given)} imported, and called on an example" if given else "none are given"
    checks.add(Verdict("hooks", OK, text))


def _load_data(config: RunConfig, spec: ModelSpec, tokenizer: Tokenizer, checks: Checks) -> Sequence[Sample]:
    if config.data.prompt_data is None:
        raise ConfigError("miles check looks at the rows of --prompt-data; with --data-source-path there are none")
    max_len = config.rollout.rollout_max_prompt_len
    loaded = load_prompts(
        config.data,
        tokenizer,
        max_context_len=spec.context_len(config.rollout.rollout_max_context_len),
        max_prompt_len=max_len,
        hooks=config.hooks,
    )
    lengths = [len(sample.tokens) for sample in loaded.prompts]
    text = f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens, {loaded.num_too_long} left out"
    checks.add(Verdict("data", OK, text, data={"num_prompts": len(lengths)}))
    return loaded.prompts


def _try_reward(config: RunConfig, prompts: Sequence[Sample], checks: Checks) -> None:
    rewards = RewardRunner(config)
    try:
        rewards.start()
        rewards.probe(prompts[0] if prompts else None)
        kind = config.reward.custom_rm_path or config.reward.rm_type
        checks.add(Verdict("reward", OK, f"{kind} is there and answers"))
        if rewards.check_label is not None and prompts:
            problems = [rewards.check_label(sample.label, sample.metadata) for sample in prompts]
            checks.add(preflight.labels(prompts, problems))
    finally:
        rewards.close()


def _try_out(config: RunConfig, scratch: Path, checks: Checks) -> None:
    start = time.perf_counter()
    # Few of each prompt, so that the shown ones are of different prompts.
    num_answers = min(2, config.rollout.n_samples_per_prompt)
    answer_tokens = min(MAX_ANSWER_TOKENS, config.rollout.rollout_max_response_len)
    small = {"n_samples_per_prompt": num_answers, "rollout_max_response_len": answer_tokens}
    num_prompts = max(1, min(NUM_ANSWERS // num_answers, config.rollout.rollout_batch_size))
    with _scratch_run(config, scratch / "small", num_prompts=num_prompts, **small) as run:
        load_s = time.perf_counter() - start
        seconds, groups, gap = _one_step(run)
        if run.engine is not None:
            checks.add(_gap_verdict(gap, run, num_answers=num_prompts * num_answers))
        # The first answer of each prompt, then the second, and so on: what is shown differs.
        samples = [sample for turn in itertools.zip_longest(*groups) for sample in turn if sample is not None]
        tokenizer = load_tokenizer(run.model_folder, chat_template_path=config.model.chat_template_path)
        shown = preflight.shown_with_mask(tokenizer, samples)
        checks.add(Verdict("loss mask", OK, "between [[ and ]] is what is trained on", shown))
    share = samples_per_rollout(config) / len(samples)
    longer = 1.0
    if run.engine is not None:
        longer = config.rollout.rollout_max_response_len / answer_tokens
    estimate_s = seconds * share * longer
    if estimate_s > WHOLE_STEP_S:
        text = f"at most about {estimate_s:,.0f} s, from {len(samples)} answers of at most {answer_tokens} tokens"
        checks.add(Verdict("step time", OK, text, data={"seconds": estimate_s, "measured": False}))
        return
    with _scratch_run(config, scratch / "whole", num_prompts=config.rollout.rollout_batch_size) as run:
        seconds, _, _ = _one_step(run)
    text = f"{seconds:.2f} s for the first step, measured; start-up takes {load_s:.1f} s"
    checks.add(Verdict("step time", OK, text, data={"seconds": seconds, "measured": True}))


@contextmanager
def _scratch_run(config: RunConfig, folder: Path, *, num_prompts: int, **changes: Any) -> Iterator[Run]:
    values = {
        "runs_dir": str(folder), "run_name": "trial", "save": str(folder / "save"), "load": str(folder / "save"),
        "save_hf": None, "num_rollout": 1, "num_epoch": None, "rollout_batch_size": num_prompts,
        "lora_dropout": 0.0, "lr": 0.0, "min_lr": 0.0, "lr_warmup_init": 0.0, "critic_lr": 0.0,
        "eval_interval": None, "eval_prompt_data": (), "eval_config": None, "eval_function_path": None,
        "max_logprob_gap": 0.0, "num_steps_per_rollout": None, "over_sampling_batch_size": None,
        "dynamic_sampling_filter_path": None, "partial_rollout": False, "mask_offpolicy_in_partial_rollout": False,
        "save_debug_rollout_data": None, "load_debug_rollout_data": None, "debug_train_only": False,
        "debug_rollout_only": False,
    }  # fmt: skip
    scratch = with_values(config, {**values, **changes})
    scratch = with_values(scratch, {"global_batch_size": samples_per_rollout(scratch)})
    run_folder = open_run_folder(scratch, command=["miles", "check"])
    try:
        with build(scratch, run_folder, WorkerContext(Heartbeat(lambda message: None))) as run:
            yield run
    finally:
        run_folder.close()


def _one_step(run: Run) -> tuple[float, list[list[Sample]], dict[str, float]]:
    """Seconds, answers, and the record of a step that changes nothing."""
    start = time.perf_counter()
    groups = stages.generate(run)
    result = stages.train(run, groups)
    return time.perf_counter() - start, groups, result.steps[0]


def _gap_verdict(record: dict[str, float], run: Run, *, num_answers: int) -> Verdict:
    name = "train/train_rollout_logprob_abs_diff"
    if name not in record:
        return Verdict("log-probs", SKIP, "all answers were empty")
    mean, highest = record[name], record[f"{name}_max"]
    limit = _gap_limit(run)
    text = f"engine and trainer differ by {mean:.2g} nat on average, {highest:.2g} at most, over {num_answers} answers"
    data = {"mean": mean, "max": highest, "limit": limit}
    if run.config.numerics.true_on_policy_mode and highest > 0:
        return Verdict("log-probs", FAIL, f"{text}; --true-on-policy-mode promises exactly 0", data=data)
    if mean > limit:
        advice = "they do not compute the same model: check --hf-checkpoint, --init-from and the dtype"
        return Verdict("log-probs", WARN, f"{text}; more than {limit:g}: {advice}", data=data)
    return Verdict("log-probs", OK, text, data=data)


def _gap_limit(run: Run) -> float:
    """What the healthy runs of `--ranges` allow at step 0, else what this kind of device does."""
    ranges = run.config.track.ranges
    healthy = load_ranges(Path(ranges)).gap_limit() if ranges is not None else None
    return MAX_GAP[run.placement.device.type] if healthy is None else healthy
