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
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from miles.errors import DataError, EngineError, PluginError, RequestError
from miles.rollout.generate_hub.single_turn import STATUS
from miles.rollout.hook_inputs import GenerateState
from miles.rollout.hooks import FAILURE, Hook
from miles.text.tokens import TokenLog, following_ids, keeps_thinking
from miles.text.tools import END_OF_THINKING, tool_calls, without_calls
from miles.types import FinishReason, GenerationResult, Sample, SampleStatus, SamplingParams

Message = dict[str, Any]

_OPEN = (
    *("messages", "prompt", "input_ids", "model", "tools", "max_tokens", "max_completion_tokens", "max_new_tokens"),
    *("stream", "stream_options", "stop", "logprobs", "return_logprob", "user", "parallel_tool_calls", "metadata"),
)
_FIXED = {  # taken at this value only
    **{"n": 1, "tool_choice": "auto", "ignore_eos": False, "skip_special_tokens": True},
    **{"frequency_penalty": 0, "presence_penalty": 0},
}
MAX_STOPS = 64  # the engine looks for each of them after every token


@dataclass
class Row:
    """`messages`, shown with `tools`, lead to `sample`'s tokens. `busy` while a turn is being written, and for good
    when that failed."""

    sample: Sample
    noise_key: int
    tools: Any = None
    messages: list[Message] = field(default_factory=list)
    busy: bool = False


