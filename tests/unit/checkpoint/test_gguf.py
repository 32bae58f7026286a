from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles.checkpoint import gguf
from miles.checkpoint.gguf import convert_gguf
from miles.errors import CheckpointError, StorageError
from miles.model.load import load_model
from tests.unit.checkpoint.reference_bpe import ReferenceBpe
from tests.unit.checkpoint.tiny_gguf import MERGES, SPECIAL, TOKENS, tiny_llama, write_gguf

TEXTS = ["ab abc  abc 12 123  a 1", " 1 12", "Ωab\n\n12ab½x", "it's 9'll  \t", "", "１２ 12"]


@pytest.fixture
def gguf_file(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_llama(tied=True))
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_config_come_back_as_they_were(tied, tmp_path):
    original = tiny_llama(tied=tied)
    write_gguf(tmp_path / "tiny.gguf", original)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.float32
    weights = loaded.state_dict()
    assert weights.keys() == original.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in original.state_dict().items())
    ids = torch.arange(20).unsqueeze(0)
    assert torch.equal(loaded(ids).logits, original(ids).logits)
    assert loaded.generation_config.eos_token_id == 2
    spec = load_model(tmp_path / "model", dtype=torch.float32, device="cpu").spec
    assert (spec.tied_head, spec.norm_eps, spec.rope_theta, spec.eos_token_ids) == (tied, 1e-5, 1000.0, (2,))


@pytest.mark.parametrize(("pre", "split_numbers"), [("smollm", True), ("gpt-2", False)])
def test_the_pre_tokenizer_is_the_one_that_the_file_names(pre, split_numbers, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tied=True), pre=pre)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    reference = ReferenceBpe({token: id for id, token in enumerate(TOKENS)}, MERGES, split_numbers=split_numbers)
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == reference.encode(text), text
        assert tokenizer.decode(reference.encode(text)) == text
    assert (TOKENS.index("123") in tokenizer("123")["input_ids"]) is not split_numbers


def test_special_tokens_and_chat_template_are_kept(gguf_file, tmp_path):
    convert_gguf(gguf_file, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert rendered == "<|im_start|>ab<|im_end|>"
    assert tokenizer(rendered)["input_ids"] == [1, TOKENS.index("ab"), 2]
    assert tokenizer.decode([1, TOKENS.index("ab"), 2], skip_special_tokens=True) == "ab"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[2])
    assert len(tokenizer) == len(TOKENS)


def test_quantised_tensors_are_read(tmp_path):
    original = tiny_llama(tied=True)
    names = {
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "token_embd.weight": "model.embed_tokens.weight",
    }
    write_gguf(tmp_path / "tiny.gguf", original, eight_bit=tuple(names))
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name in names.values():
        exact = original.state_dict()[name]
        # 8 bits in blocks of a row, here of 32 numbers: half a step (largest / 127), and float16 for the scale
        step = exact.abs().amax(-1, keepdim=True) / 127
        assert not torch.equal(weights[name], exact)
        assert ((weights[name] - exact).abs() <= 0.6 * step).all()


def test_unknown_names_are_refused_and_leave_nothing(tmp_path):
    model = tiny_llama(tied=True)
    cases = {
        "how the pre-tokenizer 'mystery' splits": {"pre": "mystery"},
        "GGUF architecture 'mamba'": {"architecture": "mamba"},
        "'rope_freqs.weight' has no place": {"extra": {"rope_freqs.weight": np.ones(4, np.float32)}},
    }
    for number, (message, options) in enumerate(cases.items()):
        write_gguf(tmp_path / f"{number}.gguf", model, **options)
        with pytest.raises(CheckpointError, match=message):
            convert_gguf(tmp_path / f"{number}.gguf", tmp_path / "model")
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".gguf"]


def test_a_damaged_or_missing_file_is_named(gguf_file, tmp_path):
    content = gguf_file.read_bytes()
    for kept in (0, 3, 200, len(content) // 2, len(content) - 100):
        gguf_file.write_bytes(content[:kept])
        with pytest.raises(CheckpointError, match=r"tiny\.gguf is not a complete GGUF file"):
            convert_gguf(gguf_file, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"missing\.gguf does not exist"):
        convert_gguf(tmp_path / "missing.gguf", tmp_path / "model")
    assert list(tmp_path.iterdir()) == [gguf_file]


def test_a_folder_in_use_is_not_touched_and_an_empty_one_is_filled(gguf_file, tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        convert_gguf(gguf_file, target)
    (target / "notes.txt").unlink()
    convert_gguf(gguf_file, target)
    assert (target / "model.safetensors").is_file()


def test_a_write_that_fails_leaves_nothing(gguf_file, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf, "save_file", full)
    with pytest.raises(StorageError, match="No space left"):
        convert_gguf(gguf_file, tmp_path / "model")
    assert list(tmp_path.iterdir()) == [gguf_file]


def test_smollm2_gives_the_ids_of_the_original_on_gsm8k(smollm2_dir, data_dir):
    content = json.loads((smollm2_dir / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    merges = [(left, right) for left, right in content["merges"]]
    reference = ReferenceBpe(content["vocab"], merges, split_numbers=True)
    without_digits = ReferenceBpe(content["vocab"], merges, split_numbers=False)
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(smollm2_dir)
    with (data_dir / "gsm8k" / "test.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 1319
    num_digit_splits_matter = 0
    for row in rows:
        text = f"{row['question']}\n{row['answer']}"
        ids = tokenizer.encode(text).ids
        assert ids == reference.encode(text)
        assert tokenizer.decode(ids) == text
        assert loaded(text)["input_ids"] == ids
        num_digit_splits_matter += ids != without_digits.encode(text)
    assert num_digit_splits_matter > 0  # else this test could not tell the two pre-tokenizers apart
    assert len(tokenizer.get_added_tokens_decoder()) == 17
    assert loaded.chat_template.count("You are a helpful AI assistant named SmolLM") == 1
