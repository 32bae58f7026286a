from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.data.source import MixedSource, PromptSource
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


def measured(source: PromptSource | MixedSource, rate_of: dict[int, float], count: int) -> list[int]:
    """Labels of the next groups, each of which is then measured."""
    groups = source.next(count)
    source.note((group[0], rate_of[group[0].label]) for group in groups)
    return [group[0].label for group in groups]


def make_curriculum(rates: dict[int, float] | None = None) -> PromptSource:
    given = [{"pass_rate": (rates or {}).get(i)} for i in range(5)]
    prompts = [Sample(prompt=f"p{i}", tokens=[i], label=i, metadata=given[i]) for i in range(5)]
    return PromptSource(prompts, n_samples_per_prompt=2, seed=7, shuffle=True, pass_rates=(0.1, 0.9))


def test_prompts_that_are_too_easy_or_too_hard_sit_out_one_epoch_and_are_measured_again() -> None:
    source, rates = make_curriculum(), {0: 0.0, 1: 0.5, 2: 1.0, 3: 0.1, 4: 0.9}
    assert sorted(measured(source, rates, 5)) == [0, 1, 2, 3, 4]
    assert sorted(measured(source, rates, 3)) == [1, 3, 4]
    rates[0] = 0.5  # it has been learned meanwhile
    assert sorted(measured(source, rates, 5)) == [0, 1, 2, 3, 4]
    assert sorted(measured(source, rates, 4)) == [0, 1, 3, 4]


def test_pass_rates_of_the_file_count_before_the_first_answers() -> None:
    assert sorted(measured(make_curriculum({0: 1.0, 1: 0.0, 2: 0.4}), dict.fromkeys(range(5), 0.5), 3)) == [2, 3, 4]


def test_a_curriculum_that_would_leave_nothing_leaves_everything() -> None:
    source, rates = make_curriculum(), dict.fromkeys(range(5), 1.0)
    assert sorted(measured(source, rates, 5)) == sorted(measured(source, rates, 5)) == [0, 1, 2, 3, 4]


@given(interrupt=st.integers(0, 11), seed=st.integers(0, 5))
def test_an_interrupted_curriculum_goes_on_as_it_would_have(interrupt: int, seed: int) -> None:
    rates = {label: (label * 7 + seed) % 5 / 4 for label in range(5)}
    whole = make_curriculum()
    expected = [measured(whole, rates, 2) for _ in range(12)]
    source, seen = make_curriculum(), []
    for step in range(12):
        if step == interrupt:
            state = json.loads(json.dumps(source.state_dict()))
            source = make_curriculum()
            source.load_state_dict(state)
        seen.append(measured(source, rates, 2))
    assert seen == expected


@given(weights=st.lists(st.floats(0.05, 5), min_size=2, max_size=4), interrupt=st.integers(0, 60))
def test_a_mix_keeps_its_shares_in_every_stretch_and_can_be_resumed(weights: list[float], interrupt: int) -> None:
    def make() -> MixedSource:
        return MixedSource([make_source(3 + n, seed=n) for n in range(len(weights))], weights)

    source, taken = make(), []
    for step in range(60):
        if step == interrupt:
            state = json.loads(json.dumps(source.state_dict()))
            source = make()
            source.load_state_dict(state)
        (group,) = source.next(1)
        taken.append(group[0].metadata["prompt_set"])
        assert group[0].group_index == step and [s.index for s in group] == [2 * step, 2 * step + 1]
        for number, weight in enumerate(weights):
            assert abs(taken.count(number) - weight / sum(weights) * len(taken)) <= len(weights)
    assert source.next(4) == make().next(64)[60:]


def test_a_mix_of_other_shares_does_not_go_on() -> None:
    state = MixedSource([make_source(), make_source(seed=1)], [1, 2]).state_dict()
    with pytest.raises(CheckpointError, match="--mix-prompt-data"):
        MixedSource([make_source(), make_source(seed=1)], [1, 3]).load_state_dict(state)
