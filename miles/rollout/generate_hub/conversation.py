"""Conversations of a program with the model, tokens in and tokens out: each is a row to train on.

A request goes on behind the very tokens of the conversation whose messages it begins with. When there is none, because
the program edited a message, or when the chat template would drop old thinking, the request begins a new row: the
first one stays what it was.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from miles.errors import DataError, RequestError
from miles.rollout.hook_inputs import GenerateState
from miles.text.tokens import TokenLog, following_ids, keeps_thinking
from miles.text.tools import END_OF_THINKING, tool_calls, without_calls
from miles.types import FinishReason, GenerationResult, Sample, SampleStatus, SamplingParams

Message = dict[str, Any]

_OPEN = (
    *("messages", "prompt", "input_ids", "model", "tools", "max_tokens", "max_completion_tokens", "max_new_tokens"),
    *("stream", "stream_options", "stop", "logprobs", "return_logprob", "user", "parallel_tool_calls", "metadata"),
)
_FIXED = {"n": 1, "tool_choice": "auto", "ignore_eos": False, "skip_special_tokens": True}  # taken at this value only
_STATUS = {
    FinishReason.STOP: SampleStatus.COMPLETED,
    FinishReason.LENGTH: SampleStatus.TRUNCATED,
    FinishReason.ABORT: SampleStatus.ABORTED,
    FinishReason.ERROR: SampleStatus.FAILED,
}


@dataclass
class Row:
    """`messages` lead to `sample`'s tokens. `busy` while a turn is being written."""

    sample: Sample
    noise_key: int
    messages: list[Message] = field(default_factory=list)
    busy: bool = False


