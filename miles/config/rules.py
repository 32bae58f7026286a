"""Rules about values and about flags that do not go together. All violations are found before any is reported."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from miles.config.fields import SATISFIED
from miles.config.flags import FLAGS, closest, flatten, spelling
from miles.config.lora_section import MODULES, module_names
from miles.config.loss_rules import loss_violations, unread
from miles.config.memory_section import memory_violations
from miles.config.numerics_rules import numerics_violations
from miles.config.resolve import samples_per_rollout
from miles.config.secrets import Secrets
from miles.config.sections import RunConfig
from miles.errors import ConfigError

# What a worker says it is doing (`loop/stages.py`, `loop/build.py`).
PHASES = (
    *("start", "load", "eval", "rollout", "wake_up", "train", "sleep", "update_weights"),
    *("finalize_and_resume_engines", "save_model", "export_hf"),
)

_FOLDER_NAME = re.compile(r"[^/\\\x00-\x1f]+")
TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "conversation", "tools", "add_generation_prompt", "tokenize", "chat_template"}
)

_REWARD_NAME = re.compile(r"[a-z]\w*")
_COMPARED_WITH_LABEL = ("math", "gsm8k", "deepscaler", "gemma_math", "dapo", "f1", "exact")


def check(config: RunConfig) -> None:
    """Raise a `ConfigError` with every rule that `config` violates."""
    violations = rule_violations(config)
    if violations:
        raise ConfigError(*violations)


def rule_violations(config: RunConfig) -> list[str]:
    return [violation for rule in _RULES for violation in rule(config)]


def _bounds(config: RunConfig) -> Iterator[str]:
    """Types are parse.py's business; values also come from code, so ranges and choices are checked here."""
    for name, value in flatten(config).items():
        flag = FLAGS[name]
        entries = value if isinstance(value, tuple) else (value,)
        wrong = [entry for entry in entries if flag.choices and value != flag.default and entry not in flag.choices]
        if wrong:
            allowed = ", ".join(str(choice) for choice in flag.choices)
            yield f"{flag.spelling} must be one of {allowed}, not {wrong[0]!r}"
        for number in _numbers(value):
            if problem := flag.problem_of(number):
                yield f"{flag.spelling} must be {problem}, not {number}"


def _numbers(value: Any) -> list[float]:
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
    return [entry for entry in entries if isinstance(entry, (int, float)) and not isinstance(entry, bool)]


def _required(config: RunConfig) -> Iterator[str]:
    if not config.model.hf_checkpoint:
        yield "--hf-checkpoint is missing: give a Hugging Face model folder, or a hub name when online"
    has_source = config.hooks.data_source_path is not None
    if has_source and config.data.num_rollout is None:
        yield "--data-source-path needs --num-rollout: nobody knows how many prompts an epoch has"
    if not config.data.prompt_data and not has_source:
        yield "--prompt-data is missing: give a JSONL or parquet file of prompts"
    if config.data.num_rollout is None and config.data.num_epoch is None:
        yield "--num-rollout or --num-epoch is missing: say how long to train"


def _prompt_files(config: RunConfig) -> Iterator[str]:
    data, has_source = config.data, config.hooks.data_source_path is not None
    if len(data.mix_prompt_data) % 2 or any(_is_no_weight(weight) for weight in data.mix_prompt_data[1::2]):
        yield f"--mix-prompt-data {' '.join(data.mix_prompt_data)}: expected pairs FILE WEIGHT, with weights above 0"
    low_high = data.curriculum_pass_rates
    if low_high and (len(low_high) != 2 or low_high[0] > low_high[1]):
        yield f"--curriculum-pass-rates {' '.join(map(str, low_high))}: expected LOW HIGH, two shares of right answers"
    if low_high and data.num_rollout is None:
        yield "--curriculum-pass-rates needs --num-rollout: nobody knows how many prompts will sit out"
    if low_high and config.algorithm.loss_type == "sft_loss":
        yield "--curriculum-pass-rates needs answers that are scored: sft_loss has none"
    if has_source and (low_high or data.mix_prompt_data):
        yield "--mix-prompt-data and --curriculum-pass-rates are for prompt files: --data-source-path replaces them"


def _is_no_weight(text: str) -> bool:
    try:
        return not 0 < float(text) < math.inf
    except ValueError:
        return True


