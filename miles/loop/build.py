"""The only wiring file: from settings to the objects of a run, in the order in which mistakes are cheapest to find.

Rewards and hooks first (they need no model, and their processes must start before any thread of torch), then data,
then the weights, then the trainer and the engine on them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from miles.checkpoint.background import Saver
from miles.checkpoint.hf import check_export_target
from miles.checkpoint.keep import Keep
from miles.checkpoint.layout import ADAPTER_FOLDER
from miles.checkpoint.load import LoadedCheckpoint, load_checkpoint, weights_folder
from miles.checkpoint.peft import load_adapter
from miles.checkpoint.save import saving_to
from miles.config.resolve import reads_reference
from miles.config.sections import RunConfig
from miles.data.buffer import GroupBuffer
from miles.data.prompts import PromptFlags, load_prompts
from miles.data.source import MixedSource, PromptSource
from miles.engine.local import LocalEngine
from miles.errors import CheckpointError, ConfigError
from miles.evals.run import EvalResult, evaluate, from_function
from miles.evals.suites import EvalSuite, load_suites
from miles.loop.numbers import Hardware
from miles.loop.placement import Placement, keep_to_one_workspace, memory_used_and_free_gb, place
from miles.loop.preflight import report_at_start
from miles.loop.profiler import StepProfiler
from miles.loop.run_folder import RunFolder
from miles.loop.schedule import plan_schedule
from miles.loop.stages import RolloutProducer, Run, restore
from miles.loop.tracking import check_tracking, follow
from miles.loop.worker import WorkerContext
from miles.model.decoder import Decoder
from miles.model.load import load_model, resolve_model
from miles.model.lora import add_lora
from miles.model.spec import ModelSpec, load_spec
from miles.observe.gate import GATE
from miles.observe.gpu import measure_rates
from miles.observe.heartbeat import Heartbeat
from miles.observe.heat import guarding, make_sensor
from miles.observe.log import get_logger
from miles.observe.metrics import MetricsWriter
from miles.observe.timers import Timers
from miles.plan.memory import num_adapter_parameters
from miles.rollout.client import EngineClient
from miles.rollout.hooks import Hook, RolloutHooks
from miles.rollout.producer import Producer, RolloutContext
from miles.rollout.replace import HookedSource, RolloutFunction
from miles.rollout.replay import ReplayProducer
from miles.rollout.rewards import RewardRunner
from miles.rollout.sft import SftProducer, load_sft_rows
from miles.text.tokenizer import Tokenizer, load_tokenizer
from miles.trainer.hooks import load_hooks
from miles.trainer.trainer import LocalTrainer

logger = get_logger(__name__)


@dataclass(frozen=True)
class Writers:
    """What writes and scores answers on the engine, or takes given ones, and how far it is."""

    config: RunConfig
    source: GroupBuffer
    suites: list[EvalSuite]
    engine: LocalEngine | None
    rewards: RewardRunner | None
    hooks: RolloutHooks
    tokenizer: Tokenizer
    max_context_len: int
    heartbeat: Heartbeat

    def producer(self) -> RolloutProducer:
        if self.config.debug.load_debug_rollout_data is not None:
            return ReplayProducer(self.config.debug.load_debug_rollout_data)
        if self.config.algorithm.loss_type == "sft_loss":
            return SftProducer(self.source.source, rollout_batch_size=self.config.rollout.rollout_batch_size)
        if self.hooks.rollout is not None:
            return self._function(self.hooks.rollout)
        return Producer(self._context, self.source)

    async def evaluate(self, rollout_id: int, hf_dir: str | None) -> EvalResult:
        if self.replacement is not None:
            return from_function(await self.replacement.evaluate(rollout_id, hf_dir))
        return await evaluate(self.suites, self._context)

    @cached_property
    def replacement(self) -> RolloutFunction | None:
        """The user's evaluation, in the place of ours."""
        return None if self.hooks.evaluation is None else self._function(self.hooks.evaluation)

    def _function(self, hook: Hook) -> RolloutFunction:
        return RolloutFunction(hook, self.hooks, self.client, self.source, max_context_len=self.max_context_len)

    @cached_property
    def client(self) -> EngineClient:
        assert self.engine is not None, "answers are written on an engine"
        return EngineClient(self.engine, self.tokenizer)

    @cached_property
    def _context(self) -> RolloutContext:
        assert self.rewards is not None, "rules.py demands a reward where answers are written"
        return RolloutContext(
            self.config, self.client, self.rewards, self.hooks, self.max_context_len, self._show_progress
        )

    def _show_progress(self, done: int, total: int) -> None:
        self.heartbeat.progress(f"{done} of {total} groups")


