"""Field notes 36 and 38: the tokens of a turn are those that were drawn, and nothing edits them later."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from miles.config.flags import Args, with_values
from miles.config.sections import RunConfig
from miles.errors import DataError
from miles.rollout.client import EngineClient
from miles.rollout.generate_hub import python_tool
from miles.rollout.generate_hub.multi_turn import generate, tool_numbers
from miles.rollout.hook_inputs import GenerateFnInput, GenerateState
from miles.text.tokenizer import Tokenizer, load_tokenizer
from miles.text.tokens import following_text
from miles.text.tools import tool_calls
from miles.types import FinishReason, GenerationRequest, GenerationResult, Sample, SampleStatus, SamplingParams
from tests.unit.rollout.fake_generator import FakeGenerator
from tests.unit.text.tiny_tokenizer import write_tokenizer

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def add(name: str, params: dict[str, Any]) -> str:
    return f"{name} {sorted(params)}"


async def hang(name: str, params: dict[str, Any]) -> str:
    await asyncio.sleep(60)
    return "late"


TOGETHER = threading.Barrier(50)


def meet(name: str, params: dict[str, Any]) -> str:
    TOGETHER.wait(timeout=20)
    return "met"


def break_down(name: str, params: dict[str, Any]) -> str:
    raise ValueError("no such tool")


class Answers:
    """A generator that gives these answers in turn."""

    def __init__(self, *turns: list[int], reason: FinishReason = FinishReason.STOP) -> None:
        self.turns, self.requests, self.reason = list(turns), [], reason

    def __call__(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        ids = self.turns[len(self.requests) - 1]
        log_probs = [-0.01 * i for i in range(len(ids))]
        return GenerationResult(request.request_id, ids, log_probs, [5] * len(ids), self.reason)


async def write(
    answers: Answers, tokenizer: Tokenizer, *, tool: str = "add", limit: int = 900, context: int = 1000, **flags: Any
) -> Sample:
    flags["generate_execute_tool_function_path"] = f"{__name__}.{tool}"
    client = EngineClient(FakeGenerator(answers), tokenizer)
    state = GenerateState(Args(with_values(RunConfig(), flags)), client, noise_key=7, max_context_len=context)
    sample = Sample(tokens=[5, 6, 7], index=0)
    sampling = dataclasses.asdict(SamplingParams(max_new_tokens=limit))
    output = await generate(GenerateFnInput(state, sample, sampling))
    assert output.samples is sample
    return sample


def eos(tokenizer: Tokenizer) -> int:
    return tokenizer.encode("<|im_end|>")[0]


def test_field_note_36_ten_thousand_random_sequences_stay_exact_through_two_turns(tokenizer: Tokenizer) -> None:
    chance = random.Random(1)
    end, call = eos(tokenizer), tokenizer.encode(CALL)
    suffix = tokenizer.encode("\n<|im_start|>tool\nadd ['a']<|im_end|>\n<|im_start|>assistant\n")
    ids = [token_id for token_id in range(tokenizer.vocab_size) if token_id not in tokenizer.special_token_ids]

    async def run() -> int:
        num_not_canonical = 0
        for _ in range(10_000):
            first = [*chance.choices(ids, k=chance.randint(0, 8)), *call, end]
            second = [*chance.choices(ids, k=chance.randint(1, 8)), end]
            answers = Answers(first, second)
            sample = await write(answers, tokenizer)
            expected = [5, 6, 7, *first, *suffix, *second]
            assert sample.tokens == expected and list(answers.requests[1].prompt_ids) == expected[: -len(second)]
            assert sample.loss_mask == [1] * len(first) + [0] * len(suffix) + [1] * len(second)
            drawn = [[-0.01 * i for i in range(len(turn))] for turn in (first, second)]
            assert sample.rollout_log_probs == [*drawn[0], *([0.0] * len(suffix)), *drawn[1]]
            assert len(sample.weight_versions or ()) == sample.response_length == len(expected) - 3
            num_not_canonical += tokenizer.encode(tokenizer.decode(first, skip_special_tokens=False)) != first
        return num_not_canonical

    assert asyncio.run(run()) > 1000  # decoding and encoding again would have changed these


def test_field_note_38_a_template_that_drops_old_thinking_changes_no_token(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "thinking")
    (folder / "chat_template.jinja").write_text(DROPS_THINKING)
    tokenizer = load_tokenizer(folder)
    first = [*tokenizer.encode(f"<think>two and two</think>{CALL}"), eos(tokenizer)]
    answers = Answers(first, [*tokenizer.encode("4"), eos(tokenizer)])
    sample = asyncio.run(write(answers, tokenizer))
    assert sample.tokens[3 : 3 + len(first)] == first and "<think>two and two</think>" in sample.response
    assert sample.status is SampleStatus.COMPLETED and sample.metadata["num_turns"] == 2


def test_a_template_without_tool_messages_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "no_tools")
    template = "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(DataError, match="does not show messages of the role tool"):
        following_text(load_tokenizer(folder), [{"role": "tool", "content": "3"}], written_end="")


@pytest.mark.parametrize(
    ("tool", "seen"),
    [("hang", "error: the tool gave no answer within 0.02 s"), ("break_down", "ValueError: no such tool")],
)
def test_calls_run_together_with_a_time_out_and_failures_are_shown_to_the_model(
    tokenizer: Tokenizer, tool: str, seen: str
) -> None:
    first = [*tokenizer.encode(CALL * 3), eos(tokenizer)]
    answers = Answers(first, [*tokenizer.encode("4"), eos(tokenizer)])
    sample = asyncio.run(write(answers, tokenizer, tool=tool, generate_tool_timeout=0.02))
    assert tokenizer.decode(sample.tokens).count(seen) == 3
    numbers = tool_numbers([sample])
    assert numbers["rollout/num_turns"] == 2 and numbers["perf/tool_time"] < 5
    assert numbers["rollout/tool_token_ratio"] + numbers["rollout/model_token_ratio"] == pytest.approx(1)


def test_limits_end_an_answer_before_a_turn_that_has_no_room(tokenizer: Tokenizer) -> None:
    first = [*tokenizer.encode(CALL), eos(tokenizer)]
    short = asyncio.run(write(Answers(first), tokenizer, limit=len(first) + 3))
    assert short.status is SampleStatus.TRUNCATED and short.response_length == len(first)
    turns = asyncio.run(write(Answers(first, first), tokenizer, generate_max_turns=2))
    assert turns.status is SampleStatus.TRUNCATED and turns.metadata["num_turns"] == 2


def test_an_answer_that_was_stopped_in_its_second_turn_goes_on_there(tokenizer: Tokenizer) -> None:
    first, rest = [*tokenizer.encode(CALL), eos(tokenizer)], [*tokenizer.encode("all of 4"), eos(tokenizer)]
    whole = asyncio.run(write(Answers(first, rest), tokenizer))
    cut = Answers(first, rest[:2])
    state: dict[str, Any] = {}

    async def run() -> Sample:
        flags = {"generate_execute_tool_function_path": f"{__name__}.add"}

        def answer(request: GenerationRequest) -> GenerationResult:
            return state["answer"](request)

        client = EngineClient(FakeGenerator(answer), tokenizer)
        given = GenerateState(Args(with_values(RunConfig(), flags)), client, noise_key=7, max_context_len=1000)
        sample = Sample(tokens=[5, 6, 7], index=0)
        input = GenerateFnInput(given, sample, dataclasses.asdict(SamplingParams(max_new_tokens=900)))

        def stop_in_turn_two(request: GenerationRequest) -> GenerationResult:
            result = cut(request)
            result.finish_reason = FinishReason.STOP if len(cut.requests) == 1 else FinishReason.ABORT
            return result

        state["answer"] = stop_in_turn_two
        await generate(input)
        assert sample.status is SampleStatus.ABORTED
        state["answer"] = Answers(rest[2:])
        await generate(input)
        return sample

    continued = asyncio.run(run())
    assert (continued.tokens, continued.loss_mask, continued.response) == (
        whole.tokens,
        whole.loss_mask,
        whole.response,
    )
    assert continued.status is SampleStatus.COMPLETED and continued.metadata["num_turns"] == 2


def test_calls_that_cannot_be_read_say_why() -> None:
    text = f'<think>{CALL}</think><tool_call>{{"name": "a", "arguments": "{{}}"}}</tool_call><tool_call>{{x</tool_call>'
    good, bad = tool_calls(text)
    assert (good.name, good.arguments, good.problem) == ("a", {}, None)
    assert bad.problem is not None and "cannot be read as JSON" in bad.problem
    assert tool_calls('<tool_call>{"name": 3}</tool_call>')[0].problem and not tool_calls("none")


@pytest.mark.usefixtures("only_sandbox")
def test_the_python_tool_runs_in_the_sandbox() -> None:
    async def run(code: str) -> str:
        return await python_tool.execute("python", {"code": code})

    if "42" not in (shown := asyncio.run(run("print(6 * 7)"))):
        pytest.skip(f"no sandbox on this machine: {shown}")
    assert "ZeroDivisionError" in asyncio.run(run("1 / 0"))
    assert "error: there is one tool" in asyncio.run(python_tool.execute("shell", {}))


def test_any_number_of_plain_tools_run_at_the_same_time(tokenizer: Tokenizer) -> None:
    calls = [*(tokenizer.encode(CALL) * TOGETHER.parties), eos(tokenizer)]
    sample = asyncio.run(write(Answers(calls, [5, eos(tokenizer)]), tokenizer, tool="meet", limit=9000, context=9999))
    assert sample.response.count("met") == TOGETHER.parties