def _reward(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    if reward.rm_type is None and reward.custom_rm_path is None:
        if config.algorithm.loss_type != "sft_loss":
            yield "--rm-type or --custom-rm-path is missing: policy_loss learns from a reward"
        elif config.eval.eval_interval is not None:
            yield "--rm-type or --custom-rm-path is missing: evaluation scores answers with a reward"
    if reward.group_rm and reward.custom_rm_path is None:
        yield "--group-rm needs --custom-rm-path: built-in rewards score one answer at a time"
    graded = "" if reward.custom_rm_path is not None else reward.rm_type or ""
    for name in sorted(set(_REWARD_NAME.findall(graded))):
        if name.removeprefix("boxed_") in _COMPARED_WITH_LABEL and config.data.label_key is None:
            yield f"--rm-type {name} needs --label-key, the column of the right answer"
    if "remote_rm" in _REWARD_NAME.findall(f"{graded} {reward.rm_watch_type}") and reward.rm_url is None:
        yield "--rm-type remote_rm needs --rm-url, the address of the service"


def _sampling(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if "" in rollout.rollout_stop:
        yield "--rollout-stop has an empty string, which would end every answer at once"
    context, prompt = rollout.rollout_max_context_len, rollout.rollout_max_prompt_len
    answer = rollout.rollout_max_response_len
    if context is not None and answer >= context:
        yield f"--rollout-max-response-len {answer} leaves no room for a prompt in --rollout-max-context-len {context}"
    if context is not None and prompt is not None and prompt >= context:
        yield f"--rollout-max-prompt-len {prompt} leaves no room for an answer in --rollout-max-context-len {context}"
    if rollout.rollout_temperature == 0 and config.algorithm.loss_type != "sft_loss":
        yield (
            "--rollout-temperature 0 is greedy: all answers of a group would be equal and nothing could be learned; "
            "use a value above 0 (--eval-temperature 0 evaluates greedily)"
        )


def _over_sampling(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    size, wanted = rollout.over_sampling_batch_size, rollout.rollout_batch_size
    has_spare = rollout.dynamic_sampling_filter_path is not None or rollout.partial_rollout
    if size is not None and size < wanted:
        yield f"--over-sampling-batch-size {size} must be at least --rollout-batch-size {wanted}"
    elif size is not None and size > wanted and not has_spare:
        yield (
            "--over-sampling-batch-size needs --dynamic-sampling-filter-path or --partial-rollout: without them every "
            "further answer is thrown away"
        )
    if rollout.mask_offpolicy_in_partial_rollout and not rollout.partial_rollout:
        yield "--mask-offpolicy-in-partial-rollout needs --partial-rollout"
    if has_spare and config.algorithm.loss_type == "sft_loss":
        yield "--dynamic-sampling-filter-path and --partial-rollout need written answers: sft_loss has none"


def _agents(config: RunConfig) -> Iterator[str]:
    hooks = config.hooks
    session = (hooks.session_message_matcher, hooks.session_sample_picker_path, hooks.session_sample_postprocessor_path)
    has_agent = hooks.custom_agent_function_path is not None
    if any(session) and not has_agent:
        yield (
            "--session-message-matcher, --session-sample-picker-path and --session-sample-postprocessor-path are for "
            "conversations of a program: give --custom-agent-function-path"
        )
    if has_agent and hooks.custom_generate_function_path is None:
        yield (
            "--custom-agent-function-path needs --custom-generate-function-path "
            "miles.rollout.generate_hub.agentic_tool_call.generate"
        )
    if has_agent and config.rollout.partial_rollout:
        yield "--partial-rollout cannot go on with a --custom-agent-function-path that was stopped: leave one out"


def _batches(config: RunConfig) -> Iterator[str]:
    batch, total = config.batch, samples_per_rollout(config)
    if total < 1:
        return
    shown = f"--rollout-batch-size {config.rollout.rollout_batch_size}"
    if config.algorithm.loss_type != "sft_loss":
        shown += f" x --n-samples-per-prompt {config.rollout.n_samples_per_prompt} = {total} samples"
    size, steps = batch.global_batch_size, batch.num_steps_per_rollout
    if size is not None and size >= 1 and total % size:
        yield f"{shown} do not divide into optimizer steps of --global-batch-size {size}; {_divisors(total, size)}"
    if steps is not None and steps >= 1 and total % steps:
        yield f"{shown} do not divide into --num-steps-per-rollout {steps}; {_divisors(total, steps)}"
    elif size is not None and steps is not None and size * steps != total:
        yield (
            f"--global-batch-size {size} x --num-steps-per-rollout {steps} = {size * steps} samples, but {shown}; "
            "give only one of the two"
        )


def _divisors(total: int, wanted: int) -> str:
    """ "96 or 128 would": the nearest divisors of `total` on both sides."""
    small = [number for number in range(1, math.isqrt(total) + 1) if total % number == 0]
    divisors = sorted({*small, *(total // number for number in small)})
    below, above = ([n for n in divisors if n < wanted], [n for n in divisors if n > wanted])
    return " or ".join(map(str, below[-1:] + above[:1])) + " would"


def _optimizer(config: RunConfig) -> Iterator[str]:
    optim = config.optim
    decays, fraction = optim.lr_decay_style != "constant", optim.lr_warmup_fraction
    advice = "--lr-decay-style constant does not decay; give linear or cosine"
    warms_up = (optim.lr_warmup_iters or fraction, "add --lr-warmup-iters or --lr-warmup-fraction")
    readers = {"min_lr": (decays, advice), "lr_decay_iters": (decays or fraction, advice), "lr_warmup_init": warms_up}
    yield from unread(config, readers)
    if optim.lr_warmup_iters and fraction is not None:
        yield "--lr-warmup-iters and --lr-warmup-fraction both set the warm-up: give one of them"
    if decays and optim.min_lr > optim.lr > 0:
        yield f"--min-lr {optim.min_lr} is above --lr {optim.lr}: a decay ends at --min-lr"
    if optim.lr_decay_iters is not None and optim.lr_decay_iters < optim.lr_warmup_iters:
        yield (
            f"--lr-decay-iters {optim.lr_decay_iters} is less than --lr-warmup-iters {optim.lr_warmup_iters}: "
            "the decay counts from the first step and ends after the warm-up"
        )
    if config.model.device == "cpu" and config.model.dtype == "bfloat16":
        yield "--dtype bfloat16 needs a GPU: on a CPU everything is float32"


def _lora(config: RunConfig) -> Iterator[str]:
    lora = config.lora
    if not lora.is_on:
        names = [name for name, flag in FLAGS.items() if flag.section == "lora" and flag.effect != SATISFIED]
        yield from unread(
            config, {name: (name == "lora_rank", "add --lora-rank, such as --lora-rank 16") for name in names}
        )
        return
    for name in ("target_modules", "exclude_modules"):
        for module in module_names(flatten(config)[name]):
            if module.isidentifier() and module not in MODULES:
                known = (*MODULES, "all-linear")
                yield f"{spelling(name)}: {module!r} gets no adapter{closest(module, known)}; known: {', '.join(known)}"
    if not module_names(lora.target_modules):
        yield "--target-modules is empty: LoRA would train nothing"
    if lora.lora_dropout > 0 and config.checks.ci_test:
        yield "--ci-test compares training passes with the engine, which drops nothing: leave out --lora-dropout"


def _evaluation(config: RunConfig) -> Iterator[str]:
    sets = config.eval.eval_prompt_data
    names = sets[::2]
    if len(sets) % 2:
        yield f"--eval-prompt-data needs pairs NAME FILE, got {len(sets)} values: {' '.join(sets)}"
    elif len(set(names)) != len(names):
        yield f"--eval-prompt-data gives two sets the same name: {' '.join(names)}"
    if config.eval.eval_reward_key is not None and config.reward.reward_key is None:
        yield "--eval-reward-key needs --reward-key: only a dict reward has fields"
    others = config.eval.eval_config or config.hooks.eval_function_path
    if config.eval.eval_interval is not None and not sets and not others:
        yield "--eval-interval needs --eval-prompt-data: there is nothing to evaluate on"
    for name in ("eval_config", "eval_prompt_data"):
        if getattr(config.eval, name) and config.eval.eval_interval is None:
            yield f"{spelling(name)} needs --eval-interval: say how often to evaluate"


def _checkpoints(config: RunConfig) -> Iterator[str]:
    if config.run_dir.save_keep_best is not None and config.eval.eval_interval is None:
        yield "--save-keep-best needs --eval-interval: without evaluations no checkpoint is better than another"


def _layout(config: RunConfig) -> Iterator[str]:
    for name, value in flatten(config).items():
        flag = FLAGS[name]
        if flag.effect == SATISFIED and flag.default is True and not value:
            wish = f"--no-{flag.spelling.removeprefix('--')}"
            yield f"{wish} cannot be obeyed here: {flag.help}, always"


def _offload(config: RunConfig) -> Iterator[str]:
    if config.engine.offload_rollout is False and config.engine.offload_rollout_level:
        yield "--no-offload-rollout and --offload-rollout-level contradict each other: give one of them"
    level = config.engine.offload_rollout_level or ("kv_cache" if config.engine.offload_rollout else "")
    if config.memory.offload_train and "kv_cache" not in level:
        yield (
            "--offload-train needs --offload-rollout, with kv_cache among its levels: the KV cache grows into the "
            "memory that the trainer leaves, and has to give it back for training"
        )


def _repair(config: RunConfig) -> Iterator[str]:
    if config.process.in_process and config.process.use_fault_tolerance:
        yield "--use-fault-tolerance cannot start a worker again with --in-process: leave one of them out"


def _heat(config: RunConfig) -> Iterator[str]:
    process = config.process
    if process.heat_resume >= process.heat_pause:
        yield f"--heat-resume {process.heat_resume:g} must be below --heat-pause {process.heat_pause:g}"


def _profile(config: RunConfig) -> Iterator[str]:
    steps = config.process.profile_steps
    if steps is None:
        return
    first, colon, last = steps.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and int(first) < int(last)):
        yield f"--profile-steps must be A:B with whole numbers A < B, such as 2:4 for steps 2 and 3, not {steps!r}"


def _names_in_mappings(config: RunConfig) -> Iterator[str]:
    """Keys of a JSON flag that nobody would read, or that the prompts themselves fill in."""
    for phase in config.process.phase_deadlines:
        if phase not in PHASES:
            known = ", ".join(PHASES)
            yield f"--phase-deadlines: there is no phase {phase!r}{closest(phase, PHASES)}; there are {known}"
    for name in sorted(TEMPLATE_ARGUMENTS.intersection(config.data.apply_chat_template_kwargs)):
        yield f"--apply-chat-template-kwargs cannot set {name!r}: it is given to the chat template for each prompt"


def _debug(config: RunConfig) -> Iterator[str]:
    debug = config.debug
    if debug.debug_train_only and debug.load_debug_rollout_data is None:
        yield "--debug-train-only needs --load-debug-rollout-data, the samples to train on"
    if debug.debug_rollout_only and debug.load_debug_rollout_data is not None:
        yield "--debug-rollout-only and --load-debug-rollout-data leave nothing to do: give one of them"
    if debug.debug_rollout_only and config.algorithm.loss_type == "sft_loss":
        yield "--debug-rollout-only needs written answers: sft_loss has none"
    if debug.save_debug_rollout_data is not None and "{rollout_id}" not in debug.save_debug_rollout_data:
        yield "--save-debug-rollout-data needs {rollout_id} in its name: each rollout gets a file of its own"


def _run_folder(config: RunConfig) -> Iterator[str]:
    name = config.run_dir.run_name
    if name is not None and (name in (".", "..") or not _FOLDER_NAME.fullmatch(name)):
        yield f"--run-name {name!r} must be the name of one folder; --runs-dir says where it is"


def _secrets(config: RunConfig) -> Iterator[str]:
    secrets = Secrets()
    for name, value in flatten(config).items():
        if isinstance(value, (str, tuple, dict)) and secrets.are_in(str(value)):
            yield (
                f"{FLAGS[name].spelling} carries a password or a key, and config.yaml keeps every setting: put it into "
                "an environment variable (a URL may name it: https://user:$NAME@host)"
            )


_RULES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _required,
    _bounds,
    _sampling,
    _prompt_files,
    _over_sampling,
    _agents,
    _batches,
    _reward,
    loss_violations,
    numerics_violations,
    _optimizer,
    lambda config: memory_violations(config.memory, adam_state=config.optim.adam_state),
    _lora,
    _evaluation,
    _checkpoints,
    _layout,
    _offload,
    _repair,
    _heat,
    _profile,
    _names_in_mappings,
    _debug,
    _run_folder,
    _secrets,
)
