"""An answer of several turns with tool calls: `--custom-generate-function-path` of this `generate`.

Tokens in, tokens out: each turn goes on behind the very tokens of the ones before.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import Any

from miles.errors import ConfigError
from miles.plugins import call_apart, describe_error, load_function
from miles.rollout.generate_hub.single_turn import drop_stop_beginning
from miles.rollout.hook_inputs import GenerateFnInput, GenerateFnOutput
from miles.text.tokens import TokenLog, following_ids
from miles.text.tools import ToolCall, tool_calls
from miles.types import NUM_TURNS, TOOL_TIME, TURN_START, FinishReason, Sample, SampleStatus

TOOL_FLAG = "--generate-execute-tool-function-path"
MAX_TOOL_CHARS = 8_000


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Write turns until the model calls no tool, a limit is met, or the request is stopped. An answer that was stopped
    goes on in its turn."""
    sample, state, args = input.sample, input.state, input.args
    if args.generate_execute_tool_function_path is None:
        raise ConfigError(f"multi_turn.generate needs {TOOL_FLAG}, the function that runs a tool")
    log, notes, limit = TokenLog(sample), sample.metadata, input.sampling_params["max_new_tokens"]

    def room() -> int:
        return min(limit - sample.response_length, state.max_context_len - len(log.ids))

    notes.setdefault(NUM_TURNS, 1)
    notes.setdefault(TURN_START, 0)
    if sample.response_length > notes[TURN_START]:
        drop_stop_beginning(sample, input.sampling_params["stop"], first=notes[TURN_START])
    while True:
        sampling = {**input.sampling_params, "max_new_tokens": room()}
        result = await state.generate(log.ids, sampling, noise_key=state.noise_key)
        log.append_written(result)
        if result.finish_reason is not FinishReason.STOP:
            ends = {FinishReason.ABORT: SampleStatus.ABORTED, FinishReason.LENGTH: SampleStatus.TRUNCATED}
            return _end(input, ends.get(result.finish_reason, SampleStatus.FAILED))
        turn = sample.tokens[sample.prompt_length + notes[TURN_START] :]
        calls = tool_calls(state.tokenizer.decode(turn, skip_special_tokens=False))
        if not calls:
            return _end(input, SampleStatus.COMPLETED)
        start = time.perf_counter()
        answers = await asyncio.gather(*(_run(call, args) for call in calls))
        notes[TOOL_TIME] = notes.get(TOOL_TIME, 0.0) + time.perf_counter() - start
        messages = [{"role": "tool", "content": answer} for answer in answers]
        given = following_ids(state.tokenizer, turn[-1], messages)
        if notes[NUM_TURNS] >= args.generate_max_turns or len(given) >= room():
            return _end(input, SampleStatus.TRUNCATED)
        log.append_given(given)
        notes[NUM_TURNS] += 1
        notes[TURN_START] = sample.response_length


def _end(input: GenerateFnInput, status: SampleStatus) -> GenerateFnOutput:
    sample = input.sample
    sample.status = status
    skip = input.sampling_params["skip_special_tokens"]
    response = sample.tokens[sample.prompt_length :]
    sample.response = input.state.tokenizer.decode(response, skip_special_tokens=skip)
    return GenerateFnOutput(sample)


async def _run(call: ToolCall, args: Any) -> str:
    """What the tool says, or a text that says what went wrong: the model sees either."""
    if call.problem is not None:
        return call.problem
    function = load_function(args.generate_execute_tool_function_path, flag=TOOL_FLAG)
    try:
        if inspect.iscoroutinefunction(function):
            running = function(call.name, call.arguments)
        else:
            running = call_apart(function, call.name, call.arguments)
        answer = str(await asyncio.wait_for(running, args.generate_tool_timeout))
    except TimeoutError:
        return f"error: the tool gave no answer within {args.generate_tool_timeout:g} s"
    except Exception as error:  # fault boundary: a tool can raise anything, and the model may try again
        return f"error: {describe_error(error, function=function)}"
    cut = f"\n... ({len(answer) - MAX_TOOL_CHARS} characters left out)" if len(answer) > MAX_TOOL_CHARS else ""
    return answer[:MAX_TOOL_CHARS] + cut


def tool_numbers(samples: list[Sample]) -> dict[str, float]:
    """Turns, who wrote the tokens, and the time of tools, of the samples of a rollout with several turns."""
    noted = [sample for sample in samples if NUM_TURNS in sample.metadata]
    if not noted:
        return {}
    answers = {sample.index for sample in noted}
    rows = [sample for sample in samples if sample.index in answers]  # an agent's answer can have several
    num_tokens = max(1, sum(sample.response_length for sample in rows))
    num_given = sum((sample.loss_mask or []).count(0) for sample in rows)
    return {
        "rollout/num_turns": sum(sample.metadata[NUM_TURNS] for sample in noted) / len(noted),
        "rollout/tool_token_ratio": num_given / num_tokens,
        "rollout/model_token_ratio": 1 - num_given / num_tokens,
        "perf/tool_time": sum(sample.metadata.get(TOOL_TIME, 0.0) for sample in noted) / len(noted),
    }
