"""The engine against the reference of `tiny.py`: same tokens, log-probs within 1e-4, whatever the batch, the chunks,
the blocks and the interruptions."""

from __future__ import annotations

import gc
import random

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.engine.core import EngineCore
from miles.errors import EngineError
from miles.model.context import packed_context
from miles.model.decoder import Decoder
from miles.ops.logprob import CUT_LOGIT
from miles.types import FinishReason, GenerationRequest, GenerationResult
from tests.unit.engine.tiny import (
    assert_all_free,
    full_logits,
    make_core,
    make_model,
    reference_answer,
    request,
    run_all,
)

MODEL = make_model()


def check(result: GenerationResult, wanted: GenerationRequest, model: Decoder = MODEL) -> None:
    tokens, log_probs, _ = reference_answer(model, wanted)
    assert result.error is None
    assert result.output_ids == tokens
    assert result.log_probs == pytest.approx(log_probs, abs=1e-4)
    stop = not wanted.sampling.ignore_eos and tokens[-1] in model.spec.eos_token_ids
    assert result.finish_reason is (FinishReason.STOP if stop else FinishReason.LENGTH)


def random_requests(rng: random.Random, num_groups: int) -> list[GenerationRequest]:
    """Groups with equal prompts, some of which begin alike."""
    trunk = [rng.randrange(2, 37) for _ in range(24)]
    requests = []
    for _ in range(num_groups):
        prompt = trunk[: rng.randrange(0, 24)] + [rng.randrange(2, 37) for _ in range(rng.randrange(1, 12))]
        for _ in range(rng.randrange(1, 5)):
            temperature = rng.choice([0.0, 0.7, 1.0, 1.0])
            cut = rng.choice([{}, {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "top_k": 9}])
            length = rng.randrange(1, 14)
            requests.append(request(len(requests), prompt, length, temperature=temperature, **cut))
    return requests


@given(
    seed=st.integers(0, 10_000),
    page_size=st.sampled_from([1, 3, 4, 16]),
    num_rows=st.integers(1, 9),
    chunk=st.integers(1, 40),
    cache_tokens=st.integers(50, 160),
    share=st.booleans(),
    overlaps=st.booleans(),
)
def test_any_batch_gives_what_each_request_gets_alone(
    seed: int, page_size: int, num_rows: int, chunk: int, cache_tokens: int, share: bool, overlaps: bool
) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, num_groups=4)
    core = make_core(
        MODEL,
        engine_page_size=page_size,
        engine_max_total_tokens=max(cache_tokens, 4 * page_size),
        engine_max_running_requests=num_rows,
        engine_chunked_prefill_size=chunk,
        engine_disable_radix_cache=not share,
        overlaps=overlaps,
    )
    late = rng.randrange(len(requests) + 1)
    core.add(requests[:late])
    results = []
    for _ in range(rng.randrange(6)):
        results += core.step()
        if rng.random() < 0.3:
            core.pause(rng.choice(["retract", "in_place"]))
    core.add(requests[late:])
    results += run_all(core).values()
    assert sorted(result.request_id for result in results) == list(range(len(requests)))
    for result in results:
        check(result, requests[result.request_id])
    assert_all_free(core)


def test_eight_answers_of_a_prompt_cost_one_prefill() -> None:
    core = make_core(MODEL)
    requests = [request(i, list(range(2, 13)), 6, ignore_eos=True) for i in range(8)]  # two blocks and three tokens
    core.add(requests)
    results = run_all(core)
    for wanted in requests:
        check(results[wanted.request_id], wanted)
    assert len({tuple(result.output_ids) for result in results.values()}) > 1
    # the last token of an answer is drawn but never computed
    assert core.stats()["computed_tokens"] == 11 + 8 * 5
    assert [results[i].cached_tokens for i in range(8)] == [0] + [11] * 7


