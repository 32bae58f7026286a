"""The engine on a GPU against one request at a time without a cache, by a float32 copy of the model on the CPU.

Tokens must be equal in float32: the noise is the same, and sums in another order move a log-prob by less than 1e-4.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from miles.config.sections import EngineConfig
from miles.engine import memory
from miles.engine.core import EngineCore
from miles.errors import ConfigError
from miles.model.context import packed_context
from miles.model.decoder import Decoder
from miles.ops.logprob import token_log_probs
from miles.types import GenerationRequest, GenerationResult
from tests.unit.engine.tiny import make_model, reference_answer, request, run_all

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPE: dict[str, Any] = {
    "vocab_size": 5000, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "head_dim": 64,
    "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def on_cpu() -> Decoder:
    model = make_model(**SHAPE)
    with torch.no_grad():
        model.embedding.weight *= 0.5  # a spread of the logits like that of a trained model
    return model


def on_gpu(model: Decoder, dtype: torch.dtype = torch.float32) -> Decoder:
    copy = Decoder(model.spec, dtype=dtype, device=CUDA)
    copy.load_state_dict(model.state_dict())
    return copy


def engine(model: Decoder, **flags: Any) -> EngineCore:
    config = EngineConfig(**{"engine_max_total_tokens": 20_000, "engine_max_running_requests": 40, **flags})
    return EngineCore(model, tokenizer=None, config=config, device=CUDA)


def answers(core: EngineCore, requests: list[GenerationRequest]) -> dict[int, GenerationResult]:
    core.add(requests)
    return run_all(core)


def some_requests(count: int) -> list[GenerationRequest]:
    rng = random.Random(0)
    made: list[GenerationRequest] = []
    for i in range(count):
        prompt = [rng.randrange(2, 5000) for _ in range(rng.choice([3, 17, 60]))] if i % 3 else [7, 8, 9, 10, 11]
        temperature = rng.choice([0.0, 0.7, 1.0])
        made.append(request(i, prompt, rng.randrange(1, 40), temperature=temperature, ignore_eos=True))
    return made


@pytest.mark.parametrize("flags", [{}, {"engine_disable_cuda_graph": True}, {"engine_chunked_prefill_size": 16}])
def test_answers_equal_the_reference(on_cpu: Decoder, flags: dict[str, Any]) -> None:
    requests = some_requests(24)
    results = answers(engine(on_gpu(on_cpu), **flags), requests)
    for wanted in requests[::2]:
        tokens, log_probs, _ = reference_answer(on_cpu, wanted)
        assert results[wanted.request_id].output_ids == tokens
        assert results[wanted.request_id].log_probs == pytest.approx(log_probs, abs=1e-4)


def test_a_head_size_without_kernels_takes_the_plain_path() -> None:
    model = make_model(**SHAPE | {"head_dim": 24})
    requests = some_requests(4)
    results = answers(engine(on_gpu(model)), requests)
    for wanted in requests:
        assert results[wanted.request_id].output_ids == reference_answer(model, wanted)[0]


def test_a_request_gets_the_same_noise_in_any_batch(on_cpu: Decoder) -> None:
    model = on_gpu(on_cpu)
    wanted = request(5, [4, 5, 6, 7], 30, ignore_eos=True)
    alone = answers(engine(model), [wanted])[5]
    others = [r for r in some_requests(24) if r.request_id != 5]
    together = answers(engine(model), [*others[:9], wanted, *others[9:]])[5]
    assert together.output_ids == alone.output_ids
    assert together.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


def test_cut_rows_take_their_own_path_and_the_others_keep_theirs(on_cpu: Decoder) -> None:
    cut = request(0, [4, 5, 6, 7], 20, top_k=5, return_kept_tokens=True, ignore_eos=True)
    top = request(1, [4, 5, 6], 12, num_top_log_probs=3, ignore_eos=True)
    plain = request(2, [9, 8, 7], 30, ignore_eos=True)
    results = answers(engine(on_gpu(on_cpu)), [cut, top, plain])
    for wanted in (cut, top, plain):
        tokens, log_probs, kept = reference_answer(on_cpu, wanted)
        assert results[wanted.request_id].output_ids == tokens
        assert results[wanted.request_id].log_probs == pytest.approx(log_probs, abs=1e-4)
    assert [ids.tolist() for ids in results[0].kept_token_ids or ()] == reference_answer(on_cpu, cut)[2]


def test_graphs_compute_with_the_weights_of_now(on_cpu: Decoder) -> None:
    model = on_gpu(on_cpu)
    core = engine(model)
    requests = some_requests(6)
    first = answers(core, requests)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    core.set_version(1)
    again = answers(core, requests)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    fresh = Decoder(model.spec, dtype=torch.float32, device="cpu")
    fresh.load_state_dict({name: tensor.cpu() for name, tensor in model.state_dict().items()})
    for wanted in requests:
        assert again[wanted.request_id].output_ids == reference_answer(fresh, wanted)[0]
        assert set(again[wanted.request_id].weight_versions) == {1}
    assert any(first[i].log_probs != again[i].log_probs for i in first)


def test_an_interrupted_answer_goes_on_after_an_update(on_cpu: Decoder) -> None:
    model = on_gpu(on_cpu)
    core = engine(model)
    core.add([request(0, [2, 3, 4], 20, ignore_eos=True)])
    for _ in range(8):
        core.step()
    core.pause("retract")
    core.set_version(3)
    (result,) = run_all(core).values()
    assert result.output_ids == reference_answer(on_cpu, request(0, [2, 3, 4], 20, ignore_eos=True))[0]
    assert result.weight_versions == [0] * 8 + [3] * 12


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_log_probs_are_those_of_the_trainer(on_cpu: Decoder, dtype: torch.dtype, limit: float) -> None:
    """bf16: both sides round the hidden states to 8 bits in the same places; logits of spread 1 then differ by about
    2^-8. The limit is on the mean."""
    model = on_gpu(on_cpu, dtype)
    requests = [r for r in some_requests(24) if r.sampling.temperature != 0.7]
    results = answers(engine(model), requests)
    sequences = [[*r.prompt_ids, *results[r.request_id].output_ids] for r in requests]
    ids = torch.tensor(sum(sequences, []), device=CUDA)
    with torch.no_grad():
        hidden = model(ids, packed_context([len(s) for s in sequences], device=CUDA))
        scored = token_log_probs(hidden, model.head_weight, ids.roll(-1))[0].split([len(s) for s in sequences])
    gaps = [
        abs(one - other)
        for wanted, scores in zip(requests, scored, strict=True)
        for one, other in zip(
            results[wanted.request_id].log_probs, scores[len(wanted.prompt_ids) - 1 : -1].tolist(), strict=True
        )
    ]
    assert sum(gaps) / len(gaps) < limit
    print(f"{dtype}: mean {sum(gaps) / len(gaps):.3g}, largest {max(gaps):.3g}")


def test_cache_size_follows_the_fraction(on_cpu: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, options = on_cpu.spec, {"num_rows": 4000, "dtype": torch.bfloat16, "device": CUDA}
    monkeypatch.setattr(memory, "available_bytes", lambda device: 900_000_000)
    monkeypatch.setattr(memory, "total_bytes", lambda device: 1_000_000_000)
    per_token, weights = memory.token_bytes(spec, 2), spec.num_parameters * 2
    found = memory.cache_tokens(spec, EngineConfig(engine_mem_fraction_static=0.5), **options)
    assert found == (500_000_000 - weights) // per_token // 16 * 16
    assert memory.cache_tokens(spec, EngineConfig(), **options) == 550_000_000 // per_token // 16 * 16
    with pytest.raises(ConfigError, match="engine-mem-fraction-static 0.95"):
        memory.cache_tokens(spec, EngineConfig(engine_mem_fraction_static=0.95), **options)
    with pytest.raises(ConfigError, match="would hold 0 tokens"):
        memory.cache_tokens(spec, EngineConfig(engine_mem_fraction_static=0.001), **options)
    with pytest.raises(ConfigError, match="power of two"):
        memory.check_page_size(12, device=CUDA)


@pytest.mark.parametrize("moves", [False, True])
def test_released_memory_is_free_and_graphs_find_the_cache_again(on_cpu: Decoder, moves: bool) -> None:
    core = engine(on_gpu(on_cpu), engine_max_total_tokens=400_000)
    requests = some_requests(12)
    expected = answers(core, requests)
    torch.cuda.synchronize()
    num_bytes, address = core.cache.num_bytes, core.cache.address
    core.add(requests)
    results = {result.request_id: result for _ in range(4) for result in core.step()}
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert core.release_memory(["kv_cache", "weights"]) == {"kv_cache": num_bytes, "weights": 0}
    assert allocated - torch.cuda.memory_allocated() >= num_bytes
    assert reserved - torch.cuda.memory_reserved() >= 0.99 * num_bytes  # other programs may have it
    in_the_way = torch.zeros(num_bytes if moves else 1, dtype=torch.uint8, device=CUDA)
    core.resume_memory(["kv_cache", "weights"])
    print(f"{num_bytes / 2**20:.0f} MiB, at the same address: {core.cache.address == address}")
    results |= run_all(core)
    del in_the_way
    for wanted in requests:
        assert results[wanted.request_id].output_ids == expected[wanted.request_id].output_ids
        assert results[wanted.request_id].log_probs == pytest.approx(expected[wanted.request_id].log_probs, abs=1e-4)
    graphs = core.release_memory(["cuda_graph"])["cuda_graph"]
    print(f"graphs: {graphs / 2**20:.0f} MiB")
    assert {i: r.output_ids for i, r in answers(core, requests).items()} == {
        i: r.output_ids for i, r in expected.items()
    }


def test_damage_is_named_with_graphs_and_steps_on_their_way(on_cpu: Decoder) -> None:
    model = on_gpu(on_cpu)
    core = engine(model)
    core.add([request(i, [2, 3, 4 + i], 30, ignore_eos=True) for i in range(20)])
    for _ in range(5):
        core.step()
    with torch.no_grad():
        model.layers[1].mlp.down.weight[0, 0] = float("nan")
    results = run_all(core)
    named = [r.error for r in results.values() if "layers.1.mlp.down.weight (1 not finite)" in (r.error or "")]
    assert len(results) == 20 and all("not finite" in (r.error or "") for r in results.values())
    assert len(named) == 8  # as many rows of a step are looked into


def test_a_decode_step_is_launched_without_waiting_for_the_device(on_cpu: Decoder) -> None:
    core = engine(on_gpu(on_cpu, torch.bfloat16))
    core.add([request(i, [2, 3, 4 + i], 60, ignore_eos=True) for i in range(20)])
    for _ in range(20):  # the graph is captured, and the last blocks of the prompts are copied
        core.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):  # new blocks are needed on the way
            core.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert core.stats()["running"] == 20
