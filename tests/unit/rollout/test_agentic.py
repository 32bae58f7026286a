"""A program that talks to the model by HTTP: what it gets, and that the rows hold the very tokens that were drawn."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from miles.config.flags import Args, with_values
from miles.config.sections import RunConfig
from miles.errors import ConfigError, EngineError, RequestError, RewardError
from miles.rollout.client import EngineClient
from miles.rollout.generate_hub import conversation
from miles.rollout.generate_hub.agentic_tool_call import generate
from miles.rollout.generate_hub.conversation import Conversations
from miles.rollout.generate_hub.multi_turn import tool_numbers
from miles.rollout.hook_inputs import GenerateFnInput, GenerateState
from miles.text.tokenizer import Tokenizer
from miles.types import FinishReason, GenerationRequest, GenerationResult, Sample, SampleStatus, SamplingParams
from tests.unit.rollout.fake_generator import FakeGenerator

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
PROGRAM: list[Callable[..., Any]] = []


def post(base_url: str, path: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{base_url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.loads(response.read())


def chat(base_url: str, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    return post(base_url, "chat/completions", messages=messages, **body)["choices"][0]


def refusal(base_url: str, path: str, body: bytes) -> tuple[int, str]:
    """Status and message of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(f"{base_url}/{path}", body), timeout=20)
    return caught.value.code, json.loads(caught.value.read())["error"]["message"]


def run_program(**kwargs: Any) -> Any:
    return PROGRAM[-1](**kwargs)


class Answers:
    """Gives these texts in turn, each with the end token that the model writes."""

    def __init__(self, tokenizer: Tokenizer, *texts: str, reason: FinishReason = FinishReason.STOP) -> None:
        self.tokenizer, self.texts, self.reason = tokenizer, list(texts), reason
        self.requests: list[GenerationRequest] = []

    def __call__(self, request: GenerationRequest) -> GenerationResult:
        text = self.texts[len(self.requests)]
        self.requests.append(request)
        ids = self.tokenizer.encode(text + "<|im_end|>")[: request.sampling.max_new_tokens]
        log_probs = [-0.01 * i for i in range(len(ids))]
        return GenerationResult(request.request_id, ids, log_probs, [5] * len(ids), self.reason, text)


def write(
    answers: Answers,
    program: Callable[..., Any],
    *,
    limit: int = 400,
    prompt: Any = "hi",
    generator: FakeGenerator | None = None,
    **flags: Any,
) -> list[Sample]:
    async def run() -> list[Sample]:
        client = EngineClient(generator or FakeGenerator(answers), answers.tokenizer)
        flags["custom_agent_function_path"] = f"{__name__}.run_program"
        args = Args(with_values(RunConfig(), flags))
        state = GenerateState(args, client, noise_key=7, max_context_len=1000)
        sample = Sample(prompt=prompt, tokens=[5, 6], index=4, label="42", metadata={"level": 1})
        output = await generate(
            GenerateFnInput(state, sample, dataclasses.asdict(SamplingParams(max_new_tokens=limit)))
        )
        return output.samples if isinstance(output.samples, list) else [output.samples]

    PROGRAM.append(program)
    return asyncio.run(run())


def learned(sample: Sample, tokenizer: Tokenizer) -> list[str]:
    """The texts that the loss mask marks, one for each turn."""
    texts: list[list[int]] = [[]]
    assert sample.loss_mask is not None
    for token_id, mask in zip(sample.tokens[sample.prompt_length :], sample.loss_mask, strict=True):
        texts[-1].append(token_id) if mask else texts[-1] and texts.append([])
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in texts if ids]


