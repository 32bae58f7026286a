"""`docs/algorithms.md` explains every flag of the algorithm, and every name that such a flag may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles.config.fields import SATISFIED
from miles.config.flags import FLAGS

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
SECTIONS = ("algorithm", "critic", "checks")


@pytest.mark.parametrize("name", [name for name, flag in FLAGS.items() if flag.section in SECTIONS])
def test_the_page_names_every_flag_and_choice(name: str) -> None:
    flag = FLAGS[name]
    if flag.effect == SATISFIED:
        return
    assert flag.spelling in PAGE
    for choice in flag.choices:
        assert f"`{choice}`" in PAGE or f" {choice}`" in PAGE or choice == "policy_loss", choice