@pytest.mark.parametrize("num_prompt", [11, 12])  # with and without a last block that is not full
def test_answers_that_start_later_compute_one_prompt_token(num_prompt: int) -> None:
    prompt = list(range(2, 2 + num_prompt))
    core = make_core(MODEL, engine_max_running_requests=1)
    requests = [request(i, prompt, 3, ignore_eos=True) for i in range(3)]
    core.add(requests)
    results = run_all(core)
    for wanted in requests:
        check(results[wanted.request_id], wanted)
    assert core.stats()["computed_tokens"] == num_prompt + 2 + 2 * (1 + 2)
    assert results[2].cached_tokens == num_prompt - 1


def test_a_longer_prompt_reuses_the_full_blocks_of_prompt_and_answer() -> None:
    core = make_core(MODEL)
    first = request(0, list(range(2, 11)), 8, ignore_eos=True)  # 17 tokens, 16 of them computed: four blocks
    core.add([first])
    turn = list(first.prompt_ids) + run_all(core)[0].output_ids + [5, 6]
    second = request(1, turn, 4)
    core.add([second])
    result = run_all(core)[1]
    check(result, second)
    assert result.cached_tokens == 16


def test_a_block_that_others_may_find_is_not_written() -> None:
    core = make_core(MODEL)
    prompt = [4, 7, 9, 11, 20, 21]  # the second block is half full, and the first answer fills it
    first, second = request(0, prompt, 6, ignore_eos=True), request(1, prompt, 6, ignore_eos=True)
    core.add([first])
    answer = run_all(core)[0].output_ids
    core.add([second])
    check(run_all(core)[1], second)  # starts from the half full block
    third = request(2, prompt + answer[:3], 6, ignore_eos=True)
    core.add([third])
    result = run_all(core)[2]
    check(result, third)
    assert result.cached_tokens == 8


def test_without_the_prefix_index_nothing_is_shared() -> None:
    core = make_core(MODEL, engine_disable_radix_cache=True)
    core.add([request(i, list(range(2, 13)), 1) for i in range(3)])
    results = run_all(core)
    assert core.stats()["computed_tokens"] == 33
    assert all(result.cached_tokens == 0 for result in results.values())


def test_requests_are_retracted_when_blocks_run_out_and_lose_nothing() -> None:
    core = make_core(MODEL, engine_max_total_tokens=64)
    requests = [request(i, [2 + i, 3, 4, 5, 6], 40, ignore_eos=True) for i in range(5)]
    core.add(requests)
    results = run_all(core)
    assert core.stats()["retractions"] > 0
    for wanted in requests:
        check(results[wanted.request_id], wanted)
    assert_all_free(core)


def test_the_schedule_repeats_exactly() -> None:
    def run() -> tuple[list[int], dict[str, int]]:
        core = make_core(MODEL, engine_max_total_tokens=80, engine_max_running_requests=6)
        core.add(random_requests(random.Random(3), num_groups=6))
        return list(run_all(core)), core.stats()

    assert run() == run()


def test_short_answers_free_their_rows_at_once() -> None:
    core = make_core(MODEL, engine_max_running_requests=2)
    core.add([request(i, [3, 4, 5], length, ignore_eos=True) for i, length in enumerate([20, 2, 2, 2, 2])])
    assert list(run_all(core)) == [1, 2, 3, 4, 0]


def test_stop_ids_and_lengths_end_answers() -> None:
    wanted = request(0, [5, 6, 7], 30, ignore_eos=True)
    tokens, _, _ = reference_answer(MODEL, wanted)
    stop_id = tokens[4]
    first = tokens.index(stop_id)
    core = make_core(MODEL)
    core.add(
        [
            request(0, [5, 6, 7], 30, noise_key=0, ignore_eos=True, stop_token_ids=(stop_id,)),
            request(1, [5, 6, 7], first + 1, noise_key=0, ignore_eos=True, stop_token_ids=(stop_id,)),
            request(2, [5, 6, 7], 5, noise_key=0, ignore_eos=True),
        ]
    )
    results = run_all(core)
    assert results[0].output_ids == tokens[: first + 1]
    assert results[0].finish_reason is FinishReason.STOP
    assert results[1].finish_reason is FinishReason.STOP  # an end token in the last place is still an end
    assert results[2].output_ids == tokens[:5]
    assert results[2].finish_reason is FinishReason.LENGTH


