from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.data.source import PromptSource
from miles.errors import CheckpointError
from miles.types import Sample


def make_source(num_prompts: int = 5, *, seed: int = 7, shuffle: bool = True, size: int = 2) -> PromptSource:
    prompts = [Sample(prompt=f"p{i}", tokens=[i], label=i, metadata={"seen": []}) for i in range(num_prompts)]
    return PromptSource(prompts, n_samples_per_prompt=size, seed=seed, shuffle=shuffle)


def test_without_shuffling_rows_come_in_file_order_and_wrap() -> None:
    groups = make_source(3, shuffle=False).next(7)
    assert [group[0].prompt for group in groups] == ["p0", "p1", "p2", "p0", "p1", "p2", "p0"]
    assert [group[0].group_index for group in groups] == list(range(7))
    assert [sample.index for group in groups for sample in group] == list(range(14))


def test_each_epoch_is_another_permutation_that_the_seed_decides() -> None:
    prompts = [group[0].prompt for group in make_source(8).next(24)]
    epochs = [prompts[start : start + 8] for start in (0, 8, 16)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert prompts == [group[0].prompt for group in make_source(8).next(24)]
    assert prompts != [group[0].prompt for group in make_source(8, seed=8).next(24)]


@given(
    num_prompts=st.integers(1, 9),
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    interrupt=st.integers(0, 6),
    shuffle=st.booleans(),
)
def test_field_note_29_an_interrupted_run_sees_the_same_prompts(
    num_prompts: int, counts: list[int], interrupt: int, shuffle: bool
) -> None:
    whole = make_source(num_prompts, shuffle=shuffle)
    expected = [group for count in counts for group in whole.next(count)]
    source = make_source(num_prompts, shuffle=shuffle)
    seen = []
    for step, count in enumerate(counts):
        if step == interrupt:
            state = json.loads(json.dumps(source.state_dict()))
            source = make_source(num_prompts, shuffle=shuffle)
            source.load_state_dict(state)
        seen += source.next(count)
    assert seen == expected
    assert source.epoch == sum(counts) // num_prompts
    for start in range(0, len(seen) - num_prompts + 1, num_prompts):  # no prompt skipped or repeated
        assert {group[0].label for group in seen[start : start + num_prompts]} == set(range(num_prompts))


def test_changing_a_sample_changes_no_other() -> None:
    source = make_source(1)
    first = source.next(1)[0]
    before = copy.deepcopy(first[1])
    first[0].tokens.append(99)
    first[0].metadata["seen"].append("x")
    assert first[1] == before
    again = source.next(1)[0][0]
    assert (again.tokens, again.metadata) == ([0], {"seen": []})


@pytest.mark.parametrize(
    ("other", "changed"),
    [
        ({"num_prompts": 6}, "num_prompts, prompts_digest"),
        ({"seed": 8}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"size": 3}, "n_samples_per_prompt"),
    ],
)
def test_a_position_in_other_data_is_refused(other: dict[str, object], changed: str) -> None:
    with pytest.raises(CheckpointError, match=rf"\({changed} changed\)"):
        make_source(**other).load_state_dict(make_source().state_dict())
