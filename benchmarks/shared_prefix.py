"""What it saves to compute the prompt of a group once for its answers, by length of the prompt.

    python benchmarks/shared_prefix.py [--shape 0.6b] [--prompt-lengths 100 1000 8000] [--write FOLDER]

Groups of 8 answers with the answer lengths of the recipe. For each prompt length: seconds of a training step (pack,
forward, backward, clip, AdamW) and of a log-prob pass, tokens computed and peak memory with and without sharing; and
how far loss, gradient and log-probs are apart, beside how far another packing without sharing moves them. Ends with one
JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import record
from benchmarks.recipe import ANSWERS_PER_PROMPT, LENGTHS, random_model
from miles.config.sections import AlgorithmConfig, BatchConfig, CheckConfig, OptimConfig, RunConfig
from miles.trainer.batch import micro_batches, token_batch
from miles.trainer.trainer import LocalTrainer
from miles.types import TrainSample

TOKENS_OF_A_STEP = 300_000  # fewer prompts of 1,000 and 8,000 tokens than the 32 of the recipe keep the script short


def rollout(prompt_length: int, num_prompts: int, share: float) -> list[TrainSample]:
    rng = random.Random(prompt_length)
    made = []
    for place in range(num_prompts):
        prompt = [rng.randrange(1000, 150_000) for _ in range(prompt_length)]
        for member in range(ANSWERS_PER_PROMPT):
            index = place * ANSWERS_PER_PROMPT + member
            length = max(1, round(LENGTHS["answer_lengths"][index] * share))
            tokens = prompt + [rng.randrange(1000, 150_000) for _ in range(length)]
            reward = float(member < 3)
            made.append(TrainSample(tokens, length, [1] * length, reward, reward, place, index))
    return made


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device, self.repetitions = torch.device(arguments.device), arguments.repetitions
        self.on_gpu = self.device.type == "cuda"
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.model = random_model(arguments.shape, dtype=dtype, device=arguments.device)
        # No update moves the weights: all variants must see the same.
        config = RunConfig(
            algorithm=AlgorithmConfig(eps_clip_high=0.28),
            optim=OptimConfig(lr=0.0, weight_decay=0.0, clip_grad=0.0),
            batch=BatchConfig(max_tokens_per_gpu=arguments.max_tokens),
            checks=CheckConfig(ci_disable_kl_checker=True, max_logprob_gap=0.0),
        )
        self.trainer = LocalTrainer(self.model, None, config, total_steps=1)

    def seconds(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Median of the repetitions after one that does not count, and the last result."""
        taken, result = [], None
        for _ in range(self.repetitions + 1):
            self.wait()
            start = time.perf_counter()
            result = call()
            self.wait()
            taken.append(time.perf_counter() - start)
        return median(taken[1:] or taken), result

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def variant(self, samples: list[TrainSample], *, share: bool, max_tokens: int) -> tuple[dict[str, float], Any]:
        """Measurements, and what has to agree: loss, gradient and log-probs."""
        trainer = self.trainer
        batch_config = dataclasses.replace(trainer.config.batch, share_prompts_in_training=share)
        trainer.config = dataclasses.replace(trainer.config, batch=batch_config)
        trainer.max_tokens = max_tokens
        batch = token_batch(samples, self.device)
        packed = micro_batches(batch, range(len(samples)), max_tokens=max_tokens, share=share)
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        step_s, outcome = self.seconds(lambda: trainer.train(samples, rollout_id=0, weight_version=0))
        peak_gb = torch.cuda.max_memory_allocated() / 2**30 if self.on_gpu else 0.0
        score_s, (log_probs_R, _) = self.seconds(lambda: trainer._scorer.score_all(self.model, packed))
        measured = {
            "step_seconds": step_s,
            "log_probs_seconds": score_s,
            "tokens": sum(len(micro_batch.input_ids_T) for micro_batch in packed),
            "micro_batches": len(packed),
            "tflop": outcome.steps[0]["train/tflop"],
            "peak_gb": peak_gb,
        }
        gradients = [parameter.grad.clone() for parameter in self.model.parameters()]
        return measured, (outcome.steps[0]["train/loss"], gradients, log_probs_R)

    def apart(self, ours: Any, theirs: Any) -> dict[str, float]:
        pairs = list(zip(ours[1], theirs[1], strict=True))
        difference = torch.stack([(mine - other).norm() for mine, other in pairs]).norm()
        gap_R = (ours[2] - theirs[2]).abs()
        return {
            "loss": abs(ours[0] - theirs[0]),
            "gradient_relative": float(difference / torch.stack([other.norm() for _, other in pairs]).norm()),
            "log_prob_mean": float(gap_R.mean()),
            "log_prob_max": float(gap_R.max()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--prompt-lengths", type=int, nargs="+", default=[100, 1000, 8000])
    parser.add_argument("--num-prompts", type=int, default=32, help="at most")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--share", type=float, default=1.0, help="shorten every answer, to try the script out")
    parser.add_argument("--max-tokens", type=int, default=32_768, help="--max-tokens-per-gpu")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    bench = Bench(arguments)
    lengths: dict[str, Any] = {}
    for prompt_length in arguments.prompt_lengths:
        most = TOKENS_OF_A_STEP // (ANSWERS_PER_PROMPT * (prompt_length + 740))
        samples = rollout(prompt_length, min(arguments.num_prompts, max(most, 1)), arguments.share)
        plain, expected = bench.variant(samples, share=False, max_tokens=arguments.max_tokens)
        shared, actual = bench.variant(samples, share=True, max_tokens=arguments.max_tokens)
        apart = bench.apart(actual, expected)
        del actual
        repetitions, bench.repetitions = bench.repetitions, 0
        _, other = bench.variant(samples, share=False, max_tokens=arguments.max_tokens // 2)
        bench.repetitions = repetitions
        lengths[str(prompt_length)] = {
            "samples": len(samples),
            "plain": plain,
            "shared": shared,
            "speed_up": {name: plain[name] / shared[name] for name in ("step_seconds", "log_probs_seconds", "tokens")},
            "apart": apart,
            "apart_by_another_packing": bench.apart(other, expected),
        }
        print(f"prompt of {prompt_length}: {lengths[str(prompt_length)]}", flush=True)
        del expected, other
    result = {
        "name": f"shared_prefix_{arguments.shape}",
        "seconds": lengths[str(arguments.prompt_lengths[0])]["shared"]["step_seconds"],
        "prompt_lengths": lengths,
        "peak_gb": max(entry["shared"]["peak_gb"] for entry in lengths.values()),
    }
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
