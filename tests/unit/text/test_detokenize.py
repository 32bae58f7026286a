from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.text.detokenize import Detokenizer
from miles.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_dir)


def feed(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...]) -> Detokenizer:
    detokenizer = Detokenizer(tokenizer, stop)
    for token_id in ids:
        if detokenizer.append([token_id]):
            break
    return detokenizer


def test_without_stop_strings_the_text_is_the_decoded_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("été 日本語 🙂<|im_end|>")
    assert feed(tokenizer, ids, ()).text == "été 日本語 🙂"
    kept = Detokenizer(tokenizer, skip_special_tokens=False)
    assert kept.append(ids) is False
    assert kept.text == "été 日本語 🙂<|im_end|>"


def test_a_stop_string_over_several_tokens_is_found_and_cut(tokenizer: Tokenizer) -> None:
    single_bytes = [tokenizer.encode(character)[0] for character in "is 42 sto"]
    detokenizer = Detokenizer(tokenizer, ("stop",))
    assert detokenizer.append(single_bytes) is False
    assert detokenizer.append(tokenizer.encode("p here")) is True
    assert detokenizer.text == "is 42 "
    assert detokenizer.append(tokenizer.encode("more")) is True
    assert detokenizer.text == "is 42 "


def test_a_stop_string_inside_a_token_keeps_the_text_before_it(tokenizer: Tokenizer) -> None:
    token = tokenizer.encode(" answer")
    assert len(token) == 1
    assert feed(tokenizer, token, ("swe",)).text == " an"


def test_the_earliest_of_two_stop_strings_cuts(tokenizer: Tokenizer) -> None:
    assert feed(tokenizer, tokenizer.encode("answer"), ("er", "ns")).text == "a"


def test_a_special_token_as_stop_string_is_matched_by_its_id(tokenizer: Tokenizer) -> None:
    detokenizer = feed(tokenizer, tokenizer.encode("the sum<|im_start|>user"), ("<|im_start|>",))
    assert detokenizer.text == "the sum"
    assert detokenizer.num_tokens == len(tokenizer.encode("the sum")) + 1


@given(ids=st.lists(st.integers(0, 330), max_size=60))
def test_incremental_text_equals_decoding_at_once_even_for_broken_utf8(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert feed(tokenizer, ids, ("never written \x00",)).text == tokenizer.decode(ids)


def byte_ids(tokenizer_dir: Path) -> dict[int, int]:
    """Byte to token id. Byte-level BPE names printable bytes by themselves and the others from U+0100 on."""
    vocabulary = json.loads((tokenizer_dir / "tokenizer.json").read_text())["model"]["vocab"]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}
    return {byte: vocabulary[name] for byte, name in names.items()}


@given(text=st.text("ab é日🙂", max_size=40), stop=st.text("ab é日🙂", min_size=1, max_size=4))
def test_the_cut_is_where_a_plain_search_finds_it(
    tokenizer: Tokenizer, tokenizer_dir: Path, text: str, stop: str
) -> None:
    ids = byte_ids(tokenizer_dir)
    detokenizer = feed(tokenizer, [ids[byte] for byte in text.encode()], (stop,))
    assert detokenizer.text == text.partition(stop)[0]
    consumed = text.encode()[: detokenizer.num_tokens].decode()
    assert consumed == (text[: text.find(stop) + len(stop)] if stop in text else text)
