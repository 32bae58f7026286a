from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from miles.errors import CheckpointError, ConfigError, DataError
from miles.text.tokenizer import load_tokenizer

MESSAGES = [{"role": "system", "content": "été"}, {"role": "user", "content": "What is 40 + 2? 日本 🙂"}]
TEXTS = [
    "",
    "the answer is 42",
    "  two  spaces\n\ttab",
    "日本語 🙂🙃 é\u0301",
    "<|im_start|>user\nhi<|im_end|>",
    "x" * 300,
]


def test_ids_and_chat_rendering_equal_autotokenizer(tokenizer_dir: Path) -> None:
    ours, theirs = load_tokenizer(tokenizer_dir), AutoTokenizer.from_pretrained(str(tokenizer_dir))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]
    assert ours.encode("42", add_special_tokens=True) == theirs.encode("42")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    for kwargs in ({}, {"thinking": True}, {"tools": tools}, {"add_generation_prompt": False}):
        expected = {"add_generation_prompt": True, **kwargs}
        assert ours.render(MESSAGES, **kwargs) == theirs.apply_chat_template(MESSAGES, tokenize=False, **expected)


def test_end_ids_are_the_union_of_generation_config_and_tokenizer(tokenizer_dir: Path) -> None:
    assert load_tokenizer(tokenizer_dir).eos_token_ids == {0, 2}


def test_special_tokens_are_known_by_name(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    assert tokenizer.special_token_id("<|im_start|>") == 1
    assert tokenizer.special_token_id("a") is None
    assert tokenizer.special_token_id("never seen") is None


def test_a_template_file_replaces_the_one_of_the_folder(tokenizer_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert load_tokenizer(tokenizer_dir, chat_template_path=str(template)).render(MESSAGES[:1]) == "[été]"
    with pytest.raises(ConfigError, match=r"--chat-template-path .*absent\.jinja"):
        load_tokenizer(tokenizer_dir, chat_template_path=str(tmp_path / "absent.jinja"))


def test_a_template_that_refuses_messages_is_a_data_error(tokenizer_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text("{{ raise_exception('only one turn') }}")
    with pytest.raises(DataError, match="only one turn"):
        load_tokenizer(tokenizer_dir, chat_template_path=str(template)).render(MESSAGES)


def test_missing_and_damaged_files_are_named(tokenizer_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text((tokenizer_dir / "tokenizer.json").read_text()[:200])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.* cannot be read"):
        load_tokenizer(tmp_path)


def test_no_template_is_a_config_error_that_names_the_flag(tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((tokenizer_dir / "tokenizer.json").read_text())
    with pytest.raises(ConfigError, match="--chat-template-path"):
        load_tokenizer(tmp_path).render(MESSAGES)


def test_a_tokenizer_of_another_model_is_refused(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.check_vocabulary(tokenizer.vocab_size, model="m")  # a padded vocabulary is fine too
    tokenizer.check_vocabulary(tokenizer.vocab_size + 64, model="m")
    with pytest.raises(CheckpointError, match="do not belong together"):
        tokenizer.check_vocabulary(tokenizer.vocab_size - 1, model="m")


def test_loading_and_rendering_do_not_import_torch(tokenizer_dir: Path) -> None:
    code = (
        "import sys; from miles.text.tokenizer import load_tokenizer; "
        f"load_tokenizer({str(tokenizer_dir)!r}).render([{{'role': 'user', 'content': 'hi'}}]); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
