"""`gpqa`: multiple choice. 1.0 when the letter that the response settles on is the right one, else 0.0."""

from __future__ import annotations

import re
from typing import Any

from miles.rollout.rm_hub.grader import Grader, Reward
from miles.rollout.rm_hub.math_answer import after_thinking, extract_boxed
from miles.types import Sample

LETTERS = "ABCDEFGHIJ"
NUM_LETTERS = 4  # when the data does not say

_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}|[*_`$]")
_STATED = re.compile(
    r"\b(?:answer|option|choice)\b(?:\s+(?:is|was|would be|must be|letter|option|choice))*\s*[:=]?\s*"
    r"(?:option\s+|choice\s+)?(\([A-J]\)|[A-J](?![\w'\u2019]))",
    re.IGNORECASE,
)
_SAID = re.compile(r"\banswer\b\s*(?:is|was|:)\s*:?\s*(\S[^\n]*)", re.IGNORECASE)
_WHOLE = re.compile(r"(?:option\s+|choice\s+)?(?:\(([A-J])\)|([A-J]))(?:\s*[).:](?:\s+.*)?|\s*\.?)", re.IGNORECASE)
_ANOTHER = re.compile(r"\s*(?:,|/|&|\bor\b|\band\b)\s*(?:option\s+|choice\s+)?\(?[A-J](?![\w'])", re.IGNORECASE)
_DENIED = re.compile(r"\b(?:not|never|isn't|cannot be)\s*(?:option\s+|choice\s+)?\(?$", re.IGNORECASE)


class ChoiceGrader(Grader):
    """The right letter comes from `metadata["correct_letter"]`, else from the label: a letter, an index counted from
    0, or the text of one of `metadata["choices"]`. `metadata["valid_letters"]` limits the letters."""

    place = r"after the thinking part, \boxed{letter}, the last `answer is letter`, or a last line that is one letter"

    def find(self, response: str) -> str | None:
        """A letter, or the words of an answer that may be the text of a choice."""
        text = after_thinking(response)
        return None if text is None else find_letter(text) or find_words(text)

    def label_problem(self, label: Any, metadata: dict[str, Any]) -> str | None:
        choices = metadata.get("choices")
        if choices is not None and not (isinstance(choices, list) and 1 < len(choices) <= len(LETTERS)):
            return f'metadata["choices"] must be a list of 2 to {len(LETTERS)} texts'
        letters = _valid_letters(metadata)
        letter = right_letter(label, metadata)
        if letter is None:
            return f"it names none of the choices {', '.join(letters)}"
        return None if letter in letters else f"the letter {letter} is none of {', '.join(letters)}"

    async def compare(self, answer: str, sample: Sample) -> Reward:
        letter = right_letter(sample.label, sample.metadata)
        choices = sample.metadata.get("choices") or []
        if letter is None or len(answer) == 1 or LETTERS.index(letter) >= len(choices):
            return float(answer == letter)
        return float(_plain(answer) == _plain(str(choices[LETTERS.index(letter)])))

    def right_answer(self, label: Any, metadata: dict[str, Any]) -> str | None:
        return right_letter(label, metadata)

    def write(self, answer: str) -> str:
        return f"The answer is ({answer})."


def find_letter(text: str) -> str | None:
    """The letter of a final answer; None when none is stated, or when several are."""
    text = text.strip()
    if r"\boxed" in text or r"\fbox" in text:
        return _whole_letter(extract_boxed(text))
    plain = _MARKUP.sub(lambda match: match[1] or "", text)
    stated = [match for match in _STATED.finditer(plain) if not _is_article(match)]
    if stated:
        last = stated[-1]
        if _ANOTHER.match(plain, last.end()) or _DENIED.search(plain[: last.start(1)]):
            return None
        return last[1].strip("()").upper()
    return _whole_letter(plain.splitlines()[-1]) if plain else None


def find_words(text: str) -> str | None:
    """What a final answer says, where it is no letter."""
    if r"\boxed" in text or r"\fbox" in text:
        return extract_boxed(text) or None
    said = _SAID.findall(_MARKUP.sub(lambda match: match[1] or "", text))
    return said[-1] if said else None


def right_letter(label: Any, metadata: dict[str, Any]) -> str | None:
    """The letter of the right choice; None when the data does not name one."""
    named = metadata.get("correct_letter")
    if named is not None:
        return str(named).strip().upper()
    choices = [str(choice).strip() for choice in metadata.get("choices") or ()]
    text = str(label).strip()
    if text in choices and isinstance(label, str):  # the text of a choice, also where it is made of digits
        return LETTERS[choices.index(text)]
    if text.isdigit():
        index = int(text)
        return LETTERS[index] if index < (len(choices) or NUM_LETTERS) else None
    letter = text.strip("().").upper()
    return letter if len(letter) == 1 and letter in LETTERS else None


def _valid_letters(metadata: dict[str, Any]) -> list[str]:
    named = metadata.get("valid_letters")
    if named:
        return [str(letter).upper() for letter in named]
    return list(LETTERS[: len(metadata.get("choices") or ()) or NUM_LETTERS])


def _whole_letter(text: str) -> str | None:
    text = _MARKUP.sub(lambda match: match[1] or "", text).strip()
    match = _WHOLE.fullmatch(text)
    if match is None:
        return None
    letter = match[1] or match[2]
    rest = text[match.end(1) if match[1] else match.end(2) :]
    several = _ANOTHER.match(rest.lstrip(").:")) is not None
    return None if several else letter.upper()


def _plain(text: str) -> str:
    return " ".join(text.lower().strip(" .").split())


def _is_article(match: re.Match[str]) -> bool:
    """`the answer is a proton`, `the answer is I think`: no brackets, and a word follows."""
    return match[1] in ("a", "i", "I") and re.match(r"\s+[a-z]", match.string[match.end() :]) is not None
