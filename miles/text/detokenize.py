"""From token ids to text while an answer is written, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from miles.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of one answer, and whether a stop string is complete in it.

    Without stop strings `append` only collects ids and `text` decodes them once. With stop strings every token is
    decoded together with the few before it, since a character or a stop string can span tokens. A stop string that
    is the name of a special token is matched by its id: special tokens may be left out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        special_ids = {text: tokenizer.special_token_id(text) for text in stop}
        self._stop_ids = frozenset(token_id for token_id in special_ids.values() if token_id is not None)
        self._stop_strings = tuple(text for text in stop if special_ids[text] is None)
        self._longest_stop = max(map(len, self._stop_strings), default=0)
        self._ids: list[int] = []
        self._decoded = ""  # text of the ids before `_read`, final
        # Ids from `_window` on are decoded with and without the newest ones, and the difference is the new text: some
        # decoders treat the first token of a text in a special way.
        self._window = 0
        self._read = 0
        self._cut: str | None = None

    def append(self, token_ids: Sequence[int]) -> bool:
        """Take the next ids. True once a stop string is complete; ids after that point are ignored."""
        if self._cut is not None:
            return True
        if not self._stop_strings and not self._stop_ids:
            self._ids.extend(token_ids)
            return False
        return any(self._append_one(token_id) for token_id in token_ids)

    @property
    def text(self) -> str:
        """The answer so far, cut before the stop string. Bytes that do not end in a whole character show as U+FFFD."""
        return self._decode(self._ids) if self._cut is None else self._cut

    @property
    def num_tokens(self) -> int:
        """Ids taken, up to and including the one that completed a stop string."""
        return len(self._ids)

    def _append_one(self, token_id: int) -> bool:
        if token_id in self._stop_ids:
            self._cut = self._decode(self._ids)
            self._ids.append(token_id)
            return True
        self._ids.append(token_id)
        if not self._stop_strings:
            return False
        before = self._decode(self._ids[self._window : self._read])
        after = self._decode(self._ids[self._window :])
        new_text = after[len(before) :]
        search_from = max(0, len(self._decoded) - self._longest_stop + 1)
        tail = self._decoded[search_from:] + new_text
        found = [position for position in map(tail.find, self._stop_strings) if position >= 0]
        if found:
            self._cut = self._decoded[:search_from] + tail[: min(found)]
            return True
        if new_text and not new_text.endswith(REPLACEMENT):  # else the next token may complete the character
            self._decoded += new_text
            self._window, self._read = self._read, len(self._ids)
        return False

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
