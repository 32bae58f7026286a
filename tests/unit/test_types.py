"""Copies of a sample: nothing that a hook edits in one is seen in the other."""

from __future__ import annotations

import copy

import numpy as np

from miles.types import Sample


class Graded(Sample):
    """A sample of a user's data source, with an attribute of its own."""


def test_a_copy_shares_nothing_that_can_be_edited() -> None:
    sample = Graded(prompt=[{"role": "user"}], tokens=np.arange(3), loss_mask=[1], metadata={"a": [{"b": [1]}]})
    sample.notes, sample.metadata["self"] = ["mine"], sample
    copied = copy.deepcopy(sample)
    assert type(copied) is Graded and copied.metadata["self"] is copied and isinstance(copied.tokens, np.ndarray)
    copied.prompt[0]["role"], copied.tokens[0], copied.loss_mask[0] = "tool", 9, 0
    copied.metadata["a"][0]["b"][0] = copied.notes[0] = 2
    assert sample.prompt == [{"role": "user"}] and sample.tokens.tolist() == [0, 1, 2] and sample.loss_mask == [1]
    assert sample.metadata["a"] == [{"b": [1]}] and sample.notes == ["mine"]