def test_turns_of_one_conversation_are_one_row_of_the_drawn_tokens(tokenizer: Tokenizer) -> None:
    seen: dict[str, Any] = {}

    def program(base_url: str, prompt: str, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        first = chat(base_url, messages, **request_kwargs)
        seen.update(first=first, metadata=metadata)
        # a client library adds empty fields and writes JSON in its own way
        call = first["message"]["tool_calls"][0]
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        messages += [{**first["message"], "refusal": None, "content": ""}, {"role": "tool", "content": "3"}]
        seen["last"] = chat(base_url, messages, logprobs=True)
        return {"reward": 0.5, "note": "done"}

    answers = Answers(tokenizer, CALL, "it is 3")
    (row,) = write(answers, program)
    assert seen["metadata"] == {"level": 1}
    assert seen["first"]["finish_reason"] == "tool_calls"
    assert seen["last"]["message"] == {"role": "assistant", "content": "it is 3"}
    assert [entry["logprob"] for entry in seen["last"]["logprobs"]["content"]][:2] == [0.0, -0.01]
    prompt = tokenizer.render([{"role": "user", "content": "hi"}])
    between = "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(row.tokens, skip_special_tokens=False) == (
        f"{prompt}{CALL}<|im_end|>{between}it is 3<|im_end|>"
    )
    assert learned(row, tokenizer) == [f"{CALL}<|im_end|>", "it is 3<|im_end|>"]
    # the second request's tokens begin with all of the first and what was drawn
    assert answers.requests[1].prompt_ids == row.tokens[: len(answers.requests[1].prompt_ids)]
    assert (row.reward, row.metadata["note"], row.label, row.status) == (0.5, "done", "42", SampleStatus.COMPLETED)
    assert tool_numbers([row])["rollout/num_turns"] == 2


def test_an_edited_message_begins_a_second_row_and_leaves_the_first(tokenizer: Tokenizer) -> None:
    def program(base_url: str, prompt: str, **_: Any) -> None:
        messages = [{"role": "user", "content": prompt}]
        first = chat(base_url, messages)["message"]
        chat(base_url, [*messages, {**first, "content": "one!"}, {"role": "user", "content": "again"}])

    rows = write(Answers(tokenizer, "one", "two"), program)
    assert [learned(row, tokenizer) for row in rows] == [["one<|im_end|>"], ["two<|im_end|>"]]
    assert "one!" in tokenizer.decode(rows[1].tokens) and "one!" not in tokenizer.decode(rows[0].tokens)
    assert all(row.index == 4 for row in rows)
    rows[1].loss_mask = [0] * rows[1].response_length  # as if a tool had written it
    lengths = [row.response_length for row in rows]
    assert tool_numbers(rows)["rollout/tool_token_ratio"] == lengths[1] / sum(lengths)


def test_field_note_38_a_template_that_drops_old_thinking_forks(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(base_url: str, prompt: str, **_: Any) -> None:
        messages = [{"role": "user", "content": prompt}]
        first = chat(base_url, messages)["message"]
        chat(base_url, [*messages, first, {"role": "user", "content": "again"}])

    texts = ("<think>\nhm\n</think>\n\none", "two")
    assert len(write(Answers(tokenizer, *texts), program)) == 1
    render = tokenizer.render

    def dropping(messages: Any, **kwargs: Any) -> str:
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        kept = [
            {**m, "content": m["content"].rpartition("</think>")[2]} if m["role"] == "assistant" and i < last else m
            for i, m in enumerate(messages)
        ]
        return render(kept, **kwargs)

    monkeypatch.setattr(tokenizer, "render", dropping)
    rows = write(Answers(tokenizer, *texts), program)
    assert [learned(row, tokenizer) for row in rows] == [[texts[0] + "<|im_end|>"], ["two<|im_end|>"]]
    assert "hm" not in tokenizer.decode(rows[1].tokens)


def test_the_same_question_asked_twice_has_other_draws(tokenizer: Tokenizer) -> None:
    def program(base_url: str, prompt: str, **_: Any) -> None:
        for _ in range(2):
            chat(base_url, [{"role": "user", "content": prompt}])

    answers = Answers(tokenizer, "one", "two")
    assert len(write(answers, program)) == 2
    assert len({request.noise_key for request in answers.requests}) == 2


def test_tokens_in_tokens_out(tokenizer: Tokenizer) -> None:
    seen = []

    def program(base_url: str, **_: Any) -> None:
        url = base_url.removesuffix("/v1")
        first = post(url, "generate", input_ids=[9, 8, 7], sampling_params={"temperature": 1.0, "max_new_tokens": 50})
        seen.append(first)
        post(url, "v1/completions", prompt=[9, 8, 7, *first["output_ids"], 11, 12], max_tokens=50)

    (row,) = write(Answers(tokenizer, "one", "two"), program)
    written = [entry[1] for entry in seen[0]["meta_info"]["output_token_logprobs"]]
    assert written == seen[0]["output_ids"]
    assert row.tokens[: 3 + len(written) + 2] == [9, 8, 7, *written, 11, 12]
    assert learned(row, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"temperature": 0.3}, "temperature=0.3: it must be 1.0"),
        ({"n": 2}, "n=2: it must be 1"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5: it must be 0"),
        ({"logit_bias": {"5": 1}}, "logit_bias={'5': 1}: it is not supported here"),
        ({"max_tokens": -1}, "max_tokens must be a whole number above 0"),
        ({"messages": "hi"}, "messages must be a list"),
    ],
)
def test_what_would_change_the_distribution_is_refused(
    tokenizer: Tokenizer, body: dict[str, Any], expected: str
) -> None:
    refused = []

    def program(base_url: str, prompt: str, **_: Any) -> None:
        body.setdefault("messages", [{"role": "user", "content": prompt}])
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(base_url, "chat/completions", **body)
        refused.append(json.loads(caught.value.read())["error"]["message"])
        chat(base_url, [{"role": "user", "content": prompt}], temperature=1.0)

    assert len(write(Answers(tokenizer, "one"), program)) == 1
    assert expected in refused[0]


