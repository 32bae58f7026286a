"""Options that save memory of a GPU: the same numbers, and the bytes that the formulas promise."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch import nn

from miles.config.sections import BatchConfig, OptimConfig, RunConfig
from miles.model.activations import Recompute
from miles.model.context import packed_context
from miles.ops.logprob import token_log_probs
from miles.trainer.moments import PIECE
from miles.trainer.optim import Optimizer
from miles.trainer.trainer import LocalTrainer
from miles.types import TrainSample
from tests.gpu.trainer.test_trainer import SHAPE, samples, trainer_of
from tests.unit.engine.tiny import make_model

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> None:
    """What they left in cycles would be freed while the memory is measured."""
    gc.collect()
    torch.cuda.empty_cache()


class Matrices(nn.Module):
    """Three pieces in two parameters, one of them odd."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator("cuda").manual_seed(0)
        sizes = {"large": (2 * PIECE // 1024 + 3, 1024), "odd": (33, 257), "vector": (100,)}
        for name, size in sizes.items():
            values = torch.randn(size, generator=generator, device="cuda").bfloat16()
            self.register_parameter(name, nn.Parameter(values))


def trained(**flags) -> tuple[Optimizer, int]:
    """After three updates; the memory that the third took besides what lies there."""
    model = Matrices()
    if flags.get("adam_state") == "8bit":
        pytest.importorskip("bitsandbytes")
    optimizer = Optimizer(model, OptimConfig(lr=1e-2, weight_decay=0.1, **flags), total_steps=3)
    generator = torch.Generator("cuda").manual_seed(1)
    torch.manual_seed(0)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad.normal_(generator=generator)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        torch.cuda.synchronize()
    return optimizer, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("state", ["float32", "bfloat16", "8bit"])
def test_moments_on_the_host_give_the_same_bits(state: str) -> None:
    here, _ = trained(adam_state=state)
    there, extra = trained(adam_state=state, optimizer_cpu_offload=True)
    assert extra < 6 * 8 * PIECE  # what is on its way, not all of it at one time
    for name, master in here.masters.items():
        if state == "bfloat16":  # batches are other ones, and so are the random draws
            torch.testing.assert_close(there.masters[name], master, rtol=0, atol=1e-3)
        else:
            assert torch.equal(there.masters[name], master), name
    ours, theirs = here.moments(dict), there.moments(dict)
    assert all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in theirs.values())
    if state != "bfloat16":
        assert all(torch.equal(ours[name].cpu(), theirs[name]) for name in ours)


@pytest.mark.parametrize(("state", "expected"), [("float32", 18), ("bfloat16", 14), ("8bit", 12.04)])
def test_bytes_of_a_parameter(state: str, expected: float) -> None:
    before = torch.cuda.memory_allocated()
    optimizer, _ = trained(adam_state=state)
    count = sum(master.numel() for master in optimizer.masters.values())
    assert (torch.cuda.memory_allocated() - before) / count == pytest.approx(expected, abs=0.06)


def test_activations_take_what_the_formula_says() -> None:
    """Within 3 percent of what lies between the forward and the backward pass, whatever is computed again."""
    model = make_model(
        vocab_size=500, hidden_size=512, intermediate_size=1536, num_heads=8, num_kv_heads=4, head_dim=64,
        num_layers=6, max_position_embeddings=4096,
    ).bfloat16().cuda()  # fmt: skip
    lengths = [4000, 1000, 2500]
    ids_T, context = torch.arange(sum(lengths), device="cuda") % 500, packed_context(lengths, device="cuda")
    spec, gradients = model.spec, {}
    ways = [Recompute(selective, layers) for layers in (0, 2, 6) for selective in (False, True)]
    model(ids_T, context)  # compiles kernels, and the library of products takes its work space
    for again in ways:
        model.recompute_for = lambda num_tokens, again=again: again
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        hidden_TD = model(ids_T, context)
        kept = torch.cuda.memory_allocated() - before
        hidden_TD.float().square().sum().backward()
        gradients[again] = [parameter.grad.clone() for parameter in model.parameters()]
        del hidden_TD
        # Beside the layers: the last sum and its norm, and the tables of the rotary embedding (float32, cos and sin).
        # The first layer has one input, the others two.
        rest = 2 * (2 - (again.num_layers > 0)) * spec.hidden_size + 2 * 4 * spec.head_dim
        assert kept == pytest.approx(sum(lengths) * (2 * again.kept_numbers(spec) + rest), rel=0.03)
    for found in gradients.values():
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, gradients[Recompute()], strict=True))


def test_offload_frees_what_only_an_update_needs_and_moves_no_parameter() -> None:
    trainer = trainer_of(make_model(num_layers=8, **SHAPE), torch.bfloat16, "cuda")
    straight = trainer_of(make_model(num_layers=8, **SHAPE), torch.bfloat16, "cuda")
    addresses = [parameter.data_ptr() for parameter in trainer.model.parameters()]
    for rollout_id in range(3):
        trainer.offload()
        count = sum(parameter.numel() for parameter in trainer.model.parameters())
        assert trainer.offloaded_bytes == pytest.approx(16 * count, rel=0.05)
        trainer.onload()
        ours, theirs = (t.train(samples(), rollout_id=rollout_id, weight_version=0) for t in (trainer, straight))
        assert ours.steps == theirs.steps
    assert [parameter.data_ptr() for parameter in trainer.model.parameters()] == addresses


def test_micro_batches_of_any_length_leave_few_gaps() -> None:
    """With pieces of fixed size the allocator had 1.21 times what tensors take at their highest."""
    model = make_model(
        vocab_size=5000, hidden_size=1024, intermediate_size=3072, num_heads=16, num_kv_heads=8, head_dim=64,
        num_layers=12, max_position_embeddings=4096,
    ).bfloat16().cuda()  # fmt: skip
    batch = BatchConfig(global_batch_size=64, max_tokens_per_gpu=8192)
    trainer = LocalTrainer(model, None, RunConfig(optim=OptimConfig(lr=1e-4), batch=batch), total_steps=5)
    rng = random.Random(0)
    torch.cuda.reset_peak_memory_stats()
    for rollout_id in range(5):
        made = []
        for index in range(64):
            length = rng.randrange(20, 2000)
            tokens = rng.choices(range(5000), k=30 + length)
            reward = float(index % 2)
            made.append(TrainSample(tokens, length, [1] * length, reward, reward, index // 8, index))
        trainer.train(made, rollout_id=rollout_id, weight_version=0)
    assert torch.cuda.max_memory_reserved() < 1.1 * torch.cuda.max_memory_allocated()


def test_a_chunk_of_logits_takes_six_bytes_each_at_its_highest() -> None:
    """Float32 logits and their bfloat16 gradient, one chunk at a time, beside the gradients of head and states."""
    vocab, hidden, tokens, rows = 100_000, 256, 4096, 512
    states_TD = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    head_VD = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets_T = torch.arange(tokens, device="cuda")
    for _ in range(2):  # the first compiles
        states_TD.grad = head_VD.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        log_probs_T, _ = token_log_probs(states_TD, head_VD, targets_T, chunk_size=rows)
        log_probs_T.sum().backward()
        extra = torch.cuda.max_memory_allocated() - before
    assert extra == pytest.approx(6 * rows * vocab + 4 * vocab * hidden + 2 * tokens * hidden, rel=0.05)
