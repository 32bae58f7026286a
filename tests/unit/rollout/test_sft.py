from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from miles.config.sections import DataConfig
from miles.data.prompts import PromptSet
from miles.data.source import PromptSource
from miles.errors import DataError
from miles.rollout.sft import SftProducer, load_sft_rows
from miles.rollout.to_train import to_train_samples
from miles.text.tokenizer import Tokenizer, load_tokenizer
from miles.types import Sample

TURNS = [
    {"role": "user", "content": "40 + 2"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "the sum of 40 and 40"},
    {"role": "assistant", "content": "the answer is 80"},
]


def load(
    tmp_path: Path, tokenizer: Tokenizer, rows: list[Any], *, max_context_len: int = 500, **data: Any
) -> PromptSet:
    file = tmp_path / "sft.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_sft_rows(DataConfig(prompt_data=str(file), **data), tokenizer, max_context_len=max_context_len)


def learned_text(sample: Sample, tokenizer: Tokenizer) -> str:
    response = sample.tokens[sample.prompt_length :]
    assert sample.loss_mask is not None and len(response) == len(sample.loss_mask) == sample.response_length
    kept = [token_id for token_id, mask in zip(response, sample.loss_mask, strict=True) if mask]
    return tokenizer.decode(kept, skip_special_tokens=False)


def test_every_assistant_turn_is_learned_up_to_its_end_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (sample,) = load(tmp_path, tokenizer, [{"input": TURNS}], apply_chat_template=True).prompts
    assert learned_text(sample, tokenizer) == "42<|im_end|>the answer is 80<|im_end|>"
    whole = tokenizer.render(TURNS, add_generation_prompt=False)
    assert tokenizer.decode(sample.tokens, skip_special_tokens=False) == whole.removesuffix("\n")
    assert sample.prompt == tokenizer.render(TURNS[:1])
    assert sample.tokens[: sample.prompt_length] == tokenizer.encode(tokenizer.render(TURNS[:1]))


def test_a_label_is_the_only_answer_that_is_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"input": "40 + 2", "label": 42}, {"input": TURNS[:3], "label": "80"}]
    first, second = load(tmp_path, tokenizer, rows, label_key="label", apply_chat_template=True).prompts
    assert learned_text(first, tokenizer) == "42<|im_end|>"
    assert learned_text(second, tokenizer) == "80<|im_end|>"
    assert second.prompt == tokenizer.render(TURNS[:3])


def test_without_a_template_the_end_token_is_added(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (sample,) = load(tmp_path, tokenizer, [{"input": "40 + 2 = ", "label": "42"}], label_key="label").prompts
    assert tokenizer.decode(sample.tokens, skip_special_tokens=False) == "40 + 2 = 42<|im_end|>"
    assert learned_text(sample, tokenizer) == "42<|im_end|>"
    assert sample.tokens[-1] == tokenizer.eos_token_id  # field note 22: the last end token is learned


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = tmp_path / "drops.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last else m.content | upper }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    drops = load_tokenizer(tokenizer.name_or_path, chat_template_path=str(template))
    with pytest.raises(DataError, match="row 1: the chat template changes turn 4 when later turns follow"):
        load(tmp_path, drops, [{"input": TURNS}], apply_chat_template=True)
    assert len(load(tmp_path, drops, [{"input": TURNS[:2]}], apply_chat_template=True).prompts) == 1


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        ({"input": TURNS[:1]}, {"apply_chat_template": True}, "row 1: has no assistant turn to learn"),
        ({"input": "text"}, {}, "row 1: has no answer to learn"),
        ({"input": TURNS}, {}, "row 1: has no answer to learn"),
        ({"imput": "x"}, {}, "did you mean --input-key imput?"),
        ({"input": TURNS}, {"max_context_len": 10, "apply_chat_template": True}, "all 1 rows have more than 10 tokens"),
    ],
)
def test_rows_that_cannot_be_learned_are_named(
    tmp_path: Path, tokenizer: Tokenizer, row: Any, settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(DataError) as caught:
        load(tmp_path, tokenizer, [row], **settings)
    assert expected in str(caught.value)


def test_long_rows_are_left_out_and_reported(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input": TURNS}, {"input": TURNS[:2]}]
    loaded = load(tmp_path, tokenizer, rows, max_context_len=40, apply_chat_template=True)
    assert (len(loaded.prompts), loaded.num_too_long) == (1, 1)
    assert "1 of 2 rows have more than 40 tokens and are left out" in caplog.text


def test_the_producer_hands_rows_to_the_trainer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"input": f"{i} + 2", "label": str(i + 2)} for i in range(3)]
    loaded = load(tmp_path, tokenizer, rows, label_key="label", apply_chat_template=True)
    source = PromptSource(loaded.prompts, n_samples_per_prompt=1, seed=0, shuffle=False)
    groups = asyncio.run(SftProducer(source, rollout_batch_size=2).collect(0))
    first, second = to_train_samples(groups)
    assert (first.index, second.index) == (0, 1)
    assert sum(first.loss_mask) == len(tokenizer.encode("2<|im_end|>"))