class Conversations:
    """What stands behind the address of a sample. `num_turns` counts what the model wrote, `seconds` when it did,
    `refusal` says what a request was last refused for. `matcher` says whether a message came back as it was."""

    def __init__(
        self,
        state: GenerateState,
        sample: Sample,
        sampling_params: dict[str, Any],
        matcher: Hook | None = None,
    ) -> None:
        self._state, self._sample = state, sample
        self._matches = _same if matcher is None else partial(matcher.at_once, matcher.function)
        self._sampling = SamplingParams(**sampling_params)
        self._rows: list[Row] = []
        self.num_turns, self._num_writing, self._seconds, self._since = 0, 0, 0.0, 0.0
        self._lock = threading.Lock()  # a row ends in another thread than it is written in
        self._has_ended = False
        self._error: EngineError | PluginError | None = None  # that is not the program's
        self.refusal: str | None = None

    @property
    def request_kwargs(self) -> dict[str, Any]:
        """What a request may say of the sampling: it is that of the run, which the trainer knows."""
        sampling = self._sampling
        return {"model": "miles", "temperature": sampling.temperature, "top_p": sampling.top_p,
                "max_tokens": sampling.max_new_tokens}  # fmt: skip

    async def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Serve `v1/chat/completions`, `v1/completions` and SGLang's `generate`. Raises `RequestError`."""
        try:
            return await self._serve(path, body)
        except RequestError as error:
            self.refusal = str(error)
            raise

    async def _serve(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        nested = body.pop("sampling_params", None) or {}  # where SGLang's own route has them
        if not isinstance(nested, dict):
            raise RequestError("sampling_params must be a JSON object")
        settings = {**body, **nested}
        sampling = self._read_sampling(settings)
        if path == "v1/chat/completions":
            return await self._chat(body, sampling)
        if path in ("v1/completions", "generate", "v1/generate"):
            if body.get("stream") and path != "v1/completions":
                raise RequestError("there are no streams of generate here: leave stream out")
            return await self._continue(path, settings, sampling)
        raise RequestError(f"no /{path} here: there are v1/chat/completions, v1/completions and generate", status=404)

    def end(self) -> list[Sample]:
        """The rows, finished: nothing is written to them any more. Raises `EngineError` when the engine has failed."""
        with self._lock:
            self._has_ended = True
        if self._error is not None:
            raise self._error
        for row in self._rows:
            sample = row.sample
            response = sample.tokens[sample.prompt_length :]
            skip = self._sampling.skip_special_tokens
            sample.response = self._state.tokenizer.decode(response, skip_special_tokens=skip)
        return [row.sample for row in self._rows if row.sample.response_length]

    async def _chat(self, body: dict[str, Any], sampling: SamplingParams) -> dict[str, Any]:
        messages = _read_messages(body.get("messages"))
        try:
            row, given = self._row_of(messages, body.get("tools") or None)
        except (DataError, PluginError) as error:
            self._error = error if isinstance(error, PluginError) else self._error
            raise RequestError(str(error)) from error
        result = await self._write(row, given, sampling)
        message, calls = _message_of(result.text)
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
        if not isinstance(ids, list) or not ids or not all(type(token_id) is int for token_id in ids):
            raise RequestError("prompt (or input_ids) must be a text or a list of token ids")
        row = max(
            (row for row in self._rows if _continues(ids, row)), key=lambda row: len(row.sample.tokens), default=None
        )
        given = ids if row is None else ids[len(row.sample.tokens) :]
        vocab_size = self._state.tokenizer.vocab_size
        if not all(0 <= token_id < vocab_size for token_id in given):
            raise RequestError(f"prompt (or input_ids) has token ids that are not from 0 to {vocab_size - 1}")
        if row is None:
            row, given = self._new_row(ids), []
        result = await self._write(row, given, sampling)
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

    def _row_of(self, messages: list[Message], tools: Any) -> tuple[Row, list[int]]:
        """The row that these messages continue, or a new one; and the tokens that are to be put behind its own."""
        tokenizer = self._state.tokenizer
        for row in sorted(self._rows, key=lambda row: -len(row.messages)):
            count = len(row.messages)
            new = messages[count:]
            if row.busy or row.tools != tools or not count or not new:
                continue
            if not all(map(self._matches, row.messages, messages[:count])):
                continue
            thought = any(END_OF_THINKING in str(m["content"]) for m in row.messages if m["role"] == "assistant")
            if any(m["role"] == "assistant" for m in new) or (thought and not keeps_thinking(tokenizer, new)):
                continue
            return row, following_ids(tokenizer, row.sample.tokens[-1], new)
        return self._new_row(tokenizer.encode(tokenizer.render(messages, tools=tools)), tools), []

    def _new_row(self, ids: list[int], tools: Any = None) -> Row:
        sample = copy.deepcopy(self._sample)
        sample.tokens, sample.response_length = list(ids), 0
        row = Row(sample, (self._state.noise_key + len(self._rows)) % 2**64, tools)
        self._rows.append(row)
        return row

    async def _write(self, row: Row, given: list[int], sampling: SamplingParams) -> GenerationResult:
        """One turn of the model behind the `given` tokens; both are appended, or neither when there is no room."""
        sample = row.sample
        left = self._sampling.max_new_tokens - sample.response_length
        room = min(left, self._state.max_context_len - len(sample.tokens)) - len(given)
        if room <= 0:
            sample.status = SampleStatus.TRUNCATED
            raise RequestError(
                f"the conversation has {len(sample.tokens) + len(given)} tokens and no room for an answer "
                "(--rollout-max-response-len, --rollout-max-context-len)",
                code="context_length_exceeded",
            )
        sampling = dataclasses.replace(sampling, max_new_tokens=min(room, sampling.max_new_tokens))
        row.busy = True
        self._note_writing(1)
        try:
            result = await self._state.generate([*sample.tokens, *given], sampling, noise_key=row.noise_key)
        except EngineError as error:
            self._error = error
            raise RequestError(str(error), status=503) from error
        finally:
            self._note_writing(-1)
        with self._lock:
            if self._has_ended:
                raise RequestError("the program that was given this address has ended", status=404)
            if given:
                TokenLog(sample).append_given(given)
            TokenLog(sample).append_written(result)
            self.num_turns += 1
            full = len(result.output_ids) == room
            sample.status = STATUS[result.finish_reason]
            if result.finish_reason is FinishReason.LENGTH and not full:  # the request's own limit: one may go on
                sample.status = SampleStatus.COMPLETED
        if result.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            sample.metadata[FAILURE] = result.error
            raise RequestError(result.error or "the rollout was stopped", status=503, code=result.finish_reason.value)
        row.busy = False
        return result

    @property
    def seconds(self) -> float:
        """Time in which at least one turn was being written."""
        return self._seconds + (time.perf_counter() - self._since if self._num_writing else 0.0)

    def _note_writing(self, more: int) -> None:
        self._seconds, self._since, self._num_writing = self.seconds, time.perf_counter(), self._num_writing + more

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
                raise RequestError(f"{name:.60}={value!r:.60}: {expected}; the run's flags say how tokens are drawn")
        names = ("max_tokens", "max_completion_tokens", "max_new_tokens")
        limits = [body[name] for name in names if body.get(name) is not None]
        if not all(type(limit) is int and limit > 0 for limit in limits):
            raise RequestError("max_tokens must be a whole number above 0")
        stop = body.get("stop")
        stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
        is_list = isinstance(stops, list) and len(stops) <= MAX_STOPS
        if not is_list or not all(isinstance(text, str) and text for text in stops):
            raise RequestError(f"stop must be a text that is not empty, or a list of up to {MAX_STOPS}")
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


def _read_messages(given: Any) -> list[Message]:
    """The messages, each with a role and a text, which may have come in parts."""
    is_list = isinstance(given, list) and len(given) > 0
    if not is_list or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in given):
        raise RequestError("messages must be a list of messages with a role")
    messages = []
    for message in given:
        content, calls = message.get("content") or "", message.get("tool_calls") or []
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise RequestError("the content of a message must be a text, or a list of parts that are texts")
        if not isinstance(calls, list) or not all(
            isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls
        ):
            raise RequestError("tool_calls must be a list of calls, each with a function")
        messages.append({**message, "content": content})
    return messages


def _same(kept: Message, given: Message) -> bool:
    """Whether a message came back as it was; clients add fields that are empty, and write JSON in their own way."""
    texts = [message["content"] or "" for message in (kept, given)]
    return kept["role"] == given["role"] and texts[0] == texts[1] and _calls(kept) == _calls(given)


def _calls(message: Message) -> list[Any]:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [(one.get("name"), _parsed(one.get("arguments"))) for one in functions]


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