class Conversations:
    """What stands behind the address of a sample. `num_turns` and `seconds` count what the model wrote."""

    def __init__(self, state: GenerateState, sample: Sample, sampling_params: dict[str, Any]) -> None:
        self._state, self._sample = state, sample
        self._sampling = SamplingParams(**sampling_params)
        self._rows: list[Row] = []
        self.num_turns, self.seconds, self._writing = 0, 0.0, 0

    @property
    def request_kwargs(self) -> dict[str, Any]:
        """What a request may say of the sampling: it is that of the run, which the trainer knows."""
        sampling = self._sampling
        return {"model": "miles", "temperature": sampling.temperature, "top_p": sampling.top_p,
                "max_tokens": sampling.max_new_tokens}  # fmt: skip

    async def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Serve `v1/chat/completions`, `v1/completions` and SGLang's `generate`. Raises `RequestError`."""
        nested = body.pop("sampling_params", {})  # where SGLang's own route has them
        settings = {**body, **nested}
        sampling = self._read_sampling(settings)
        if path == "v1/chat/completions":
            return await self._chat(body, sampling)
        if path in ("v1/completions", "generate", "v1/generate"):
            return await self._continue(path, settings, sampling)
        raise RequestError(f"no /{path} here: there are v1/chat/completions, v1/completions and generate", status=404)

    def end(self) -> list[Sample]:
        """The rows, finished."""
        for row in self._rows:
            sample = row.sample
            response = sample.tokens[sample.prompt_length :]
            skip = self._sampling.skip_special_tokens
            sample.response = self._state.tokenizer.decode(response, skip_special_tokens=skip)
        return [row.sample for row in self._rows if row.sample.response_length]

    async def _chat(self, body: dict[str, Any], sampling: SamplingParams) -> dict[str, Any]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise RequestError("messages must be a list of messages with a role")
        try:
            row = self._row_of(messages, body.get("tools"))
        except DataError as error:
            raise RequestError(str(error)) from error
        first = row.sample.response_length
        result = await self._write(row, sampling)
        text = self._state.tokenizer.decode(row.sample.tokens[row.sample.prompt_length + first :])
        message, calls = _message_of(result.text or text)
        row.messages = [*messages, message]
        reason = "length" if result.finish_reason is FinishReason.LENGTH else "tool_calls" if calls else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": self._log_probs(result)}
        return self._completion("chat.completion", row, result, choice)

    async def _continue(self, path: str, body: dict[str, Any], sampling: SamplingParams) -> dict[str, Any]:
        """The same with tokens (or a text) in place of messages."""
        given = body.get("input_ids", body.get("prompt"))
        ids = self._state.tokenizer.encode(given) if isinstance(given, str) else given
        if not isinstance(ids, list) or not ids or not all(isinstance(token_id, int) for token_id in ids):
            raise RequestError("prompt (or input_ids) must be a text or a list of token ids")
        row = max(
            (row for row in self._rows if _continues(ids, row)), key=lambda row: len(row.sample.tokens), default=None
        )
        if row is None:
            row = self._new_row(ids)
        else:
            TokenLog(row.sample).append_given(ids[len(row.sample.tokens) :])
        result = await self._write(row, sampling)
        reason = "length" if result.finish_reason is FinishReason.LENGTH else "stop"
        if path == "v1/completions":
            choice = {"index": 0, "text": result.text, "finish_reason": reason}
            if body.get("logprobs") is not None:
                choice["logprobs"] = {"token_logprobs": result.log_probs}
            return self._completion("text_completion", row, result, choice)
        meta = {"id": secrets.token_hex(8), "finish_reason": {"type": reason}, "prompt_tokens": len(ids)}
        meta |= {"completion_tokens": len(result.output_ids), "cached_tokens": result.cached_tokens}
        meta["output_token_logprobs"] = [
            [log_prob, token_id, None] for log_prob, token_id in zip(result.log_probs, result.output_ids, strict=True)
        ]
        return {"text": result.text, "output_ids": result.output_ids, "meta_info": meta}

    def _row_of(self, messages: list[Message], tools: Any) -> Row:
        """The row that these messages continue, with the new ones put behind its tokens; or a new row."""
        tokenizer = self._state.tokenizer
        for row in sorted(self._rows, key=lambda row: -len(row.messages)):
            count = len(row.messages)
            new = messages[count:]
            if row.busy or not count or not new or not all(map(_same, row.messages, messages[:count])):
                continue
            thought = any(END_OF_THINKING in str(m.get("content")) for m in row.messages if m["role"] == "assistant")
            if any(m["role"] == "assistant" for m in new) or (thought and not keeps_thinking(tokenizer, new)):
                continue
            TokenLog(row.sample).append_given(following_ids(tokenizer, row.sample.tokens[-1], new))
            return row
        return self._new_row(tokenizer.encode(tokenizer.render(messages, tools=tools)))

    def _new_row(self, ids: list[int]) -> Row:
        sample = copy.deepcopy(self._sample)
        sample.tokens, sample.response_length = list(ids), 0
        row = Row(sample, (self._state.noise_key + len(self._rows)) % 2**64)
        self._rows.append(row)
        return row

    async def _write(self, row: Row, sampling: SamplingParams) -> GenerationResult:
        """One turn of the model, appended to the row."""
        sample = row.sample
        left = self._sampling.max_new_tokens - sample.response_length
        room = min(left, self._state.max_context_len - len(sample.tokens))
        if room <= 0:
            sample.status = SampleStatus.TRUNCATED
            raise RequestError(
                f"the conversation has {len(sample.tokens)} tokens and no room for an answer "
                "(--rollout-max-response-len, --rollout-max-context-len)",
                code="context_length_exceeded",
            )
        sampling = dataclasses.replace(sampling, max_new_tokens=min(room, sampling.max_new_tokens))
        row.busy, start = True, time.perf_counter()
        try:
            result = await self._state.generate(sample.tokens, sampling, noise_key=row.noise_key)
        finally:
            row.busy = False
            self.seconds += time.perf_counter() - start
        self.num_turns += 1
        TokenLog(sample).append_written(result)
        full = len(result.output_ids) == room
        sample.status = _STATUS[result.finish_reason]
        if result.finish_reason is FinishReason.LENGTH and not full:  # the request's own limit: the next turn may go on
            sample.status = SampleStatus.COMPLETED
        if result.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise RequestError(result.error or "the rollout was stopped", status=503, code=result.finish_reason.value)
        return result

    def _read_sampling(self, body: dict[str, Any]) -> SamplingParams:
        """The run's sampling with the request's own limit and stops. Whatever would change the distribution is refused:
        the trainer must know it."""
        own = ("temperature", "top_p", "top_k", "min_p")
        fixed = _FIXED | {name: getattr(self._sampling, name) for name in own}
        for name, value in body.items():
            if name in _OPEN or value is None:
                continue
            if name not in fixed or value != fixed[name]:
                expected = f"it must be {fixed[name]}" if name in fixed else "it is not supported here"
                raise RequestError(f"{name}={value!r}: {expected}; the run's flags say how tokens are drawn")
        limits = [body[name] for name in ("max_tokens", "max_completion_tokens", "max_new_tokens") if body.get(name)]
        if not all(isinstance(limit, int) and limit > 0 for limit in limits):
            raise RequestError("max_tokens must be a whole number above 0")
        stop = body.get("stop") or ()
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return dataclasses.replace(
            self._sampling,
            max_new_tokens=min([self._sampling.max_new_tokens, *limits]),
            stop=(*self._sampling.stop, *stops),
        )

    def _log_probs(self, result: GenerationResult) -> list[dict[str, Any]]:
        tokens = (self._state.tokenizer.decode([one], skip_special_tokens=False) for one in result.output_ids)
        return [
            {"token": token, "logprob": log_prob, "bytes": None, "top_logprobs": []}
            for token, log_prob in zip(tokens, result.log_probs, strict=True)
        ]

    def _completion(self, kind: str, row: Row, result: GenerationResult, choice: dict[str, Any]) -> dict[str, Any]:
        num_written = len(result.output_ids)
        num_read = len(row.sample.tokens) - num_written
        usage = {"prompt_tokens": num_read, "completion_tokens": num_written, "total_tokens": num_read + num_written}
        return {
            **{"id": secrets.token_hex(8), "object": kind, "created": int(time.time()), "model": "miles"},
            **{"choices": [choice], "usage": usage},
        }


def _continues(ids: list[int], row: Row) -> bool:
    tokens = row.sample.tokens
    return not row.busy and row.sample.response_length > 0 and ids[: len(tokens)] == tokens


def _message_of(text: str) -> tuple[Message, bool]:
    """The text as a message of the assistant, with its tool calls when all of them can be read."""
    calls = tool_calls(text)
    if not calls or any(call.problem for call in calls):
        return {"role": "assistant", "content": text}, False
    listed = [
        {
            "id": f"call_{secrets.token_hex(6)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": without_calls(text) or None, "tool_calls": listed}, True


def _same(kept: Message, given: Message) -> bool:
    """Whether a message came back as it was; clients add fields that are empty, and write JSON in their own way."""
    return kept["role"] == given["role"] and _content(kept) == _content(given) and _calls(kept) == _calls(given)


def _content(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        return "".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    return str(content)


def _calls(message: Message) -> list[Any]:
    functions = [call.get("function", {}) for call in message.get("tool_calls") or []]
    return [(one.get("name"), _parsed(one.get("arguments"))) for one in functions]


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