def test_a_full_conversation_is_an_answer_that_met_its_limit(tokenizer: Tokenizer) -> None:
    def program(base_url: str, prompt: str, **_: Any) -> None:
        messages = [{"role": "user", "content": prompt}]
        while True:
            messages += [chat(base_url, messages)["message"], {"role": "user", "content": "go on"}]

    (row,) = write(Answers(tokenizer, "one two three", "four", "five"), program, limit=30)
    assert row.status is SampleStatus.TRUNCATED


def test_a_program_that_fails_loses_its_sample_and_says_why(tokenizer: Tokenizer) -> None:
    def program(base_url: str, prompt: str, **_: Any) -> None:
        chat(base_url, [{"role": "user", "content": prompt}])
        raise KeyError("my mistake")

    (row,) = write(Answers(tokenizer, "one"), program)
    assert row.status is SampleStatus.FAILED and "KeyError: 'my mistake'" in row.metadata["failure"]
    (row,) = write(Answers(tokenizer), lambda **_: None)
    assert row.metadata["failure"] == "the program asked for no answer"
    with pytest.raises(ConfigError, match="returned a int; expected a dict or None"):
        write(Answers(tokenizer, "one"), lambda base_url, **_: chat(base_url, [{"role": "user", "content": "a"}]) and 3)


def test_an_address_ends_with_its_program_and_streams_are_one_chunk(tokenizer: Tokenizer) -> None:
    urls = []

    def program(base_url: str, prompt: str, **_: Any) -> None:
        urls.append(base_url)
        body = json.dumps({"messages": [{"role": "user", "content": prompt}], "stream": True}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body), timeout=20) as got:
            lines = [line for line in got.read().decode().splitlines() if line]
        assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["delta"]["content"] == "one"
        assert lines[-1] == "data: [DONE]"
        with urllib.request.urlopen(f"{base_url}/models", timeout=20) as got:
            assert json.loads(got.read())["data"][0]["id"] == "miles"

    write(Answers(tokenizer, "one"), program)
    with pytest.raises(urllib.error.HTTPError) as caught:
        chat(urls[0], [{"role": "user", "content": "hi"}])
    assert caught.value.code == 404 and "no such session" in caught.value.read().decode()


def test_requests_at_the_same_time_do_not_share_a_row(tokenizer: Tokenizer) -> None:
    async def program(base_url: str, prompt: str, **_: Any) -> None:
        messages = [{"role": "user", "content": prompt}]
        message = (await asyncio.to_thread(chat, base_url, messages))["message"]
        following = [[*messages, message, {"role": "user", "content": text}] for text in ("a", "b")]
        await asyncio.gather(*(asyncio.to_thread(chat, base_url, one) for one in following))

    rows = write(Answers(tokenizer, "one", "two", "three"), lambda **given: asyncio.run(program(**given)))
    assert sum(len(learned(row, tokenizer)) for row in rows) >= 3
    texts = [text for row in rows for text in learned(row, tokenizer)]
    assert {"two<|im_end|>", "three<|im_end|>"} <= set(texts)