def test_end_tokens_of_the_model_end_answers_unless_ignored() -> None:
    model = make_model(eos_token_ids=tuple(range(18)))
    core = make_core(model)
    core.add([request(0, [20, 21], 60), request(1, [20, 21], 60, noise_key=0, ignore_eos=True)])
    results = run_all(core)
    assert results[0].finish_reason is FinishReason.STOP
    assert results[0].output_ids[-1] < 18 and min(results[0].output_ids[:-1], default=18) >= 18
    assert len(results[1].output_ids) == 60
    assert results[1].output_ids[: len(results[0].output_ids)] == results[0].output_ids


def test_the_answer_ends_with_the_context() -> None:
    wanted = request(0, [3] * 90, 50, ignore_eos=True)
    core = make_core(MODEL)
    core.add([wanted])
    result = run_all(core)[0]
    check(result, wanted)
    assert len(result.output_ids) == 6


def test_kept_tokens_are_those_that_could_be_drawn() -> None:
    requests = [
        request(0, [4, 9, 2], 6, top_k=4, return_kept_tokens=True, ignore_eos=True),
        request(1, [4, 9, 2], 6, top_p=0.5, return_kept_tokens=True, ignore_eos=True),
        request(2, [4, 9, 2], 6, top_k=4, ignore_eos=True),
        request(3, [4, 9, 2], 6, return_kept_tokens=True, ignore_eos=True),
    ]
    core = make_core(MODEL, engine_max_total_tokens=32)
    core.add(requests)
    results = run_all(core)
    for wanted in requests[:2]:
        result = results[wanted.request_id]
        assert [ids.dtype for ids in result.kept_token_ids] == [np.int32] * 6
        kept_ids = [ids.tolist() for ids in result.kept_token_ids]
        assert kept_ids == reference_answer(MODEL, wanted)[2]
        for j, kept in enumerate(kept_ids):
            logits = full_logits(MODEL, [4, 9, 2, *result.output_ids[:j]])[-1]
            index = kept.index(result.output_ids[j])
            assert result.log_probs[j] == pytest.approx(torch.log_softmax(logits[kept], -1)[index].item(), abs=1e-4)
    assert results[2].kept_token_ids is None
    assert results[3].kept_token_ids is None


def test_top_log_probs_are_those_of_the_distribution_drawn_from() -> None:
    requests = [
        request(0, [4, 9, 2], 5, temperature=0.7, num_top_log_probs=3, ignore_eos=True),
        request(1, [4, 9, 2], 5, top_k=2, num_top_log_probs=4, return_kept_tokens=True, ignore_eos=True),
        request(2, [4, 9, 2], 5, ignore_eos=True),
    ]
    core = make_core(MODEL)
    core.add(requests)
    results = run_all(core)
    for wanted, temperature in zip(requests[:2], (0.7, 1.0), strict=True):
        result = results[wanted.request_id]
        for j in range(5):
            logits = full_logits(MODEL, [4, 9, 2, *result.output_ids[:j]])[-1] / temperature
            if wanted.sampling.top_k > 0:
                assert sorted(result.kept_token_ids[j].tolist()) == sorted(logits.topk(2).indices.tolist())
                logits[logits < logits.topk(2).values[-1]] = CUT_LOGIT  # what goes into a checkpoint is finite
            best = torch.log_softmax(logits, -1).topk(wanted.sampling.num_top_log_probs)
            num_drawable = int((best.values > CUT_LOGIT).sum())
            assert result.top_token_ids[j].tolist()[:num_drawable] == best.indices.tolist()[:num_drawable]
            assert result.top_log_probs[j] == pytest.approx(best.values.numpy(), abs=1e-4)
    assert results[2].top_token_ids is None and results[2].top_log_probs is None


