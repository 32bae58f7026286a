"""An answer by a program of the user that talks to an address as it would to any OpenAI server:
`--custom-generate-function-path` of this `generate`, with the program as `--custom-agent-function-path`.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import functools
import inspect
import json
import time
from typing import Any

from miles.errors import ConfigError
from miles.plugins import call_apart, describe_error, load_function
from miles.rollout.generate_hub.conversation import Conversations
from miles.rollout.hook_inputs import GenerateFnInput, GenerateFnOutput
from miles.rollout.hooks import FAILURE, Hook, problem_of_sample
from miles.rollout.reward_value import checked_reward
from miles.router.endpoint import Endpoint
from miles.types import NUM_TURNS, TOOL_TIME, Sample, SampleStatus

AGENT_FLAG = "--custom-agent-function-path"


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Run the program `f(base_url=, prompt=, request_kwargs=, metadata=)`, plain or async, to its end.

    Each conversation that it held is a row: one, unless it edited or forked the text before. What it returns is merged
    into the metadata of the rows; `reward` in it is their reward. A program that fails, or does not return, loses its
    sample, unless it failed because a conversation was full: that one is an answer that met its length limit.
    """
    sample, args = input.sample, input.args
    if args.custom_agent_function_path is None:
        raise ConfigError(f"agentic_tool_call.generate needs {AGENT_FLAG}, the program that talks to the model")
    program = load_function(args.custom_agent_function_path, flag=AGENT_FLAG)
    conversations = Conversations(input.state, sample, input.sampling_params, _hook("session_message_matcher", args))
    start, failure, limit = time.perf_counter(), None, asyncio.timeout(args.custom_agent_timeout)
    with _endpoint().session(conversations.answer) as base_url:
        kwargs = {
            "base_url": base_url,
            "prompt": copy.deepcopy(sample.prompt),
            "request_kwargs": conversations.request_kwargs,
            "metadata": copy.deepcopy(sample.metadata),
        }
        try:
            is_async = inspect.iscoroutinefunction(program)
            async with limit:
                returned = await (program(**kwargs) if is_async else call_apart(program, **kwargs))
        except Exception as error:  # fault boundary: a program can raise anything
            late = f"{AGENT_FLAG} did not return within {args.custom_agent_timeout:g} s"
            returned, failure = {}, late if limit.expired() else describe_error(error, function=program)
    rows = conversations.end()  # raises when the engine has failed
    if not rows or (failure is not None and all(row.status is SampleStatus.COMPLETED for row in rows)):
        sample.status = SampleStatus.FAILED
        refusal = f" (a request was refused: {conversations.refusal})" if conversations.refusal else ""
        sample.metadata[FAILURE] = (failure or "the program asked for no answer") + refusal
        return GenerateFnOutput(sample)
    returned = _checked(returned, reward_key=args.reward_key)
    rows = _edited(rows, returned, _hook("session_sample_picker_path", args), chooses=True)
    rows = _edited(rows, returned, _hook("session_sample_postprocessor_path", args))
    for row in rows:
        row.metadata |= returned
        row.reward = returned.get("reward", row.reward)
    away = time.perf_counter() - start - conversations.seconds
    rows[0].metadata |= {TOOL_TIME: max(0.0, away), NUM_TURNS: conversations.num_turns}
    return GenerateFnOutput(rows)


def _hook(name: str, args: Any) -> Hook | None:
    return None if (path := getattr(args, name)) is None else Hook(name, path, None)


def _edited(rows: list[Sample], metadata: dict[str, Any], hook: Hook | None, *, chooses: bool = False) -> list[Sample]:
    """What a hook makes of the conversations; one that `chooses` may only leave some out."""
    if hook is None:
        return rows
    edited = hook.at_once(hook.function, list(rows), metadata)
    if not isinstance(edited, list) or not edited:
        raise hook.wrong("must return a list of samples that is not empty")
    if problem := next(filter(None, map(problem_of_sample, edited)), None):
        raise hook.wrong(problem)
    if chooses and (len({id(row) for row in edited}) != len(edited) or not {*map(id, edited)} <= {*map(id, rows)}):
        raise hook.wrong("must return some of the samples that it was given, each once")
    return edited


def _checked(returned: Any, *, reward_key: str | None) -> dict[str, Any]:
    returned = {} if returned is None else returned
    if not isinstance(returned, dict):
        raise ConfigError(f"{AGENT_FLAG} returned a {type(returned).__name__}; expected a dict or None")
    try:
        json.dumps(returned, default=str)  # it becomes part of the stored samples
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{AGENT_FLAG} returned a dict that cannot be stored as JSON: {error}") from error
    if returned.get("reward") is not None:
        reward = checked_reward(returned["reward"], reward_key=reward_key, source=AGENT_FLAG, who="an answer")
        returned = {**returned, "reward": reward}
    return returned


@functools.cache
def _endpoint() -> Endpoint:
    endpoint = Endpoint()
    atexit.register(endpoint.close)
    return endpoint