HELLO: dict[str, Any] = {"role": "user", "content": "hi"}
DEEP = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("chat/completions", b"{", "cannot be read as JSON"),
        ("chat/completions", b"\xff\xfe{}", "cannot be read as JSON"),
        ("chat/completions", DEEP, "cannot be read as JSON"),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogates not allowed"),
        ("chat/completions", b'{"\\ud800": 1}', "surrogates not allowed"),
        ("chat/completions", b"[]", "not a JSON object"),
        ("chat/completions", {"messages": []}, "a list of messages with a role"),
        ("chat/completions", {"messages": [{"content": "hi"}]}, "a list of messages with a role"),
        ("chat/completions", {"messages": [{"role": 5, "content": "hi"}]}, "a list of messages with a role"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "must be a text, or a list of parts"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "must be a text, or a list of parts",
        ),
        ("chat/completions", {"messages": [{**HELLO, "tool_calls": [5]}]}, "a list of calls, each with a function"),
        ("chat/completions", {"messages": [{**HELLO, "tool_calls": 5}]}, "a list of calls, each with a function"),
        ("chat/completions", {"messages": [HELLO], "stop": 5}, "stop must be"),
        ("chat/completions", {"messages": [HELLO], "stop": [""]}, "stop must be"),
        ("chat/completions", {"messages": [HELLO], "stop": ["x"] * 10_000}, "stop must be"),
        ("chat/completions", {"messages": [HELLO], "max_tokens": 0}, "max_tokens must be"),
        ("chat/completions", {"messages": [HELLO], "max_tokens": True}, "max_tokens must be"),
        ("chat/completions", {"messages": [HELLO], "temperature": "x" * 10_000}, "it must be 1.0"),
        ("generate", {"input_ids": [5], "sampling_params": 5}, "must be a JSON object"),
        ("generate", {"input_ids": [5], "stream": True}, "no streams of generate"),
        ("generate", {"input_ids": [-1]}, "token ids that are not from 0 to"),
        ("generate", {"input_ids": [2**70]}, "token ids that are not from 0 to"),
        ("generate", {"input_ids": [True]}, "a list of token ids"),
        ("completions", {"prompt": [[5], [6]]}, "a list of token ids"),
        ("completions", {"prompt": None}, "a list of token ids"),
        ("nowhere", {}, "no /v1/nowhere here"),
    ],
)
def test_a_body_that_cannot_be_served_is_refused_in_a_sentence(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, path: str, body: Any, expected: str
) -> None:
    def program(base_url: str, **_: Any) -> dict[str, Any]:
        status, text = refusal(base_url, path, body if isinstance(body, bytes) else json.dumps(body).encode())
        chat(base_url, [HELLO])
        return {"status": status, "text": text}

    with caplog.at_level(logging.ERROR, "uvicorn.error"):
        (row,) = write(Answers(tokenizer, "one"), program)
    assert row.metadata["status"] in (400, 404) and expected in row.metadata["text"]
    assert len(row.metadata["text"]) < 300 and not caplog.records