@pytest.mark.parametrize("which", ["all", "some"])
def test_abort_returns_what_was_written(which: str) -> None:
    core = make_core(MODEL, engine_max_running_requests=3)
    requests = [request(i, [7, 8, 9, 10, 11], 12, ignore_eos=True) for i in range(6)]
    core.add(requests)
    assert not core.step() + core.step() + core.step()
    core.abort(None if which == "all" else [0, 2, 5, 99])
    results = run_all(core)
    aborted = range(6) if which == "all" else [0, 2, 5]
    for i, wanted in enumerate(requests):
        if i in aborted:
            tokens, log_probs, _ = reference_answer(MODEL, wanted)
            num_written = 3 if i < 3 else 0
            assert results[i].finish_reason is FinishReason.ABORT
            assert results[i].output_ids == tokens[:num_written]
            assert results[i].log_probs == pytest.approx(log_probs[:num_written], abs=1e-4)
        else:
            check(results[i], wanted)
    assert_all_free(core)


def test_aborting_the_leader_of_a_prompt_leaves_its_siblings_alone() -> None:
    core = make_core(MODEL, engine_chunked_prefill_size=4)
    requests = [request(i, list(range(2, 16)), 5) for i in range(4)]
    core.add(requests)
    core.step()  # the leader has four of its fourteen prompt tokens
    core.abort([0])
    results = run_all(core)
    assert results[0].finish_reason is FinishReason.ABORT and results[0].output_ids == []
    for wanted in requests[1:]:
        check(results[wanted.request_id], wanted)
    assert_all_free(core)


def test_aborting_a_sibling_that_waits_leaves_the_others_alone() -> None:
    core = make_core(MODEL, engine_chunked_prefill_size=4)
    requests = [request(i, list(range(2, 16)), 5) for i in range(4)]
    core.add(requests)
    core.step()
    core.abort([2])
    results = run_all(core)
    assert results[2].finish_reason is FinishReason.ABORT
    for i in (0, 1, 3):
        check(results[i], requests[i])
    assert_all_free(core)


def test_pause_modes() -> None:
    core = make_core(MODEL)
    requests = [request(i, [2, 3, 4, 5, 6, 7], 10, ignore_eos=True) for i in range(3)]
    core.add(requests)
    for _ in range(4):
        core.step()
    core.pause("in_place")
    assert core.stats()["running"] == 3
    core.pause("retract")
    assert core.stats() | {"running": 0, "waiting": 3} == core.stats()
    assert not core.scheduler.pool.references.any()
    core.step()
    core.pause("abort")
    results = core.take_ended()
    assert {result.finish_reason for result in results} == {FinishReason.ABORT}
    assert all(len(result.output_ids) == 5 for result in results)
    assert_all_free(core)
    with pytest.raises(EngineError, match=r"'half'.*abort, retract or in_place"):
        core.pause("half")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_each_token_carries_the_version_it_was_drawn_with(mode: str) -> None:
    model, newer = make_model(), make_model(seed=1)
    core = make_core(model)
    wanted = request(0, [2, 3, 4, 5, 6, 7], 9, ignore_eos=True)
    core.add([wanted])
    for _ in range(4):
        core.step()
    core.pause(mode)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), newer.parameters(), strict=True):
            parameter.copy_(value)
    core.set_version(1)
    result = run_all(core)[0]
    assert result.weight_versions == [0] * 4 + [1] * 5
    before = request(0, wanted.prompt_ids, 4, ignore_eos=True)
    assert result.output_ids[:4] == reference_answer(MODEL, before)[0]
    if mode == "retract":  # keys and values of the first part are computed again with the new weights
        logits = full_logits(newer, [*wanted.prompt_ids, *result.output_ids])
        log_probs = torch.log_softmax(logits, -1)[9:-1].gather(1, torch.tensor(result.output_ids[4:])[:, None])
        assert result.log_probs[4:] == pytest.approx(log_probs.squeeze(1).tolist(), abs=1e-4)


