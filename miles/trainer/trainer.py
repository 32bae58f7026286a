"""The trainer of one process: scores a rollout, makes its optimizer steps, reports, saves and loads.

Old policy. A rollout that makes one optimizer step needs no pass for the old log-probs: such a pass would run with the
very weights of the step, so the detached current log-probs are the old ones and every ratio is exactly 1. With several
steps the samples are scored once before the first update. `--use-rollout-logprobs` takes the engine's instead.

Answers with an advantage of exactly 0 have no gradient in the policy loss unless a KL or entropy term is in it; they
are still scored, without a backward pass, so every metric covers every answer.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from miles.config.sections import BatchConfig, RunConfig
from miles.errors import CheckpointError
from miles.model.decoder import Decoder
from miles.model.names import to_hf
from miles.observe.timers import Timers
from miles.trainer.advantages import advantages
from miles.trainer.batch import MicroBatch, TokenBatch, micro_batches, token_batch
from miles.trainer.forward import Scorer
from miles.trainer.losses import TokenInputs
from miles.trainer.metrics import gap_metrics, loss_metrics, sample_metrics, token_metrics
from miles.trainer.optim import MOMENTS, Optimizer
from miles.trainer.packing import canonical_order, default_max_tokens
from miles.trainer.reduce import sample_mean_weights, token_mean_weights
from miles.trainer.step import Learner, StepWork
from miles.types import TrainResult, TrainSample

CPU_ACTIVATION_BYTES = 2**30
GPU_ACTIVATION_SHARE = 0.25  # of the device's memory


class LocalTrainer:
    """Implements `Trainer` of `types.py`. The parameters of `model` are updated in place and never move.

    `reference` is scored for the KL term only. `total_steps` is the number of optimizer steps of the whole run.
    """

    def __init__(self, model: Decoder, reference: Decoder | None, config: RunConfig, *, total_steps: int) -> None:
        assert reference is not None or not config.algorithm.use_kl_loss, "--use-kl-loss needs a reference model"
        self.model = model
        self.reference = reference if config.algorithm.use_kl_loss else None
        self.config = config
        self.device = model.head_weight.device
        self.optimizer = Optimizer(model, config.optim, total_steps=total_steps)
        self.num_steps = 0  # optimizer steps so far, those without a trained token included
        self.max_tokens = config.batch.max_tokens_per_gpu or self._default_max_tokens()
        self._is_policy = config.algorithm.loss_type == "policy_loss"
        # Supervised targets were not drawn at any temperature.
        temperature = config.rollout.rollout_temperature if self._is_policy else 1.0
        self._scorer = Scorer(temperature, config.batch.log_probs_chunk_size)
        self._learner = Learner(model, self.optimizer, self._scorer, config.algorithm)
        self._timers = Timers()
        torch.manual_seed(config.optim.seed)  # of the whole process: its state is saved and loaded

    def train(self, samples: Sequence[TrainSample], *, rollout_id: int, weight_version: int) -> TrainResult:
        """Make the optimizer steps of one rollout. Raises `TrainError` when numbers are not finite."""
        for sample in samples:
            newest = max(sample.weight_versions or [weight_version])
            assert newest <= weight_version, f"sample {sample.index} has weight version {newest}, now {weight_version}"
        with self._timers.span("data_preprocess"):
            batch = token_batch(canonical_order(samples), self.device)
            advantages_S = self._advantages(batch)
            steps = step_bounds(len(samples), self.config.batch)
        inputs, scores = self._score_first(batch, advantages_S, num_steps=len(steps))
        records: list[dict[str, float]] = []
        step_scores: list[dict[str, Tensor]] = []
        for start, stop in steps:
            with self._timers.span("actor_train"):
                part, places = batch.part(start, stop)
                record, values = self._step(part, inputs.take(places), advantages_S[start:stop])
            self.num_steps += 1
            records.append(record)
            step_scores.append(values)
        if not scores:
            scores = {name: torch.cat([values[name] for values in step_scores]) for name in ("log_probs", "entropy")}
        rollout = self._rollout_metrics(batch, advantages_S, inputs, scores)
        seconds = {"log_probs": 0.0, "ref_log_probs": 0.0, "actor_train": 0.0, **self._timers.take()}
        return TrainResult(rollout, records, seconds)

    def save(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Float32 masters and Adam moments under Hugging Face names, and a JSON state.

        The tensors are the live ones: write them before the next call of `train`.
        """
        state = {
            "num_updates": self.optimizer.num_updates,
            "num_steps": self.num_steps,
            "rng": _encode(torch.get_rng_state()),
        }
        if self.device.type == "cuda":
            state["rng_cuda"] = _encode(torch.cuda.get_rng_state(self.device))
        return self._live_tensors(), state

    @torch.no_grad()
    def load(self, tensors: dict[str, dict[str, Any]], state: dict[str, Any]) -> None:
        """Copy a saved state in place. A missing or misshapen tensor is a `CheckpointError`; then nothing is copied."""
        pairs = [
            pair for stem, targets in self._live_tensors().items() for pair in _matching(stem, targets, tensors[stem])
        ]
        for target, source in pairs:
            target.copy_(source)
        self.optimizer.resume(state["num_updates"])
        self.num_steps = state["num_steps"]
        torch.set_rng_state(_decode(state["rng"]))
        if self.device.type == "cuda" and "rng_cuda" in state:
            torch.cuda.set_rng_state(_decode(state["rng_cuda"]), self.device)

    def _default_max_tokens(self) -> int:
        memory_bytes = CPU_ACTIVATION_BYTES
        if self.device.type == "cuda":
            memory_bytes = int(GPU_ACTIVATION_SHARE * torch.cuda.get_device_properties(self.device).total_memory)
        itemsize = self.model.head_weight.dtype.itemsize
        return default_max_tokens(self.model.spec, bytes_per_number=itemsize, memory_bytes=memory_bytes)

    def _live_tensors(self) -> dict[str, dict[str, Tensor]]:
        spec = self.model.spec
        masters = {name: master.detach() for name, master in self.optimizer.masters.items()}
        moments = {
            f"{moment}.{name}": tensor
            for moment in MOMENTS
            for name, tensor in to_hf(spec, self.optimizer.moments(moment)).items()
        }
        return {"model": to_hf(spec, masters), "optimizer": moments}

    def _advantages(self, batch: TokenBatch) -> Tensor:
        if not self._is_policy:
            return torch.zeros(len(batch.samples), dtype=torch.float64)
        rewards = [sample.reward for sample in batch.samples]
        return advantages(rewards, [sample.group_index for sample in batch.samples], self.config.algorithm)

    def _score_first(
        self, batch: TokenBatch, advantages_S: Tensor, *, num_steps: int
    ) -> tuple[TokenInputs, dict[str, Tensor]]:
        """What the loss needs before the first update, and the scores of the policy if a pass was made for them."""
        use_engine = self._is_policy and self.config.algorithm.use_rollout_logprobs
        needs_pass = self._is_policy and num_steps > 1 and not use_engine and batch.num_tokens > 0
        scores: dict[str, Tensor] = {}
        old_R = ref_R = None
        packed = self._pack(batch, range(len(batch.samples)), learns=False) if needs_pass or self.reference else []
        if use_engine:
            assert batch.rollout_log_probs_R is not None, "--use-rollout-logprobs: the samples carry no log-probs"
            old_R = batch.rollout_log_probs_R
        elif needs_pass:
            with self._timers.span("log_probs"):
                old_R, entropy_R = self._scorer.score_all(self.model, packed)
            scores = {"log_probs": old_R, "entropy": entropy_R}
        if self.reference is not None and batch.num_tokens > 0:
            with self._timers.span("ref_log_probs"):
                ref_R, _ = self._scorer.score_all(self.reference, packed)
        return TokenInputs(batch.spread(advantages_S).float(), old_R, ref_R), scores

    def _pack(self, batch: TokenBatch, members: Sequence[int], *, learns: bool) -> list[MicroBatch]:
        return micro_batches(
            batch, members, max_tokens=self.max_tokens, max_samples=self.config.batch.micro_batch_size, learns=learns
        )

    def _step(
        self, batch: TokenBatch, inputs: TokenInputs, advantages_S: Tensor
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """One optimizer step: its record, and log-prob and entropy of its tokens."""
        algorithm = self.config.algorithm
        record = {
            "train/loss": 0.0,
            "train/grad_norm": 0.0,
            "train/lr-pg_0": self.optimizer.learning_rate,
            "train/step": self.num_steps,
            "train/num_samples": len(batch.samples),
            "train/num_tokens": batch.num_tokens,
            "train/num_micro_batches": 0,
            "train/num_skipped_steps": 1,
        }
        if batch.num_tokens == 0:
            nothing_R = torch.empty(0, device=self.device)
            return record, {"log_probs": nothing_R, "entropy": nothing_R}
        every = not self._is_policy or algorithm.entropy_coef != 0.0 or self.reference is not None
        learning = [i for i, advantage in enumerate(advantages_S.tolist()) if every or advantage != 0.0]
        watched = sorted(set(range(len(batch.samples))) - set(learning))
        packed = self._pack(batch, learning, learns=True) + self._pack(batch, watched, learns=False)
        make_weights = token_mean_weights if algorithm.calculate_per_token_loss else sample_mean_weights
        work = StepWork(batch, packed, inputs, make_weights(batch.lengths_S))
        result = self._learner.step(work)
        record |= loss_metrics(result.loss_values, work.weights_R, batch)
        if batch.rollout_log_probs_R is not None:
            old_R = None if algorithm.use_rollout_logprobs else inputs.old_log_probs_R
            trainer_R = result.log_probs_R if old_R is None else old_R
            record |= gap_metrics(trainer_R, batch.rollout_log_probs_R, work.weights_R)
        record |= {
            "train/grad_norm": result.grad_norm,
            "train/num_micro_batches": len(packed),
            "train/num_skipped_steps": 0,
        }
        return record, {"log_probs": result.log_probs_R, "entropy": result.entropy_R}

    def _rollout_metrics(
        self, batch: TokenBatch, advantages_S: Tensor, inputs: TokenInputs, scores: dict[str, Tensor]
    ) -> dict[str, float]:
        metrics = sample_metrics(batch)
        values = {**scores, "ref_log_probs": inputs.ref_log_probs_R, "rollout_log_probs": batch.rollout_log_probs_R}
        if self._is_policy:
            metrics["rollout/rewards"] = float(advantages_S.mean()) if len(advantages_S) else 0.0
            values |= {"advantages": inputs.advantages_R, "returns": inputs.advantages_R}
        return metrics | token_metrics(batch, values)


def step_bounds(num_samples: int, config: BatchConfig) -> list[tuple[int, int]]:
    """Samples of each optimizer step, as first and one past the last place in canonical order.

    A rollout that lost samples is split evenly into as many steps as its size asks for.
    """
    num_steps = config.num_steps_per_rollout or 1
    if config.global_batch_size is not None:
        num_steps = max(-(-num_samples // config.global_batch_size), 1)
    bounds = [i * num_samples // num_steps for i in range(num_steps + 1)]
    return list(itertools.pairwise(bounds))


def _matching(stem: str, targets: dict[str, Tensor], sources: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    for name, target in targets.items():
        if name not in sources:
            raise CheckpointError(
                f"{stem}: tensor {name!r} is missing; the checkpoint is incomplete or of another model"
            )
        if sources[name].shape != target.shape:
            raise CheckpointError(
                f"{stem}: tensor {name!r} has shape {tuple(sources[name].shape)}, this model needs "
                f"{tuple(target.shape)}; the checkpoint is of another model"
            )
    return [(target, sources[name]) for name, target in targets.items()]


def _encode(rng_state: Tensor) -> str:
    return base64.b64encode(rng_state.numpy().tobytes()).decode("ascii")


def _decode(rng_state: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(rng_state)), dtype=torch.uint8)