def test_a_connection_that_ends_midway_leaves_nothing_behind(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    def program(base_url: str, **_: Any) -> None:
        address = base_url.removeprefix("http://").partition("/")[0]
        host, _, port = address.partition(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            path = base_url.partition(address)[2]
            head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Length: 999\r\n\r\n"
            client.sendall(head.encode() + b'{"messages"')
        chat(base_url, [HELLO])

    with caplog.at_level(logging.ERROR, "uvicorn.error"):
        (row,) = write(Answers(tokenizer, "one"), program)
    assert learned(row, tokenizer) == ["one<|im_end|>"] and not caplog.records


def test_text_may_come_in_parts_and_no_text_is_an_empty_one(tokenizer: Tokenizer) -> None:
    def program(base_url: str, **_: Any) -> None:
        message = chat(base_url, [HELLO])["message"]
        parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
        chat(base_url, [HELLO, message, {"role": "user", "content": parts}, {"role": "user", "content": None}])

    (row,) = write(Answers(tokenizer, "one", "two"), program)
    text = tokenizer.decode(row.tokens, skip_special_tokens=False)
    assert "<|im_start|>user\nhello<|im_end|>\n<|im_start|>user\n<|im_end|>" in text and "None" not in text


def test_a_request_that_had_no_room_leaves_no_tokens_behind(tokenizer: Tokenizer) -> None:
    def program(base_url: str, **_: Any) -> None:
        messages = [HELLO, chat(base_url, [HELLO])["message"]]
        long = json.dumps({"messages": [*messages, {"role": "user", "content": "much " * 200}]}).encode()
        assert "no room" in refusal(base_url, "chat/completions", long)[1]
        chat(base_url, [*messages, {"role": "user", "content": "less"}])

    (row,) = write(Answers(tokenizer, "one", "two"), program, limit=100)
    text = tokenizer.decode(row.tokens, skip_special_tokens=False)
    assert "much" not in text and text.count("less") == 1
    assert row.status is SampleStatus.COMPLETED and learned(row, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]


def test_other_tools_begin_a_second_row(tokenizer: Tokenizer) -> None:
    def program(base_url: str, **_: Any) -> None:
        messages = [HELLO, chat(base_url, [HELLO])["message"], {"role": "user", "content": "again"}]
        chat(base_url, messages, tools=[{"type": "function", "function": {"name": "add"}}])

    assert len(write(Answers(tokenizer, "one", "two"), program)) == 2


def test_any_number_of_plain_programs_run_at_the_same_time(tokenizer: Tokenizer) -> None:
    together = threading.Barrier(50)

    def program(base_url: str, **_: Any) -> None:
        together.wait(timeout=20)
        chat(base_url, [HELLO])

    async def run() -> list[Sample]:
        client = EngineClient(FakeGenerator(Answers(tokenizer, *["one"] * 50)), tokenizer)
        args = Args(with_values(RunConfig(), {"custom_agent_function_path": f"{__name__}.run_program"}))
        sampling = dataclasses.asdict(SamplingParams(max_new_tokens=50))
        states = [GenerateState(args, client, noise_key=key, max_context_len=1000) for key in range(50)]
        given = [GenerateFnInput(state, Sample(prompt="hi", tokens=[5]), sampling) for state in states]
        outputs = await asyncio.gather(*(generate(one) for one in given))
        return [
            sample for one in outputs for sample in (one.samples if isinstance(one.samples, list) else [one.samples])
        ]

    PROGRAM.append(program)
    assert [row.status for row in asyncio.run(run())] == [SampleStatus.COMPLETED] * 50


@pytest.mark.parametrize(
    ("returned", "error", "expected"),
    [
        ({"reward": float("nan")}, RewardError, "returned nan for an answer"),
        ({"reward": "good"}, RewardError, "returned the str 'good'"),
        ({"reward": {"score": 1}}, RewardError, "say with --reward-key"),
        ({"found": {(1, 2): 3}}, ConfigError, "cannot be stored as JSON"),
    ],
)
def test_what_a_program_returns_is_checked(
    tokenizer: Tokenizer, returned: dict[str, Any], error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        write(Answers(tokenizer, "one"), lambda base_url, **_: chat(base_url, [HELLO]) and returned)


def test_a_program_cannot_hide_that_the_engine_failed(tokenizer: Tokenizer) -> None:
    class Broken(FakeGenerator):
        async def results(self) -> list[GenerationResult]:
            raise EngineError("the engine is gone")

    def program(base_url: str, prompt: list[Any], metadata: dict[str, Any], **_: Any) -> None:
        prompt.append("mine")
        refusal(base_url, "chat/completions", json.dumps({"messages": [HELLO]}).encode())

    answers = Answers(tokenizer, "one")
    prompt = [HELLO]
    with pytest.raises(EngineError, match="the engine is gone"):
        write(answers, program, prompt=prompt, generator=Broken(answers))
    assert prompt == [HELLO]  # a program may change what it was given


def test_what_a_program_leaves_behind_is_stopped_and_changes_no_row(tokenizer: Tokenizer) -> None:
    answers = Answers(tokenizer, "one", "two")
    refused: list[tuple[int, str]] = []

    async def run() -> None:
        generator = FakeGenerator(answers, hold=[1])
        client = EngineClient(generator, tokenizer)
        args = Args(with_values(RunConfig(), {"custom_agent_function_path": f"{__name__}.run_program"}))
        state = GenerateState(args, client, noise_key=7, max_context_len=1000)

        def program(base_url: str, **_: Any) -> None:
            messages = [HELLO, chat(base_url, [HELLO])["message"], {"role": "user", "content": "again"}]
            body = json.dumps({"messages": messages}).encode()
            later = threading.Thread(target=lambda: refused.append(refusal(base_url, "chat/completions", body)))
            later.start()
            while len(generator.submits) < 2:
                time.sleep(0.01)
            threads.append(later)

        threads: list[threading.Thread] = []
        PROGRAM.append(program)
        sampling = dataclasses.asdict(SamplingParams(max_new_tokens=50))
        output = await generate(GenerateFnInput(state, Sample(prompt="hi", tokens=[5]), sampling))
        (row,) = output.samples
        before = list(row.tokens)
        state.close()
        await client.drain()
        await asyncio.to_thread(threads[0].join)
        assert generator.aborted == [1] and row.tokens == before and learned(row, tokenizer) == ["one<|im_end|>"]
        with pytest.raises(RequestError, match="has ended"):
            await state.generate([5], SamplingParams(max_new_tokens=5))

    asyncio.run(run())
    assert refused[0][0] == 404 and "has ended" in refused[0][1]


def test_a_stream_numbers_its_tool_calls(tokenizer: Tokenizer) -> None:
    def program(base_url: str, **_: Any) -> None:
        body = json.dumps({"messages": [HELLO], "stream": True}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body), timeout=20) as got:
            chunk = json.loads(got.read().decode().splitlines()[0].removeprefix("data: "))
        assert chunk["object"] == "chat.completion.chunk"
        assert [call["index"] for call in chunk["choices"][0]["delta"]["tool_calls"]] == [0, 1]

    (row,) = write(Answers(tokenizer, CALL + CALL), program)
    assert row.status is SampleStatus.COMPLETED, row.metadata


@pytest.mark.slow
def test_field_note_36_ten_thousand_random_sequences_stay_exact_in_conversations(tokenizer: Tokenizer) -> None:
    chance = random.Random(2)
    end = tokenizer.encode("<|im_end|>")
    suffix = tokenizer.encode("\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n")
    ids = [token_id for token_id in range(tokenizer.vocab_size) if token_id not in tokenizer.special_token_ids]

    async def run() -> int:
        num_not_canonical = 0
        for _ in range(10_000):
            turns = [[*chance.choices(ids, k=chance.randint(1, 8)), *end] for _ in range(2)]
            requests: list[GenerationRequest] = []

            def answer(request: GenerationRequest, turns: Any = turns, requests: Any = requests) -> GenerationResult:
                drawn = turns[len(requests)]
                requests.append(request)
                text = tokenizer.decode(drawn)
                return GenerationResult(
                    request.request_id, drawn, [-0.5] * len(drawn), [5] * len(drawn), FinishReason.STOP, text
                )

            state = GenerateState(
                None, EngineClient(FakeGenerator(answer), tokenizer), noise_key=7, max_context_len=999
            )
            talk = Conversations(state, Sample(prompt="hi"), dataclasses.asdict(SamplingParams(max_new_tokens=900)))
            messages = [HELLO]
            for _ in turns:
                body = json.loads(json.dumps({"messages": messages}))
                given = await talk.answer("v1/chat/completions", body)
                messages += [given["choices"][0]["message"], {"role": "user", "content": "again"}]
            (row,) = talk.end()
            first = list(requests[0].prompt_ids)
            assert row.tokens == [*first, *turns[0], *suffix, *turns[1]]
            assert row.loss_mask == [1] * len(turns[0]) + [0] * len(suffix) + [1] * len(turns[1])
            num_not_canonical += tokenizer.encode(tokenizer.decode(turns[0], skip_special_tokens=False)) != turns[0]
        return num_not_canonical

    assert asyncio.run(run()) > 1000


def test_a_program_that_does_not_return_loses_its_sample(tokenizer: Tokenizer) -> None:
    hangs = threading.Event()

    def program(base_url: str, **_: Any) -> None:
        chat(base_url, [HELLO])
        hangs.wait()

    (row,) = write(Answers(tokenizer, "one"), program, custom_agent_timeout=0.3)
    assert row.status is SampleStatus.FAILED
    assert row.metadata["failure"] == "--custom-agent-function-path did not return within 0.3 s"
    hangs.set()


def test_tool_time_is_when_no_turn_is_being_written(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests from 1 to 5 and from 2 to 4: the model writes for 4 s, not for 6."""
    now = 1.0
    monkeypatch.setattr(conversation, "time", SimpleNamespace(perf_counter=lambda: now, time=time.time))

    async def run() -> Conversations:
        nonlocal now
        generator = FakeGenerator(Answers(tokenizer, "two", "one"), hold=[0, 1])
        args = Args(RunConfig())
        state = GenerateState(args, EngineClient(generator, tokenizer), noise_key=7, max_context_len=1000)
        talk = Conversations(state, Sample(prompt="hi"), dataclasses.asdict(SamplingParams(max_new_tokens=400)))

        async def ask() -> asyncio.Task[Any]:
            asking = asyncio.create_task(talk.answer("v1/chat/completions", {"messages": [HELLO]}))
            await asyncio.sleep(0.01)
            return asking

        first = await ask()
        now = 2.0
        second = await ask()
        now = 4.0
        assert talk.seconds == 3.0  # of what is still being written too
        generator.release(1)
        await second
        now = 5.0
        generator.release(0)
        await first
        now = 9.0
        return talk

    assert asyncio.run(run()).seconds == 4.0


def by_role(stored_message: dict[str, Any], replayed_message: dict[str, Any]) -> bool:
    return stored_message["role"] == replayed_message["role"]


def last_only(samples: list[Sample], metadata: dict[str, Any]) -> list[Sample]:
    return samples[-1:]


def twice(samples: list[Sample], metadata: dict[str, Any]) -> list[Sample]:
    return [*samples, *samples]


def breaks(*_: Any) -> Any:
    return 1 / 0


def named(samples: list[Sample], metadata: dict[str, Any]) -> list[Sample]:
    for sample in samples:
        sample.metadata["note"] = metadata["note"]
    return samples


def edits(base_url: str, prompt: str, **_: Any) -> dict[str, Any]:
    """Changes what the model said before it goes on."""
    messages = [{"role": "user", "content": prompt}]
    first = chat(base_url, messages)["message"]
    chat(base_url, [*messages, {**first, "content": "one!"}, {"role": "user", "content": "again"}])
    return {"note": "seen"}


def test_hooks_of_a_session_match_choose_and_edit(tokenizer: Tokenizer) -> None:
    (row,) = write(Answers(tokenizer, "one", "two"), edits, session_message_matcher=f"{__name__}.by_role")
    assert learned(row, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]
    hooks = {"session_sample_picker_path": "last_only", "session_sample_postprocessor_path": "named"}
    (row,) = write(Answers(tokenizer, "one", "two"), edits, **{name: f"{__name__}.{f}" for name, f in hooks.items()})
    assert learned(row, tokenizer) == ["two<|im_end|>"] and row.metadata["note"] == "seen"
    with pytest.raises(ConfigError, match="--session-sample-picker-path .* must return some of the samples"):
        write(Answers(tokenizer, "one", "two"), edits, session_sample_picker_path=f"{__name__}.twice")
    for name in ("session_message_matcher", "session_sample_picker_path", "session_sample_postprocessor_path"):
        flag = "--" + name.replace("_", "-")
        with pytest.raises(ConfigError, match=f"{flag} .*breaks failed: .*test_agentic.py:[0-9]+: ZeroDivisionError"):
            write(Answers(tokenizer, "one", "two"), edits, **{name: f"{__name__}.breaks"})
