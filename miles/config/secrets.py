"""Keys and passwords: refused in settings, which `config.yaml` keeps, and hidden in everything that is logged."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

SECRET_NAME = re.compile(
    r"(^|[-_])(token|secret|password|passwd|credentials?|(api|access|secret|wandb)[-_]?key)$", re.IGNORECASE
)
HIDDEN = "***"

_MIN_LENGTH = 8  # of a value in the environment: shorter ones are found in ordinary text
_KEY = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{16})")
_USER_INFO = re.compile(r"(?<=://)[^/\s:@]*:(?!\$)[^/\s@]+(?=@)")


class Secrets:
    """What to hide: known forms of keys, passwords in URLs, and the values of variables with telling names."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        values = {value for name, value in variables.items() if SECRET_NAME.search(name) and len(value) >= _MIN_LENGTH}
        parts = [re.escape(value) for value in sorted(values, key=len, reverse=True)]
        self._pattern = re.compile("|".join([*parts, _KEY.pattern, _USER_INFO.pattern]))

    def hide(self, text: str) -> str:
        return self._pattern.sub(HIDDEN, text)

    def are_in(self, text: str) -> bool:
        return self._pattern.search(text) is not None
