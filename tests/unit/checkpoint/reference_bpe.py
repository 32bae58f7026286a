"""A slow byte-level BPE tokenizer, written from the published description (Sennrich et al. 2016, Radford et al. 2019):
the independent check of what the converter makes."""

from __future__ import annotations

from functools import cache

import regex

_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_NUMBER = regex.compile(r"\p{N}")


@cache
def byte_letters() -> dict[int, str]:
    """Printable bytes stand for themselves; the others, in order, for the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def pieces(text: str, *, split_numbers: bool) -> list[str]:
    """What BPE works on, one piece at a time."""
    if not split_numbers:
        return _WORDS.findall(text)
    parts, start = [], 0
    for match in _NUMBER.finditer(text):
        parts += [*_WORDS.findall(text[start : match.start()]), match.group()]
        start = match.end()
    return parts + _WORDS.findall(text[start:])


def merge(piece: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Join the pair with the lowest rank, again and again."""
    symbols = [byte_letters()[byte] for byte in piece.encode("utf-8")]
    while len(symbols) > 1:
        pairs = list(zip(symbols, symbols[1:], strict=False))
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        joined, i = [], 0
        while i < len(symbols):
            if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == best:
                joined.append(symbols[i] + symbols[i + 1])
                i += 2
            else:
                joined.append(symbols[i])
                i += 1
        symbols = joined
    return symbols


class ReferenceBpe:
    def __init__(self, vocab: dict[str, int], merges: list[tuple[str, str]], *, split_numbers: bool) -> None:
        ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.split_numbers = split_numbers
        self.ids_of_piece = cache(lambda piece: [vocab[symbol] for symbol in merge(piece, ranks)])

    def encode(self, text: str) -> list[int]:
        """Ids of a text without special tokens."""
        return [id for piece in pieces(text, split_numbers=self.split_numbers) for id in self.ids_of_piece(piece)]