@contextmanager
def build(config: RunConfig, folder: RunFolder, context: WorkerContext) -> Iterator[Run]:
    """Make the objects of a run and restore it; on leaving, end every thread and process they started."""
    with ExitStack() as stack:
        context.heartbeat.set_phase("start", detail="rewards")
        if config.numerics.deterministic_mode:
            keep_to_one_workspace()
        rewards = None
        if config.reward.rm_type is not None or config.reward.custom_rm_path is not None:
            rewards = RewardRunner(config)
            stack.callback(rewards.close)
            rewards.start()
        sensor = make_sensor(config.process)
        run = _assemble(config, folder, context, rewards, stack)
        if rewards is not None:
            stack.callback(lambda: run.runner.run(rewards.disconnect()))
        # Left first, so that the engine does not wait at a shut gate for its end.
        stack.enter_context(guarding(sensor, config.process, folder.path, context.heartbeat))
        context.on_stop(GATE.ignore)
        context.on_stop(run.interrupt_if_stopping)
        yield run


def _assemble(
    config: RunConfig, folder: RunFolder, context: WorkerContext, rewards: RewardRunner | None, stack: ExitStack
) -> Run:
    heartbeat = context.heartbeat
    load_hooks(config)  # a mistake in one must be found before a model is loaded
    hooks = RolloutHooks(config)
    stack.callback(hooks.close)
    hooks.probe()
    check_tracking(config.track)
    heartbeat.set_phase("load", detail="data")
    assert config.model.hf_checkpoint is not None, "rules.py demands --hf-checkpoint"
    model_folder = resolve_model(config.model.hf_checkpoint)
    spec = load_spec(model_folder)
    tokenizer = load_tokenizer(model_folder, chat_template_path=config.model.chat_template_path)
    tokenizer.check_vocabulary(spec.vocab_size, model=config.model.hf_checkpoint)
    max_context_len = spec.context_len(config.rollout.rollout_max_context_len)
    source: PromptSource | MixedSource | HookedSource
    if hooks.source is not None:
        source = HookedSource(hooks.source, hooks.args, tokenizer)
        if rewards is not None:
            rewards.probe()
    else:
        source = _load_source(config, tokenizer, rewards, max_context_len=max_context_len)
    check_label = rewards.check_label if rewards is not None else None
    suites = load_suites(config, tokenizer, max_context_len=max_context_len, check_label=check_label)
    schedule = plan_schedule(config, num_prompts=0 if isinstance(source, HookedSource) else len(source))
    heartbeat.set_phase("load", detail="checkpoint")
    stack.enter_context(saving_to(folder.save))
    loaded = _load_checkpoint(folder)
    if config.run_dir.save_hf is not None:
        check_export_target(Path(config.run_dir.save_hf))
    heartbeat.set_phase("load", detail="weights")
    placement = place(config.model, spec)
    logger.info(placement.describe())
    report_at_start(config, spec, tokenizer, placement, save=folder.save, schedule=schedule)
    start_folder = _start_folder(config, model_folder, spec)
    model = _load_policy(config, start_folder, spec, placement)
    trainer = LocalTrainer(
        model,
        _load_reference(config, model, start_folder, placement),
        config,
        total_steps=schedule.num_steps,
        teacher=_load_teacher(config, spec, placement),
        critic=_load_critic(config, start_folder, spec, placement),
    )
    saver = _saver(config, folder, start_folder if config.lora.is_on else model_folder, stack)
    metrics = MetricsWriter(folder.path, first_step=None if loaded is None else loaded.iteration)
    stack.callback(metrics.close)
    follow(metrics, config, folder.path, first_step=0 if loaded is None else loaded.iteration, stack=stack)
    has_samples = config.algorithm.loss_type == "sft_loss" or config.debug.debug_train_only
    needs_engine = suites or hooks.evaluation is not None or not has_samples
    engine = _start_engine(config, model, tokenizer, placement, source, stack) if needs_engine else None
    buffer = GroupBuffer(source, take=hooks.take_parked)
    writers = Writers(config, buffer, suites, engine, rewards, hooks, tokenizer, max_context_len, heartbeat)
    run = Run(
        config=config,
        folder=folder,
        context=context,
        model_folder=model_folder,
        start_folder=start_folder,
        placement=placement,
        hardware=Hardware(spec, placement.dtype.itemsize, measure_rates(placement.device, placement.dtype)),
        schedule=schedule,
        source=buffer,
        rewards=rewards,
        producer=writers.producer(),
        engine=engine,
        evaluate=writers.evaluate if suites or hooks.evaluation is not None else None,
        hooks=hooks,
        trainer=trainer,
        metrics=metrics,
        profiler=StepProfiler(config.process.profile_steps, folder.path),
        saver=saver,
        timers=Timers(on_phase=heartbeat.set_phase),
        runner=stack.enter_context(asyncio.Runner()),
    )
    if writers.replacement is not None:
        stack.callback(lambda function: run.runner.run(function.dispose()), writers.replacement)
    restore(run, loaded)
    return run