@pytest.mark.parametrize("mode", ["retract", "in_place", None])
def test_a_new_version_never_meets_blocks_of_older_weights(mode: str | None) -> None:
    """Also blocks that requests in progress still hold, and that they complete only later. Field note 31."""
    model, newer = make_model(), make_model(seed=1)
    core = make_core(model, engine_chunked_prefill_size=5)
    prompt = list(range(2, 16))
    core.add([request(0, prompt, 6), request(1, prompt[:9], 2)])
    run_steps(core, 2 if mode else 100)
    core.pause(mode or "in_place")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), newer.parameters(), strict=True):
            parameter.copy_(value)
    core.set_version(1)
    fresh = [request(2, prompt, 6), request(3, prompt[:9], 4)]
    core.add(fresh)
    results = run_all(core)
    again = request(4, prompt, 6)
    core.add([again])
    results |= run_all(core)
    for wanted in (*fresh, again):
        check(results[wanted.request_id], wanted, newer)


def test_answers_finished_after_an_update_leave_nothing_behind() -> None:
    model, newer = make_model(), make_model(seed=1)
    core = make_core(model)
    first = request(0, list(range(2, 10)), 12, ignore_eos=True)
    core.add([first])
    run_steps(core, 5)
    core.pause("in_place")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), newer.parameters(), strict=True):
            parameter.copy_(value)
    core.set_version(1)
    answer = run_all(core)[0].output_ids
    second = request(1, [*first.prompt_ids, *answer], 4)
    core.add([second])
    check(run_all(core)[1], second, newer)


def run_steps(core: EngineCore, count: int) -> None:
    for _ in range(count):
        core.step()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damaged_weights_fail_the_request_and_do_not_spread(bad: float) -> None:
    model = make_model(tied_head=False)
    core = make_core(model, engine_max_total_tokens=64)
    broken = model.embedding.weight[3].detach().clone()
    with torch.no_grad():
        model.embedding.weight[3] = bad  # only texts with token 3 are hit
    good = [request(i, [5, 6, 7, 8, 9, 10 + i], 6) for i in range(3)]
    hit = [request(10 + i, [4, 3, 5, 6, 7, 8, 9], 6) for i in range(3)]
    core.add([good[0], *hit, *good[1:]])
    results = run_all(core)
    for wanted in hit:
        assert results[wanted.request_id].finish_reason is FinishReason.ERROR
        assert "37 NaN and 0 infinite of 37 logits at token position 7" in results[wanted.request_id].error
    core.add([request(13, [4, 3, 5, 6, 7, 8, 9], 6)])  # what is left of its siblings must not be found
    assert run_all(core)[13].finish_reason is FinishReason.ERROR
    healthy = [wanted for wanted in good if 3 not in reference_answer(model, wanted)[0]]
    assert healthy
    for wanted in healthy:
        check(results[wanted.request_id], wanted, model)
    assert_all_free(core)
    with torch.no_grad():
        model.embedding.weight[3] = broken
    core.set_version(1)
    more = [request(20 + i, [4, 3, 5, 6, 7, 8, i], 9) for i in range(2, 8)]  # all blocks are used again
    core.add(more)
    results = run_all(core)
    for wanted in more:
        check(results[wanted.request_id], wanted, model)


def test_parameters_stay_trainable() -> None:
    model = make_model()
    core = make_core(model)
    core.add([request(0, [2, 3, 4], 3)])
    run_all(core)
    model(torch.tensor([2, 3, 4]), packed_context([3], device="cpu")).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("embedding.weight", "head"),  # the row of a token that is not in the text, in its other role
        ("layers.0.attention_norm.weight", "layers.0.attention_norm"),
        ("layers.1.attention.qkv.weight", "layers.1.attention.qkv"),
        ("layers.1.mlp_norm.weight", "layers.1.mlp.gate_up"),
        ("layers.0.mlp.down.weight", "layers.0.mlp.down"),
        ("norm.weight", "norm"),
        ("layers.1.attention.k_norm.weight", None),  # the attention without a cache may hide it, the scan does not
    ],
)
def test_the_failure_names_the_damaged_layer(name: str, place: str | None) -> None:
    model = make_model()
    core = make_core(model)
    with torch.no_grad():
        dict(model.named_parameters())[name].view(-1)[3] = float("nan")
    core.add([request(0, [4, 3, 5, 6], 6)])
    error = run_all(core)[0].error
    assert error is not None and f"the weights are damaged: {name} (1 not finite)" in error
    assert place is None or f"they begin in {place};" in error


