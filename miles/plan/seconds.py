"""Seconds of a step: what the shapes compute and read, over the rates of the machine and the share of them that this
code reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles.config.resolve import reads_reference, samples_per_rollout, scores_policy
from miles.model.activations import remade_numbers
from miles.model.flops import forward_flops
from miles.plan.memory import Job, Memory, token_bytes

# Shares of the rates of a large product and of a copy: benchmarks/grpo_step.py on an H200, the quickstart on a CPU.
PRODUCT_SHARE = {"cuda": 0.56, "cpu": 0.5}
READ_SHARE = {"cuda": 0.87, "cpu": 0.5}
# A layer of a micro-batch (forward and backward) and of a decode step takes this long, however few tokens there are.
TRAIN_LAYER_S, DECODE_LAYER_S = 300e-6, 35e-6
BUS_BYTES_PER_S = 25e9  # between the memories of GPU and CPU
# Bytes of a parameter: what a micro-batch adds to a gradient; what an update reads and writes, moments apart.
ADDED_BYTES, UPDATED_BYTES = 10, 22


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one step of the loop, by phase."""

    generate: float
    log_probs: float
    update: float

    @property
    def step(self) -> float:
        return self.generate + self.log_probs + self.update


def step_seconds(job: Job, memory: Memory) -> Seconds:
    """Every answer at its expected length, and every group with a signal: at most, in other words."""
    samples = samples_per_rollout(job.config)
    num_steps = max(samples // job.samples_per_step, 1)
    forward = samples * forward_flops(job.spec, [job.sample_len], num_head_tokens=job.answer_len)
    forward_s, algorithm = forward / _product_rate(job), job.config.algorithm
    others = reads_reference(algorithm) + algorithm.use_opd + (job.num_trained - 1)  # a critic values every token
    return Seconds(
        generate=_generate(job, memory) if job.has_engine else 0.0,
        log_probs=(scores_policy(algorithm, num_steps=num_steps) + others) * forward_s,
        update=num_steps * job.num_trained * _update(job, forward_s / num_steps),
    )


def _product_rate(job: Job) -> float:
    return PRODUCT_SHARE[job.device] * job.machine.matrix_flops_per_s


def _generate(job: Job, memory: Memory) -> float:
    spec, samples = job.spec, samples_per_rollout(job.config)
    rows = max(min(job.num_rows, samples, memory.cache_tokens // job.sample_len), 1)
    num_steps = -(-samples // rows) * job.answer_len
    num_read = samples * job.answer_len * (job.prompt_len + job.answer_len / 2)
    num_bytes = num_steps * spec.num_parameters * job.itemsize + num_read * token_bytes(spec, job.itemsize)
    read_s = num_bytes / (READ_SHARE[job.device] * job.machine.copy_bytes_per_s)
    drawn = samples * forward_flops(spec, [job.answer_len]) / _product_rate(job)
    prompts = job.config.rollout.rollout_batch_size * forward_flops(spec, [job.prompt_len], num_head_tokens=1)
    return max(read_s, drawn) + num_steps * spec.num_layers * DECODE_LAYER_S + prompts / _product_rate(job)


def _update(job: Job, forward_s: float) -> float:
    """One optimizer step: forward, backward, what is computed again, and AdamW."""
    spec, config, limits = job.spec, job.config, job.limits
    batch = job.micro_batch(limits.max_tokens)
    num_micro, again = batch.number, limits.activations.recompute_for(batch.tokens)
    num, moments = job.num_trained_parameters / job.num_trained, job.moment_bytes / job.num_trained
    added_s = num_micro * ADDED_BYTES * num / job.machine.copy_bytes_per_s
    on_bus = config.optim.optimizer_cpu_offload and not job.machine.shares_memory
    moments_s = moments / BUS_BYTES_PER_S if on_bus else 2 * moments / job.machine.copy_bytes_per_s
    updated_s = UPDATED_BYTES * num / job.machine.copy_bytes_per_s
    passes = (2 if config.lora.is_on else 3) + again.num_layers / spec.num_layers  # frozen weights have no gradient
    moved = again.selective * 2 * remade_numbers(spec) * job.itemsize * batch.tokens  # read and written again
    layer_s = TRAIN_LAYER_S + moved / job.machine.copy_bytes_per_s
    return passes * forward_s + num_micro * spec.num_layers * layer_s + added_s + moments_s + updated_s
