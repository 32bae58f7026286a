"""Functions of the user that take part in a rollout: loaded, checked and called where they cannot block a run."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import math
import sys
from collections.abc import Iterable, Sequence, Sized
from typing import Any

from miles.config.flags import FLAGS, Args
from miles.config.sections import RunConfig
from miles.data.buffer import take_oldest
from miles.data.source import ROW, SET
from miles.errors import MilesError, PluginError
from miles.plugins import HookThread, HookTimeoutError, check_signature, describe_error, load_function
from miles.rollout.client import EngineClient
from miles.rollout.filter_hub.common_filters import FilterOutput
from miles.rollout.generate_hub.single_turn import generate
from miles.rollout.hook_inputs import CheckpointEvalFn, GenerateFnInput, GenerateFnOutput, GenerateState
from miles.rollout.hook_table import ARGUMENTS, HOOKS
from miles.rollout.reward_value import checked_reward, plain
from miles.types import PER_TOKEN, Sample, SampleStatus, SamplingParams, TrainSample

HOOK_TIMEOUT_S = 3600.0
LET_GO_S = 60.0  # that a hook may take to let go of what is not needed any more
FAILURE = "failure"  # where the metadata of a failed sample may say why
# Columns as public Miles names them: three have other names in a `TrainSample`.
_TRAIN_COLUMNS = {
    **{name: name for name in ("tokens", "raw_reward", "rollout_log_probs", "weight_versions", "truncated")},
    **{"response_lengths": "response_length", "rewards": "reward", "loss_masks": "loss_mask"},
}
_LISTS = {"tokens": int, "loss_mask": int, "rollout_log_probs": float, "weight_versions": int}
_NUMBERS = {int, float, bool}
_KINDS = {"status": SampleStatus, "metadata": dict, "response": str, "group_index": int, "index": int}


class Hook:
    """One function of the user, plain or async. Whatever it does wrong becomes a `PluginError` with its line."""

    def __init__(self, name: str, path: str, thread: HookThread | None, arguments: tuple[str, ...] = ()) -> None:
        """Without a `thread` it can be called `at_once` only."""
        self.flag, self.path, self._thread = FLAGS[name].spelling, path, thread
        self.function = load_function(path, flag=self.flag)
        self.reads_folder = inspect.isclass(self.function) and issubclass(self.function, CheckpointEvalFn)
        if ARGUMENTS[name] != ("input",):  # these can have other signatures too
            check_signature(self.function, *(arguments or ARGUMENTS[name]), path=path, flag=self.flag)

    def check_replacement(self) -> None:
        """Raise `PluginError` unless this function or class can be called as `replace.py` will."""
        legacy = ("args", "rollout_id", "data_source", "evaluation")
        arguments = ("input",) if inspect.isclass(self.function) else legacy
        check_signature(self.function, *arguments, path=self.path, flag=self.flag)
        method = "evaluate_checkpoint" if self.reads_folder else "__call__"
        if method not in dir(self.function):
            raise self.wrong(f"is a class without the method {method}")

    async def __call__(self, *arguments: Any) -> Any:
        return await self.run(self.function, *arguments)

    async def run(self, function: Any, *arguments: Any) -> Any:
        """Call a function or method of the user in the thread of the hooks."""
        assert self._thread is not None, "a hook without a thread is called at once"
        try:
            return await self._thread.call(function, *arguments, timeout_s=HOOK_TIMEOUT_S)
        except HookTimeoutError:
            raise self.wrong(f"did not return within {HOOK_TIMEOUT_S:g} s") from None
        except MilesError:  # of the engine, or a sentence already
            raise
        except Exception as error:  # fault boundary: the user's code can raise anything
            raise self.wrong(f"failed: {describe_error(error, function=function)}") from error

    async def let_go(self, function: Any, *arguments: Any) -> None:
        """`run` for a function that only ends what is not needed any more. The wait for a hook before it counts too."""
        try:
            await asyncio.wait_for(self.run(function, *arguments), LET_GO_S)
        except TimeoutError:
            raise self.wrong(f"was told that nothing more is needed and did not return within {LET_GO_S:g} s") from None

    def at_once(self, function: Any, *arguments: Any) -> Any:
        """`run` where nothing can be awaited: for plain functions."""
        try:
            returned = function(*arguments)
        except Exception as error:  # fault boundary: the user's code can raise anything
            text = error if isinstance(error, MilesError) else describe_error(error, function=function)
            raise self.wrong(f"failed: {text}") from error
        if inspect.iscoroutine(returned):
            returned.close()
            raise self.wrong(f"has the async {getattr(function, '__name__', function)}; it must be a plain function")
        return returned

    def check(self, sample: Any, *, who: str, key: str | None, ended: bool = True, scored: bool = False) -> None:
        """Raise a typed error where something is wrong with a sample that this has returned; arrays in it become lists,
        and its reward, which only one that is `scored` must have, a plain number or a dict with one as `key`. A float
        that is not finite says that the sample could not be scored."""
        self.check_values(sample, who=who, ended=ended)
        reward, source = sample.reward, f"{self.flag} {self.path}"
        number, key = (reward.get(key), key) if isinstance(reward, dict) else (reward, None)
        if (scored or reward is not None) and (not isinstance(number, float) or math.isfinite(number)):
            sample.reward = checked_reward(reward, reward_key=key, source=source, who=f"the reward of {who}")

    def check_values(self, sample: Any, *, who: str, ended: bool) -> None:
        """`check` of everything but the reward."""
        if problem := problem_of_sample(sample, must_have_ended=ended):
            raise self.wrong(f"{problem} for {who}")

    def check_groups(self, groups: Any, *, key: str | None) -> None:
        """Raise a typed error unless these are the scored groups of a rollout, as this has returned or left them."""
        if not isinstance(groups, list) or not groups or not all(group and isinstance(group, list) for group in groups):
            raise self.wrong("must return a list of groups of samples, or leave one, and no group may be empty")
        for place, group in enumerate(groups):
            for number, sample in enumerate(group):
                self.check(sample, who=f"samples[{place}][{number}]", key=key, ended=False, scored=True)
        self.check_group_indices(groups)

    def check_group_indices(self, groups: list[list[Sample]]) -> None:
        """Raise `PluginError` where a `group_index` is not that of one group: advantages go by it."""
        indices = [index for group in groups for index in {sample.group_index for sample in group}]
        if not len(groups) == len(indices) == len(set(indices)):
            raise self.wrong(f"gave {len(groups)} groups with group_index {indices}: each must have one of its own")

    def wrong(self, problem: str) -> PluginError:
        return PluginError(f"{self.flag} {self.path} {problem}")


class RolloutHooks:
    """The hooks of a rollout that the settings name; `probe` calls them on small samples before a model is loaded."""

    def __init__(self, config: RunConfig) -> None:
        self.args = Args(config)
        self._thread = HookThread("rollout-hooks")
        names = [kind.name for kind in HOOKS if kind.name in vars(config.hooks)] + ["dynamic_sampling_filter_path"]
        self._named = {name: self._load(name, getattr(self.args, name)) for name in names}
        self.filters = self._named["dynamic_sampling_filter_path"] is not None
        # by `generate_function_path` of a sample
        self._writers: dict[str | None, Hook | None] = {None: self._named["custom_generate_function_path"]}
        agent, self._abort = self._named["custom_agent_function_path"], None
        if agent is not None and hasattr(sys.modules[module := agent.path.rpartition(".")[0]], "abort"):
            self._abort = Hook("custom_agent_function_path", f"{module}.abort", self._thread, ("args",))
        replacements = ("data_source_path", "rollout_function_path", "eval_function_path")
        self.source, self.rollout, self.evaluation = (self._named[name] for name in replacements)
        for replacement in filter(None, (self.rollout, self.evaluation)):
            replacement.check_replacement()

    def _load(self, name: str, path: str | None) -> Hook | None:
        return None if path is None else Hook(name, path, self._thread)

    def take_parked(self, parked: list[list[Sample]], count: int) -> list[list[Sample]]:
        """Up to `count` groups, taken out of `parked`."""
        hook = self._named["buffer_filter_path"]
        if hook is None or not parked:
            return take_oldest(parked, count)
        before = {id(group) for group in parked}
        taken: list[list[Sample]] = hook.at_once(hook.function, self.args, None, parked, count)
        if not isinstance(taken, list):
            raise hook.wrong(f"returned a {type(taken).__name__}; expected a list of groups")
        after = [id(group) for group in (*taken, *parked)]
        if len(taken) > count or len(after) != len(before) or set(after) != before:
            raise hook.wrong(
                f"was asked for up to {count} of {len(before)} groups, returned {len(taken)} and left {len(parked)} in "
                "the buffer: it must delete from the buffer what it returns, and nothing else"
            )
        return taken

    async def drop_reason(self, group: list[Sample]) -> str | None:
        """Why the dynamic filter drops a scored group; None when it is kept."""
        if (hook := self._named["dynamic_sampling_filter_path"]) is None:
            return None
        verdict = await hook(self.args, group)
        output = verdict if isinstance(verdict, FilterOutput) else FilterOutput(verdict)
        if type(keep := plain(output.keep)) not in _NUMBERS:
            raise hook.wrong(f"returned {verdict!r:.80}; expected True, False or a FilterOutput")
        hook.check_groups([group], key=self.args.reward_key)
        return None if keep else str(output.reason or "unnamed").replace("/", "_")

    async def write(
        self,
        client: EngineClient,
        group: list[Sample],
        sample: Sample,
        sampling: SamplingParams,
        *,
        noise_key: int,
        max_context_len: int,
        evaluation: bool = False,
    ) -> str | None:
        """Write one answer of a group, by the hook when there is one, which may put several rows in its place.
        Returns why that failed, or None."""
        path = sample.generate_function_path and str(sample.generate_function_path)
        if path not in self._writers:
            self._writers[path] = self._load("custom_generate_function_path", path)
        hook = self._writers[path]
        if hook is None:
            return await generate(client, sample, sampling, noise_key=noise_key, max_context_len=max_context_len)
        if sample.status not in (SampleStatus.PENDING, SampleStatus.ABORTED):
            return None
        state = GenerateState(self.args, client, noise_key=noise_key, max_context_len=max_context_len)
        origin = {name: sample.metadata[name] for name in (ROW, SET) if name in sample.metadata}
        parameters = list(inspect.signature(hook.function).parameters)
        try:
            if len(parameters) >= 3 and parameters[0] != "input":
                given: list[Any] = [self.args, sample, dataclasses.asdict(sampling)]
                output = await hook(*given, *([evaluation] if "evaluation" in parameters else []))
            else:
                output = await hook(GenerateFnInput(state, sample, dataclasses.asdict(sampling), evaluation))
        finally:
            state.close()
        output = output.samples if isinstance(output, GenerateFnOutput) else output
        rows = output if isinstance(output, list) else [output]
        if not rows:
            raise hook.wrong(f"returned nothing for sample {sample.index}")
        for row in rows:
            hook.check(row, who=f"sample {sample.index}", key=self.args.reward_key)
            row.group_index, row.index = sample.group_index, sample.index
            row.metadata |= origin
        place = next(n for n, member in enumerate(group) if member is sample)
        group[place] = rows[0]
        group.extend(rows[1:])
        failed = next((row for row in rows if row.status is SampleStatus.FAILED), None)
        return None if failed is None else str(failed.metadata.get(FAILURE, "the hook gave up"))

    async def stop_agents(self) -> None:
        """Tell the module of the agent that the rollout has enough: what its programs still do is not needed."""
        if self._abort is not None:
            await self._abort.let_go(self._abort.function, self.args)

    async def finish(self, kept: list[list[Sample]], everything: list[list[Sample]], source: Any) -> None:
        """The hooks that see a full rollout; they may edit samples in place."""
        if (hook := self._named["rollout_sample_filter_path"]) is not None:
            await self._edit(hook, kept)
            hook.check_groups(kept, key=self.args.reward_key)
        if (hook := self._named["rollout_all_samples_process_path"]) is not None:
            await hook(self.args, everything, source)
            hook.check_groups(kept, key=self.args.reward_key)

    async def _edit(self, hook: Hook, groups: list[list[Sample]]) -> None:
        if isinstance(await hook(self.args, groups), list):
            raise hook.wrong("returned a list, which nothing reads: it must edit the one that it is given")

    async def to_train(self, samples: list[Sample], converted: list[TrainSample]) -> list[TrainSample]:
        """What the trainer gets: `converted`, unless a hook changes rewards or makes all of it."""
        if (hook := self._named["custom_convert_samples_to_train_data_path"]) is not None:
            return _with_columns(hook, await hook(self.args, samples), converted)
        if (hook := self._named["custom_reward_post_process_path"]) is not None:
            answer = await hook(self.args, samples)
            if not isinstance(answer, (tuple, list)) or len(answer) != 2:
                raise hook.wrong("must return two lists: raw rewards and rewards")
            return _with_columns(hook, {"raw_reward": answer[0], "rewards": answer[1]}, converted)
        return converted

    async def logged(self, rollout_id: int, samples: list[Sample], metrics: dict[str, float], seconds: float) -> bool:
        """Whether a hook has logged the rollout in place of us."""
        hook = self._named["custom_rollout_log_function_path"]
        return hook is not None and bool(await hook(rollout_id, self.args, samples, metrics, seconds))

    async def eval_logged(self, rollout_id: int, data: dict[str, Any], metrics: dict[str, float]) -> bool:
        hook = self._named["custom_eval_rollout_log_function_path"]
        return hook is not None and bool(await hook(rollout_id, self.args, data, metrics))

    def probe(self) -> None:
        """Call each hook that needs no engine once. Raises `PluginError`."""
        asyncio.run(self._probe())

    async def _probe(self) -> None:
        def group() -> list[Sample]:
            return example_group((0.0, 1.0), reward_key=self.args.reward_key)

        await self.drop_reason(group())
        if (hook := self._named["rollout_sample_filter_path"]) is not None:
            await self._edit(hook, [group()])
        rows = [TrainSample([1, 2, 3], 1, [1], reward, reward, 0, i) for i, reward in enumerate((0.0, 1.0))]
        await self.to_train(group(), rows)

    def close(self) -> None:
        self._thread.close()


def problem_of_sample(sample: Any, *, must_have_ended: bool = True) -> str | None:
    """What is wrong with a sample that a hook has returned, or None; arrays in it become lists."""
    if not isinstance(sample, Sample):
        return f"returned a {type(sample).__name__}, not a Sample"
    if must_have_ended and sample.status is SampleStatus.PENDING:
        return "returned a sample whose status is still pending"
    for name, kind in _KINDS.items():
        if not isinstance(given := plain(getattr(sample, name)), kind):
            return f"returned a {type(given).__name__} as {name}, which must be a {kind.__name__}"
        setattr(sample, name, given)
    try:
        json.dumps([sample.metadata, sample.label, sample.reward], default=str)
        sample.response.encode()
    except (TypeError, ValueError, RecursionError) as error:
        return f"returned metadata, a label, a reward or a response that cannot be stored ({error})"
    return _problem_of_lists(sample)


def _problem_of_lists(sample: Sample | TrainSample, given_names: Iterable[str] = _LISTS) -> str | None:
    """What is wrong with the lists of a sample, or None. Those that a hook has given become lists of the sample's own,
    also when they are arrays of some library."""
    for name in given_names:
        given = plain(getattr(sample, name))
        if given is None and name != "tokens" and (name != "loss_mask" or isinstance(sample, Sample)):
            continue
        if not isinstance(given, Iterable):
            return f"returned a {type(given).__name__} as {name}, which must be a list of numbers"
        values, kind = [*given], _LISTS[name]
        if not {*map(type, values)} <= {kind}:
            values = [plain(value) for value in values]
            if odd := [x for x in values if type(x) not in _NUMBERS or (kind is int and x % 1 != 0)]:
                return f"returned {odd[0]!r:.60} in {name}, which must be a list of {'whole ' * (kind is int)}numbers"
            values = [*map(kind, values)]
        low, bound = (0, 2) if name == "loss_mask" else (-(2**31), 2**31)  # of what is stored
        if kind is int and values and not low <= min(values) <= max(values) < bound:
            return f"returned {min(values)} to {max(values)} in {name}, whose numbers must be from {low} to {bound - 1}"
        setattr(sample, name, values)
    length = sample.response_length = plain(sample.response_length)
    if not isinstance(length, int) or not 0 <= length < max(1, len(sample.tokens)):
        return f"returned {len(sample.tokens)} tokens with a response_length of {length}"
    for name in PER_TOKEN:
        values = getattr(sample, name)
        if values is not None and _count(values) != length:
            return f"returned {_count(values)} {name} for {length} tokens"
    return None


def _count(values: Any) -> int | str:
    """How many there are, or the words for it where there is no list of them."""
    return len(listed) if isinstance(listed := plain(values), Sized) else "no list of"


def _with_columns(hook: Hook, columns: Any, rows: list[TrainSample]) -> list[TrainSample]:
    """The rows with these columns, checked."""
    if unknown := set(columns).difference(_TRAIN_COLUMNS) if isinstance(columns, dict) else {"no dict"}:
        raise hook.wrong(f"returned {', '.join(sorted(map(str, unknown)))}; known columns: {', '.join(_TRAIN_COLUMNS)}")
    for name, values in columns.items():
        if _count(values) != len(rows):
            raise hook.wrong(f"returned {_count(values)} {name} for {len(rows)} samples")
        for row, value in zip(rows, values, strict=True):
            setattr(row, _TRAIN_COLUMNS[name], plain(value))
    lists = {_TRAIN_COLUMNS[name] for name in columns}.intersection(_LISTS)
    for row in rows:
        numbers = {name: getattr(row, name) for name in ("reward", "raw_reward", "truncated")}
        if not {*map(type, numbers.values())} <= _NUMBERS or not math.isfinite(row.reward):
            raise hook.wrong(f"gave sample {row.index} {numbers}; expected finite numbers")
        if problem := _problem_of_lists(row, lists):
            raise hook.wrong(f"{problem} for sample {row.index}")
    return rows


def example_group(rewards: Sequence[float | None], *, reward_key: str | None) -> list[Sample]:
    """A small scored group as hooks will see them."""
    return [
        Sample(
            group_index=0,
            index=index,
            prompt="What is 1 + 1?",
            tokens=[1, 2, 3],
            response="2",
            response_length=1,
            label="2",
            reward=reward if reward_key is None else {reward_key: reward},
            loss_mask=[1],
            rollout_log_probs=[-1.0],
            weight_versions=[0],
            status=SampleStatus.COMPLETED,
        )
        for index, reward in enumerate(rewards)
    ]
