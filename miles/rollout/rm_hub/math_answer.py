"""Where the answer of a response, or of a label, is written."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\(?:boxed|fbox)(?![a-zA-Z])")
MAX_ANSWER_CHARS = 512  # real answers are shorter; reading longer ones only costs time


def after_thinking(response: str) -> str | None:
    """The text after the last `</think>`; None when the response ended while it was thinking."""
    text = response.rpartition("</think>")[2]
    return None if "<think>" in text else text.strip()


def extract_answer(response: str) -> str | None:
    """The final answer of a response: after the thinking part, the content of the last box, else the line after the
    last `####`. None when there is none, or when the last box is empty or never closed."""
    return _find(after_thinking(response) or "")


def extract_boxed(response: str) -> str:
    """Content of the last box after the thinking part; empty when there is none."""
    text = after_thinking(response) or ""
    boxes = list(_BOX.finditer(text))
    return (_box_content(text, boxes[-1].end()) or "") if boxes else ""


def extract_label(label: str) -> str | None:
    """The answer in a label: of a worked solution with a box or `####`, else the label as it is. None when its box is
    empty or never closed."""
    return _find(label) if _BOX.search(label) or "####" in label else label.strip()


def _find(text: str) -> str | None:
    boxes = list(_BOX.finditer(text))
    if boxes:
        answer = _box_content(text, boxes[-1].end())
    elif "####" in text:
        lines = text.rpartition("####")[2].strip().splitlines()
        answer = lines[0].strip() if lines else None
    else:
        return None
    return answer if answer and len(answer) <= MAX_ANSWER_CHARS else None


def _box_content(text: str, start: int) -> str | None:
    """Text between the brace at `start` and the one that closes it."""
    if start >= len(text) or text[start] != "{":
        return None
    depth = 0
    for position in range(start, len(text)):
        character = text[position]
        if character in "{}" and text[position - 1] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[start + 1 : position].strip()
    return None