def test_the_failure_tells_overflow_from_damage_and_a_damaged_cache_from_both() -> None:
    model = make_model()
    core = make_core(model)
    with torch.no_grad():
        model.layers[1].mlp.down.weight.fill_(3e38)
    core.add([request(0, [4, 3, 5, 6], 6)])
    error = run_all(core)[0].error
    assert error is not None and "begin in layers.1.mlp.down; its weights are finite, so its numbers overflow" in error
    core = make_core(MODEL)
    core.add([request(0, [4, 3, 5, 6], 6)])
    core.step()
    core.cache.k_caches[0].fill_(float("nan"))
    error = run_all(core)[0].error
    assert error is not None and "every layer is finite: the cache was damaged" in error
    assert not any(layer._forward_hooks for layer in MODEL.layers)


def test_a_released_cache_comes_back_and_every_answer_is_the_same() -> None:
    requests = [request(i, [2, 3, 4 + i % 2], 12 + i, temperature=float(i % 2), ignore_eos=True) for i in range(6)]
    core, untouched = make_core(MODEL, engine_max_running_requests=4), make_core(MODEL)
    untouched.add(requests)
    expected = run_all(untouched)
    core.add(requests)
    run_steps(core, 5)
    num_bytes, first = core.cache.num_bytes, []
    for _ in range(2):
        assert core.release_memory(["kv_cache", "weights"]) == {"kv_cache": num_bytes, "weights": 0}
        assert core.cache.num_bytes == 0 and core.cache.k_caches == ()
        core.add([request(10, [2, 3, 4], 3)])
        assert core.step() == [] and core.stats()["running"] == 0 and core.stats()["waiting"] == 7
        core.abort([10])
        assert [result.request_id for result in core.step()] == [10]
        core.resume_memory(["kv_cache", "weights"])
        assert core.cache.num_bytes == num_bytes
        first += core.step() + core.step()
    results = run_all(core) | {result.request_id: result for result in first}
    for wanted in requests:
        assert results[wanted.request_id].output_ids == expected[wanted.request_id].output_ids
        assert results[wanted.request_id].log_probs == pytest.approx(expected[wanted.request_id].log_probs, abs=1e-5)
    assert_all_free(core)


def test_nothing_of_a_released_cache_is_found_again() -> None:
    """The version is the same, so a stale index would be believed."""
    core = make_core(MODEL)
    wanted = request(0, list(range(2, 14)), 5, temperature=0.0, ignore_eos=True)
    core.add([wanted])
    check(run_all(core)[0], wanted)
    core.release_memory(["kv_cache"])
    core.resume_memory(["kv_cache"])
    core.add([wanted])
    result = run_all(core)[0]
    check(result, wanted)
    assert result.cached_tokens == 0


def test_an_unknown_memory_tag_releases_nothing() -> None:
    core = make_core(MODEL)
    with pytest.raises(EngineError, match="'kv' is unknown: expected kv_cache, weights, cuda_graph"):
        core.release_memory(["kv_cache", "kv"])
    assert core.cache.num_bytes > 0


def test_nothing_leaks() -> None:
    core = make_core(MODEL, engine_max_total_tokens=120, engine_max_running_requests=8)
    churn(core, num_requests=400)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_leaks_over_100_000_requests() -> None:
    core = make_core(make_model(num_layers=1), engine_max_total_tokens=2000, engine_max_running_requests=256)
    mib = []
    for num_requests in (20_000, 40_000, 40_000):
        churn(core, num_requests=num_requests)
        gc.collect()
        mib.append(psutil.Process().memory_info().rss / 2**20)
    print(f"MiB after 20,000, 60,000 and 100,000 requests: {', '.join(f'{one:.1f}' for one in mib)}")
    assert mib[-1] < mib[0] + 4  # 50 bytes a request


