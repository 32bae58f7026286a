from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from miles.config.sections import DataConfig
from miles.data.prompts import PromptSet, load_prompts
from miles.errors import DataError
from miles.text.tokenizer import Tokenizer


def load(
    tmp_path: Path, tokenizer: Tokenizer, rows: list[Any], *, limits: dict[str, Any] | None = None, **data: Any
) -> PromptSet:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = {"max_context_len": 1000, **(limits or {})}
    return load_prompts(DataConfig(prompt_data=str(file), **data), tokenizer, **limits)


def test_a_text_is_used_as_it_is_without_the_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (sample,) = load(tmp_path, tokenizer, [{"input": " 40 + 2 ", "a": 42}], label_key="a").prompts
    assert (sample.prompt, sample.label) == (" 40 + 2 ", 42)
    assert sample.tokens == tokenizer.encode(" 40 + 2 ")


def test_a_text_becomes_one_user_message_and_a_list_is_rendered(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "40 + 2"}]
    rows = [{"q": "40 + 2"}, {"q": messages}]
    loaded = load(
        tmp_path, tokenizer, rows, input_key="q", apply_chat_template=True, apply_chat_template_kwargs={"thinking": 1}
    )
    turn = "<|im_start|>user\n40 + 2<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert [s.prompt for s in loaded.prompts] == [turn, "<|im_start|>system\nbe short<|im_end|>\n" + turn]
    assert loaded.prompts[0].tokens[0] == 1  # the id of <|im_start|>, not its letters


def test_tools_and_metadata_come_from_their_columns(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [{"input": "a", "tools": tools, "metadata": {"level": 3}}, {"input": "a", "tools": json.dumps(tools)}]
    first, second = load(tmp_path, tokenizer, rows, tool_key="tools", apply_chat_template=True).prompts
    assert '"name": "add"' in first.prompt and first.prompt == second.prompt
    assert (first.metadata, second.metadata) == ({"level": 3}, {})


def test_parquet_rows_equal_jsonl_rows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"input": [{"role": "user", "content": "hi"}], "label": "1", "metadata": {"a": 1}}] * 2
    jsonl = load(tmp_path, tokenizer, rows, label_key="label", apply_chat_template=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    data = DataConfig(prompt_data=f"{tmp_path}/p.parquet@[-1:]", label_key="label", apply_chat_template=True)
    assert load_prompts(data, tokenizer, max_context_len=1000).prompts == jsonl.prompts[-1:]


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        ({"imput": "a", "label": 1}, {}, "has no column 'input' (--input-key); did you mean --input-key imput?"),
        ({"input": "a"}, {"label_key": "answer"}, "has no column 'answer' (--label-key); it has: input"),
        ({"input": "a", "answer": None}, {"label_key": "answer"}, "its label 'answer' is null"),
        ({"input": "  "}, {}, "its prompt 'input' is empty"),
        ({"input": []}, {}, "is an empty list"),
        ({"input": 5}, {}, "is a int; expected a text or a list of messages"),
        ({"input": [{"role": "user"}]}, {"apply_chat_template": True}, "message 1 of its prompt 'input' has no role"),
        ({"input": [{"role": "user", "content": "a"}]}, {}, "needs --apply-chat-template"),
        ({"input": "a", "metadata": {"num_turns": 3}}, {}, "has num_turns, where a run keeps what it measures"),
        ({"input": "a", "metadata": "x"}, {}, "'metadata' (--metadata-key) is a str; expected a mapping"),
        ({"input": "a"}, {"metadata_key": "extra"}, "has no column 'extra' (--metadata-key)"),
        ({"input": "a", "tools": "{"}, {"tool_key": "tools"}, "'tools' (--tool-key) is not JSON"),
        ({"input": "\ud800"}, {}, "half of a surrogate pair"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(
    tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], settings: dict[str, Any], expected: str
) -> None:
    good = {"input": "a", "answer": 1, "extra": {}, "tools": None}
    with pytest.raises(DataError) as caught:
        load(tmp_path, tokenizer, [good, good, row], **settings)
    assert "--prompt-data: 1 of 3 rows cannot be used" in str(caught.value)
    assert f"{tmp_path}/prompts.jsonl row 3: " in str(caught.value)
    assert expected in str(caught.value)


def test_field_note_43_a_label_that_cannot_be_graded_stops_at_load(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"input": "a", "label": "7"}, {"input": "a", "label": "seven"}]
    with pytest.raises(DataError, match=r"prompts\.jsonl row 2: its label 'seven' cannot be read: no number"):
        load(
            tmp_path,
            tokenizer,
            rows,
            label_key="label",
            limits={"check_label": lambda label, metadata: None if label.isdigit() else "no number"},
        )


def test_long_prompts_are_left_out_counted_and_reported(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input": "a"}, {"input": "a b c d e f g h"}, {"input": "b"}]
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path, tokenizer, rows, limits={"max_prompt_len": 3})
    assert [s.prompt for s in loaded.prompts] == ["a", "b"]
    assert loaded.num_too_long == 1
    assert "1 of 3 prompts have more than 3 tokens (--rollout-max-prompt-len) and are left out" in caplog.text
    with pytest.raises(DataError, match="all 1 prompts have more than 3 tokens"):
        load(tmp_path, tokenizer, rows[1:2], limits={"max_prompt_len": 3})


def test_a_prompt_that_fills_the_context_is_an_error_with_the_way_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    num_tokens = len(tokenizer.encode("a b c"))
    rows = [{"input": "a"}, {"input": "a b c"}]
    assert len(load(tmp_path, tokenizer, rows, limits={"max_context_len": num_tokens + 1}).prompts) == 2
    with pytest.raises(DataError) as caught:
        load(tmp_path, tokenizer, rows, limits={"max_context_len": num_tokens})
    assert f"row 2: its prompt has {num_tokens} tokens; the context holds {num_tokens}" in str(caught.value)
    assert "--rollout-max-prompt-len" in str(caught.value)
