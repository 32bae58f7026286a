"""The workload of the benchmarks, and the bytes that their limits are made of."""

import torch

from benchmarks.recipe import Workload, mini_sglang, recipe, spec_of


def bytes_read(workload, spec, itemsize, *, shared):
    """Step by step: all answers are written at once, each step reads the weights and what every live answer sees."""
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * itemsize
    total, step = 0, 0
    while True:
        step += 1
        live = [
            (group, length)
            for group, lengths in enumerate(workload.answer_lengths)
            for length in lengths
            if step <= length
        ]
        if not live:
            return total
        total += spec.num_parameters * itemsize + token_bytes * step * len(live)
        prompts = {group for group, _ in live} if shared else [group for group, _ in live]
        total += token_bytes * sum(workload.prompt_lengths[group] for group in prompts)


def test_bytes_of_decoding_equal_those_counted_step_by_step():
    workload = Workload("small", [5, 9], [[3, 4, 1], [2]])
    spec = spec_of("tiny")
    found = workload.decode_bytes(spec, torch.bfloat16)
    assert found["prompts_per_group"] == bytes_read(workload, spec, 2, shared=True)
    assert found["prompts_per_answer"] == bytes_read(workload, spec, 2, shared=False)


def test_recipe_has_the_tokens_its_issue_names():
    workload = recipe()
    assert workload.num_answer_tokens == 189_487
    assert sum(workload.sequence_lengths()) == 215_303
    assert len(workload.requests(0)) == 256


def test_requests_of_a_group_share_their_prompt_and_no_repetition_repeats_one():
    workload = recipe(answers_per_prompt=16, share=0.01)
    requests, later = workload.requests(0), workload.requests(1)
    assert len(requests) == 32 * 16
    assert requests[0].prompt_ids == requests[15].prompt_ids != requests[16].prompt_ids
    assert not {tuple(request.prompt_ids) for request in requests} & {tuple(request.prompt_ids) for request in later}
    assert len({request.noise_key for request in requests + later}) == 2 * 32 * 16


def test_mini_sglang_shares_nothing_and_stays_in_its_bounds():
    workload = mini_sglang()
    lengths = workload.prompt_lengths + [length for lengths in workload.answer_lengths for length in lengths]
    assert len(workload.requests(0)) == 256
    assert min(lengths) >= 100 and max(lengths) <= 1024
    found = workload.decode_bytes(spec_of("tiny"), torch.bfloat16)
    assert found["prompts_per_group"] == found["prompts_per_answer"]