def _load_checkpoint(folder: RunFolder) -> LoadedCheckpoint | None:
    """What this run has saved, or else the checkpoint of another run that `--load` names."""
    own = load_checkpoint(folder.save)
    if own is not None or folder.load == folder.save:
        return own
    other = load_checkpoint(folder.load)
    if other is None:
        raise CheckpointError(
            f"--load {folder.load}: there is no checkpoint in this folder; correct it, or leave --load out to start "
            "fresh"
        )
    return other


def _saver(config: RunConfig, folder: RunFolder, model_source: Path, stack: ExitStack) -> Saver:
    keep = Keep(last=config.run_dir.save_keep_last, best=config.run_dir.save_keep_best)
    background = config.run_dir.async_save
    saver = Saver(folder.save, model_source=model_source, keep=keep, background=background, lora=config.lora)
    stack.callback(saver.close)
    return saver


def _start_folder(config: RunConfig, model_folder: Path, spec: ModelSpec) -> Path:
    """Where the weights of a fresh start are: `--init-from`, whose model must have the shapes of `--hf-checkpoint`."""
    if config.model.init_from is None:
        return model_folder
    folder = weights_folder(resolve_model(config.model.init_from, flag="--init-from"))
    theirs = load_spec(folder)
    if theirs.architecture != spec.architecture or theirs.num_parameters != spec.num_parameters:
        raise CheckpointError(
            f"--init-from {folder} is a {theirs.architecture} of {theirs.num_parameters} parameters and "
            f"--hf-checkpoint {model_folder} a {spec.architecture} of {spec.num_parameters}: the weights of one do not "
            "fit the other"
        )
    return folder


def _start_engine(
    config: RunConfig,
    model: Decoder,
    tokenizer: Tokenizer,
    placement: Placement,
    source: PromptSource | MixedSource | HookedSource,
    stack: ExitStack,
) -> LocalEngine:
    engine = LocalEngine(model, tokenizer, config.engine, device=placement.device)
    stack.callback(engine.close)
    prompt = 1 if isinstance(source, HookedSource) else source.longest_prompt
    answer, held = config.rollout.rollout_max_response_len, engine.num_cache_tokens
    context = model.spec.context_len(config.rollout.rollout_max_context_len)
    if config.algorithm.loss_type != "sft_loss" and held < min(prompt + answer, context):
        raise ConfigError(
            f"the KV cache holds {held} tokens but a prompt of {prompt} with --rollout-max-response-len {answer} can "
            f"need {min(prompt + answer, context)}: raise --engine-max-total-tokens or --engine-mem-fraction-static, "
            "or lower --rollout-max-response-len"
        )
    return engine


def _load_source(
    config: RunConfig, tokenizer: Tokenizer, rewards: RewardRunner | None, *, max_context_len: int
) -> PromptSource | MixedSource:
    is_sft = config.algorithm.loss_type == "sft_loss"
    more = config.data.mix_prompt_data
    assert config.data.prompt_data is not None, "the rules of the config ask for --prompt-data"
    files = [(config.data.prompt_data, 1.0), *zip(more[::2], map(float, more[1::2]), strict=True)]
    sources: list[PromptSource] = []
    for file, _ in files:
        data = dataclasses.replace(config.data, prompt_data=file)
        if is_sft:
            rows = load_sft_rows(data, tokenizer, max_context_len=max_context_len)
        else:
            rows = load_prompts(
                data,
                tokenizer,
                max_context_len=max_context_len,
                max_prompt_len=config.rollout.rollout_max_prompt_len,
                check_label=rewards.check_label if rewards else None,
                hooks=config.hooks,
                flags=PromptFlags() if not sources else PromptFlags(file="--mix-prompt-data"),
            )
        if rewards is not None:
            rewards.probe(rows.prompts[0])
        source = PromptSource(
            rows.prompts,
            n_samples_per_prompt=1 if is_sft else config.rollout.n_samples_per_prompt,
            seed=data.rollout_seed,
            shuffle=data.rollout_shuffle,
            pass_rates=data.curriculum_pass_rates[:2] or None,  # type: ignore[arg-type]
        )
        sources.append(source)
    return sources[0] if len(sources) == 1 else MixedSource(sources, [weight for _, weight in files])


