"""How far are bfloat16 gradients from float32 ones, in one micro-batch and in many?

    python benchmarks/gradient_error.py [--shape 0.6b] [--samples 54] [--micro-batches 27] [--write FOLDER]

One model whose weights bfloat16 holds exactly, random samples, one optimizer step's gradient by four ways: float32 as
the reference (with many micro-batches); the trainer in bfloat16 with 1 and with many micro-batches, whose gradients it
sums in float32; and the same many summed in bfloat16, which is what the float32 sums are for. Errors are norms of the
difference over the norm of the reference, by kind of parameter and over all. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.machine import record
from benchmarks.recipe import random_model
from miles.config.sections import AlgorithmConfig, BatchConfig, CheckConfig, OptimConfig, RunConfig
from miles.model.decoder import Decoder
from miles.trainer.trainer import LocalTrainer
from miles.types import TrainSample


def make_samples(num_samples: int, length: int, vocab_size: int) -> list[TrainSample]:
    """Answers of one length, so that every packing has equally many tokens; four of a group."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (num_samples, length + length // 4), generator=generator).tolist()
    return [
        TrainSample(tokens, length, [1] * length, float(i % 3 == 0), float(i % 3 == 0), i // 4, i)
        for i, tokens in enumerate(ids)
    ]


def gradients(
    model: Decoder, samples: list[TrainSample], num_micro_batches: int, *, dtype: torch.dtype, sums: torch.dtype
) -> dict[str, Tensor]:
    """The whole gradient of the policy loss, in `sums` over the micro-batches, on the host."""
    device = model.head_weight.device
    copy = Decoder(model.spec, dtype=dtype, device=device)
    copy.load_state_dict(model.state_dict())
    config = RunConfig(
        algorithm=AlgorithmConfig(entropy_coef=0.001),  # every sample has a gradient
        optim=OptimConfig(lr=0.0, clip_grad=0.0),
        batch=BatchConfig(micro_batch_size=-(-len(samples) // num_micro_batches), max_tokens_per_gpu=10**9),
        checks=CheckConfig(max_logprob_gap=0.0, ci_disable_kl_checker=True),
    )
    trainer = LocalTrainer(copy, None, config, total_steps=1)
    if sums != torch.float32:
        for parameter in copy.parameters():
            parameter.grad, parameter.grad_dtype = None, sums
            parameter.grad = torch.zeros_like(parameter)
        # The optimizer sees what was summed; its own gradients are empty, and with lr 0 it moves nothing.
    found = trainer.train(samples, rollout_id=0, weight_version=0).steps[0]
    assert found["train/num_micro_batches"] == num_micro_batches
    return {name: parameter.grad.cpu() for name, parameter in copy.named_parameters()}


def group_of(name: str) -> str:
    """`layers.3.mlp.down.weight` -> `mlp.down`."""
    parts = [part for part in name.split(".") if not part.isdigit()]
    return ".".join(parts[1 if parts[0] == "layers" else 0 : -1])


def errors(found: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """By kind of parameter, and `all` of them as one vector."""
    squares: dict[str, list[float]] = {}
    for name, expected in reference.items():
        difference = float((found[name].double() - expected.double()).square().sum())
        for group in (group_of(name), "all"):
            pair = squares.setdefault(group, [0.0, 0.0])
            pair[0] += difference
            pair[1] += float(expected.double().square().sum())
    return {group: (difference / total) ** 0.5 for group, (difference, total) in squares.items()}


def measure(model: Decoder, samples: list[TrainSample], num_micro_batches: int) -> dict[str, dict[str, float]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    reference = gradients(model, samples, num_micro_batches, dtype=fp32, sums=fp32)
    many = f"bfloat16_{num_micro_batches}"
    ways = {
        "float32_1": (1, fp32, fp32),
        "bfloat16_1": (1, bf16, fp32),
        many: (num_micro_batches, bf16, fp32),
        f"{many}_summed_in_bfloat16": (num_micro_batches, bf16, bf16),
    }
    found = {way: gradients(model, samples, n, dtype=dtype, sums=sums) for way, (n, dtype, sums) in ways.items()}
    by_way = {way: errors(found[way], reference) for way in ways}
    # The error of the sums alone: the same micro-batches, added up in one dtype and in the other.
    return by_way | {"bfloat16_sums_alone": errors(found[f"{many}_summed_in_bfloat16"], found[many])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--samples", type=int, default=54)
    parser.add_argument("--length", type=int, default=400)
    parser.add_argument("--micro-batches", type=int, default=27)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    start = time.perf_counter()
    model = random_model(arguments.shape, dtype=torch.bfloat16, device=arguments.device)
    samples = make_samples(arguments.samples, arguments.length, model.spec.vocab_size)
    found = measure(model, samples, arguments.micro_batches)
    for way, by_group in found.items():
        print(f"{way}: {'  '.join(f'{group} {error:.2e}' for group, error in sorted(by_group.items()))}")
    result = {
        "name": f"gradient_error_{arguments.shape}",
        "seconds": time.perf_counter() - start,
        "num_tokens": arguments.samples * arguments.length,
        "num_micro_batches": arguments.micro_batches,
        "relative_errors": found,
        "peers": {},
    }
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