def churn(core: EngineCore, *, num_requests: int) -> None:
    """Random requests, aborts, pauses and versions; every request ends once and every block comes back."""
    rng = random.Random(0)
    num_added = num_ended = 0
    while num_added < num_requests:
        count = min(rng.randrange(1, 200), num_requests - num_added)
        prompt = [rng.randrange(2, 37) for _ in range(rng.randrange(1, 30))]
        stop = tuple(rng.sample(range(2, 37), rng.choice([0, 2])))
        core.add(
            request(num_added + i, prompt[: rng.choice([5, 30])], rng.randrange(1, 9), stop_token_ids=stop)
            for i in range(count)
        )
        num_added += count
        for _ in range(rng.randrange(1, 12)):
            num_ended += len(core.step())
        chance = rng.random()
        if chance < 0.05:
            core.abort(range(num_added - 20, num_added))
        elif chance < 0.1:
            core.pause("retract")
        elif chance < 0.15:
            core.set_version(core.version + 1)
        elif chance < 0.17:
            core.release_memory(["kv_cache"])
            core.resume_memory(["kv_cache"])
    while core.has_work:
        num_ended += len(core.step())
    assert num_ended == num_added
    assert_all_free(core)
    scheduler, stop_sets = core.scheduler, core.stop_sets
    assert not scheduler._leaders and not scheduler._followers
    assert not any(stop_sets._users) and len(stop_sets._rows) <= len(stop_sets._table) < 100
    index = scheduler.pool.index
    core.set_version(core.version + 1)
    assert not index.full.any() and not any(block in index for block in range(core.scheduler.pool.num_usable + 1))


def test_steps_that_overlap_give_the_same_answers_and_versions() -> None:
    """Tokens reach the host one step late; what an answer drew after its end is dropped."""
    requests = [request(i, list(range(2, 5 + i)), 3 + 5 * i, stop_token_ids=(7, 9, 11)) for i in range(5)]
    plain, late = make_core(MODEL), make_core(MODEL, overlaps=True, engine_max_running_requests=3)
    plain.add(requests)
    expected = run_all(plain)
    late.add(requests)
    results = late.step() + late.step()
    late.set_version(1)  # the token that is on its way was drawn with version 0
    results += run_all(late).values()
    assert {r.finish_reason for r in results} == {FinishReason.STOP, FinishReason.LENGTH}
    for result in results:
        wanted = expected[result.request_id]
        assert result.output_ids == wanted.output_ids
        assert result.log_probs == pytest.approx(wanted.log_probs, abs=1e-5)
        num_old = 2 if result.request_id < 3 else 0
        assert result.weight_versions == [0] * num_old + [1] * (len(result.output_ids) - num_old)
    assert_all_free(late)


def test_an_abort_keeps_the_token_that_is_on_its_way() -> None:
    core = make_core(MODEL, overlaps=True)
    core.add([request(0, [2, 3, 4], 10, ignore_eos=True)])
    for _ in range(3):
        core.step()
    core.abort()
    (result,) = run_all(core).values()
    assert result.finish_reason is FinishReason.ABORT
    assert result.output_ids == reference_answer(MODEL, request(0, [2, 3, 4], 3, ignore_eos=True))[0]
    assert_all_free(core)


def test_damaged_weights_fail_the_request_one_step_late() -> None:
    model = make_model()
    core = make_core(model, overlaps=True)
    core.add([request(0, [2, 3, 4], 10, ignore_eos=True)])
    core.step()
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    (result,) = run_all(core).values()
    assert result.finish_reason is FinishReason.ERROR
    assert result.error is not None and "not finite at token position 4" in result.error
    assert len(result.output_ids) == 1
    assert_all_free(core)