def _load_weights(folder: Path, spec: ModelSpec, placement: Placement) -> Decoder:
    start = time.perf_counter()
    used_before, _ = memory_used_and_free_gb(placement.device)
    model = load_model(folder, dtype=placement.dtype, device=placement.device)
    used, free = memory_used_and_free_gb(placement.device)
    logger.info(
        f"Load weight end. elapsed={time.perf_counter() - start:.2f} s, type={spec.architecture}, "
        f"avail mem={free:.2f} GB, mem usage={used - used_before:.2f} GB."
    )
    return model


def _load_policy(config: RunConfig, start: Path, spec: ModelSpec, placement: Placement) -> Decoder:
    """The trained model; with LoRA with adapters, fresh or from `--lora-adapter-path`."""
    model = _load_weights(start, spec, placement)
    if not config.lora.is_on:
        return model
    add_lora(model, config.lora, seed=config.optim.seed)
    if config.lora.lora_adapter_path is not None:
        path = Path(config.lora.lora_adapter_path).expanduser()
        if not path.is_dir():
            raise CheckpointError(f"--lora-adapter-path {path} is no folder; expected a PEFT adapter or a checkpoint")
        load_adapter(model, weights_folder(path, ADAPTER_FOLDER))
    num, rank = num_adapter_parameters(spec, config.lora), config.lora.lora_rank
    logger.info(f"LoRA of rank {rank}: {num:,} parameters are trained, {num / spec.num_parameters:.2%} of the model's")
    return model


def _load_reference(config: RunConfig, policy: Decoder, start: Path, placement: Placement) -> Decoder | None:
    """The model of the KL term: frozen, the start weights unless `--ref-load` names others. With LoRA the policy itself
    holds its start weights, and no second copy is made of them."""
    if not reads_reference(config.algorithm):
        return None
    named = config.model.ref_load
    is_start = named is None or resolve_model(named, flag="--ref-load").resolve() == start.resolve()
    if config.lora.is_on and is_start:
        return policy
    if named is None:
        return _load_weights(start, policy.spec, placement).requires_grad_(False)
    return _load_scorer(named, policy.spec, placement, flag="--ref-load").requires_grad_(False)


def _load_teacher(config: RunConfig, student: ModelSpec, placement: Placement) -> Decoder | None:
    """The model that is distilled from: frozen, with the student's vocabulary."""
    if not config.algorithm.use_opd:
        return None
    assert config.algorithm.opd_teacher_load is not None, "rules.py demands --opd-teacher-load"
    teacher = config.algorithm.opd_teacher_load
    return _load_scorer(teacher, student, placement, flag="--opd-teacher-load").requires_grad_(False)


def _load_scorer(name: str, policy: ModelSpec, placement: Placement, *, flag: str) -> Decoder:
    """Another model that reads the policy's own tokens."""
    folder = resolve_model(name, flag=flag)
    spec = load_spec(folder)
    if spec.vocab_size != policy.vocab_size:
        raise ConfigError(
            f"{flag} {folder} has {spec.vocab_size} token ids and the trained model {policy.vocab_size}: it scores the "
            "trained model's own tokens and must have its vocabulary"
        )
    return _load_weights(folder, spec, placement)


def _load_critic(config: RunConfig, start: Path, policy: ModelSpec, placement: Placement) -> Decoder | None:
    """The model under the value head of ppo: the start weights unless `--critic-load` names others."""
    if config.algorithm.advantage_estimator != "ppo" or config.algorithm.loss_type == "sft_loss":
        return None
    if config.critic.critic_load is None:
        return _load_weights(start, policy, placement)
    return _load_scorer(config.critic.critic_load, policy, placement, flag="--critic-load")
