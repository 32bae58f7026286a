"""The trainer of one process: scores a rollout, makes its optimizer steps, reports, saves and loads.

Answers whose tokens all have an advantage of exactly 0 have no gradient in the policy loss unless a KL, entropy or
distillation term is in it; they are still scored, without a backward pass, so every metric covers every answer.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from miles.config.resolve import reads_reference
from miles.config.sections import BatchConfig, RunConfig
from miles.errors import CheckpointError, NotFiniteError, TrainError
from miles.model.decoder import Decoder
from miles.model.flops import forward_flops
from miles.model.invariance import require_invariance
from miles.model.lora import to_peft
from miles.model.names import to_hf
from miles.observe.log import get_logger
from miles.observe.timers import Timers
from miles.trainer.batch import MicroBatch, TokenBatch, micro_batches, name_samples, token_batch
from miles.trainer.checks import check_rollout, rescore_in_another_packing
from miles.trainer.corrections import correction_in_use
from miles.trainer.critic import Critic
from miles.trainer.forward import Scorer
from miles.trainer.hooks import load_hooks
from miles.trainer.judge import Judge, Judged
from miles.trainer.limits import apply_limits, find_limits
from miles.trainer.losses import TokenInputs
from miles.trainer.metrics import gap_metrics, group_metrics, loss_metrics, sample_metrics, token_metrics
from miles.trainer.optim import Optimizer
from miles.trainer.packing import canonical_order
from miles.trainer.ratios import answer_sums
from miles.trainer.reduce import make_weights
from miles.trainer.rewards import sample_advantages
from miles.trainer.signal import token_signal
from miles.trainer.step import Learner, StepWork
from miles.types import TrainResult, TrainSample

logger = get_logger(__name__)


class LocalTrainer:
    """Implements `Trainer` of `types.py`. The parameters of `model` and `critic` are updated in place and never move.

    `reference` and `teacher` are only scored. `total_steps` is the number of optimizer steps of the whole run.
    """

    def __init__(
        self,
        model: Decoder,
        reference: Decoder | None,
        config: RunConfig,
        *,
        total_steps: int,
        teacher: Decoder | None = None,
        critic: Decoder | None = None,
    ) -> None:
        algorithm = config.algorithm
        needs_reference = reads_reference(algorithm)
        assert reference is not None or not needs_reference, "--use-kl-loss and --kl-coef need a reference model"
        assert (teacher is not None) == algorithm.use_opd, "--use-opd and a teacher belong together"
        self.is_policy = algorithm.loss_type != "sft_loss"
        needs_critic = self.is_policy and algorithm.advantage_estimator == "ppo"
        assert (critic is not None) == needs_critic, "ppo and a critic belong together"
        self.model = model
        self.config = config
        self.device = model.head_weight.device
        self.optimizer = Optimizer(model, config.optim, total_steps=total_steps)
        self.critic = None if critic is None else Critic(critic, config, total_steps=total_steps)
        self.offloaded_bytes = 0  # of the GPU, since `offload`
        self.num_steps = 0  # optimizer steps so far, those without a trained token included
        limits = find_limits(model, config)
        self.max_tokens = limits.max_tokens
        for trained in (model, critic):
            if trained is not None:
                apply_limits(limits, trained)
        # Supervised targets were not drawn at any temperature.
        temperature = config.rollout.rollout_temperature if self.is_policy else 1.0
        exact = config.numerics.true_on_policy_mode
        if exact:
            require_invariance(model, flag="--true-on-policy-mode")
        self._scorer = Scorer(temperature, limits.chunk_size, invariant=exact)
        self._hooks = load_hooks(config)
        max_gap = config.checks.max_logprob_gap if self.is_policy else 0.0
        self._learner = Learner(model, self.optimizer, self._scorer, self._hooks.loss, algorithm, max_gap)
        reference = reference if needs_reference else None
        self._judge = Judge(model, reference, teacher, self.critic, self._scorer, algorithm)
        self._timers = Timers()
        self._is_checked = config.checks.ci_disable_kl_checker
        self._oldest_age = 0  # largest age of a sample so far, in weight versions
        torch.manual_seed(config.optim.seed)  # of the whole process: its state is saved and loaded

    def train(self, samples: Sequence[TrainSample], *, rollout_id: int, weight_version: int) -> TrainResult:
        """Make the optimizer steps of one rollout. Raises `TrainError` when numbers are not finite or not plausible."""
        versions = {weight_version}.union(*(sample.weight_versions or () for sample in samples))
        if (ahead := max(versions)) > weight_version:
            wrong = [sample.index for sample in samples if ahead in (sample.weight_versions or ())]
            raise TrainError(f"samples {name_samples(wrong)} are of weights that do not exist yet ({ahead})")
        self._check_samples(samples)
        with self._timers.span("data_preprocess"):
            batch, num_broken = self._batch(canonical_order(samples))
            advantages_S, scored_S = self._advantages(batch)
            steps = step_bounds(len(samples), self.config.batch)
            age = self._note_age(weight_version - min(versions))
        checked = self._check_packing(batch)
        judged = Judged()
        if batch.num_tokens > 0 and self._judge.passes(num_steps=len(steps)):
            packed = self._pack(batch, range(len(batch.samples)), learns=False)
            judged = self._judge.judge(packed, self._timers, num_steps=len(steps))
        inputs = self._inputs(batch, advantages_S, scored_S, judged, num_steps=len(steps))
        updates_policy = self.critic is None or rollout_id >= self.config.critic.num_critic_only_steps
        begun = self.optimizer.num_updates
        records: list[dict[str, float]] = []
        step_scores: list[dict[str, Tensor]] = []
        for start, stop in steps:
            part, places = batch.part(start, stop)
            record, values = self._step(part, inputs.take(places, part.lengths_S), updates=updates_policy, begun=begun)
            records.append({"train/step": self.num_steps + len(records), **record})
            step_scores.append(values)
        self.num_steps += len(steps)
        records[0] |= checked
        records[0]["train/num_not_finite"] += num_broken
        if self.config.checks.ci_test and not self.config.checks.ci_disable_kl_checker and "train/ppo_kl" in records[0]:
            check_rollout(records[0], detached=inputs.old_log_probs_R is None, dtype=self.model.head_weight.dtype)
        scores = {name: torch.cat([values[name] for values in step_scores]) for name in ("log_probs", "entropy")}
        if any(record["train/num_not_finite"] and record["train/num_skipped_steps"] for record in records):
            scores = {}
        elif judged.tokens.policy_R is not None and judged.entropy_R is not None:
            scores = {"log_probs": judged.tokens.policy_R, "entropy": judged.entropy_R}
        rollout = self._rollout_metrics(batch, advantages_S, inputs, judged, scores)
        rollout["rollout/max_sample_age"] = float(age)
        seconds = {"log_probs": 0.0, "ref_log_probs": 0.0, "actor_train": 0.0, **self._timers.take()}
        return TrainResult(rollout, records, seconds)

    def save(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Float32 masters and Adam moments of what is trained, by published names, the critic's too, and a JSON state.

        The tensors are the live ones: write them before the next call of `train`.
        """
        state = {
            "num_updates": self.optimizer.num_updates,
            "num_steps": self.num_steps,
            "oldest_age": self._oldest_age,
            "rng": _encode(torch.get_rng_state()),
        }
        if self.critic is not None:
            state["num_critic_updates"] = self.critic.optimizer.num_updates
        if self.device.type == "cuda":
            state["rng_cuda"] = _encode(torch.cuda.get_rng_state(self.device))
        return self._live_tensors(), state

    @torch.no_grad()
    def load(self, tensors: dict[str, dict[str, Any]], state: dict[str, Any]) -> None:
        """Copy a saved state in place. A missing or misshapen tensor is a `CheckpointError`; then nothing is copied."""
        live = self._live_tensors()
        if missing := [stem for stem in live if stem not in tensors]:
            raise CheckpointError(
                f"the checkpoint has no {' and no '.join(missing)}: it is of a run with another --advantage-estimator "
                "or --lora-rank"
            )
        pairs = [pair for stem, targets in live.items() for pair in _matching(stem, targets, tensors[stem])]
        for target, source in pairs:
            target.copy_(source)
        self.optimizer.resume(state["num_updates"])
        if self.critic is not None:
            self.critic.optimizer.resume(state["num_critic_updates"])
        self.num_steps = state["num_steps"]
        self._oldest_age = state.get("oldest_age", 0)  # an older version saved none
        torch.set_rng_state(_decode(state["rng"]))
        if self.device.type == "cuda" and "rng_cuda" in state:
            torch.cuda.set_rng_state(_decode(state["rng_cuda"]), self.device)

    def offload(self) -> None:
        """Move what only an update needs from the GPU to the host: 16 of 18 bytes of a parameter. `save` and `load`
        work on what is there."""
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            for optimizer in self._optimizers():
                optimizer.offload()
            torch.cuda.empty_cache()  # for others, the KV cache among them
            self.offloaded_bytes = before - torch.cuda.memory_allocated(self.device)
            logger.info(f"the trainer has moved its states to the host: {self.offloaded_bytes / 2**30:.2f} GiB freed")

    def onload(self) -> None:
        """Take them back, for `train`."""
        if self.offloaded_bytes:
            for optimizer in self._optimizers():
                optimizer.onload()
            self.offloaded_bytes = 0

    @property
    def num_updates(self) -> int:
        """Of the weights, the critic's too."""
        return sum(optimizer.num_updates for optimizer in self._optimizers())

    def _optimizers(self) -> list[Optimizer]:
        return [self.optimizer] if self.critic is None else [self.optimizer, self.critic.optimizer]

    def _live_tensors(self) -> dict[str, dict[str, Tensor]]:
        masters = {name: master.detach() for name, master in self.optimizer.masters.items()}
        moments = self.optimizer.moments(self._published)
        critic = {} if self.critic is None else self.critic.live_tensors()
        what = "model" if self.model.lora is None else "adapter"
        return {what: self._published(masters), "optimizer": moments, **critic}

    def _published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Under the names that other programs know: all of the model, or its adapters when only they are trained."""
        return to_hf(self.model.spec, tensors) if self.model.lora is None else to_peft(self.model, tensors)

    def _advantages(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        if not self.is_policy:
            num_samples = len(batch.samples)
            return torch.zeros(num_samples, dtype=torch.float64), torch.ones(num_samples, dtype=torch.bool)
        return sample_advantages(batch.samples, self.config)

    def _batch(self, samples: Sequence[TrainSample]) -> tuple[TokenBatch, int]:
        """The trained tokens, and how many samples were left out because the engine's log-probs are not finite."""
        try:
            return token_batch(samples, self.device), 0
        except NotFiniteError as error:
            self._skip(error, "they are left out")
            broken = error.samples
        kept = [replace(s, loss_mask=[0] * s.response_length) if s.index in broken else s for s in samples]
        return token_batch(kept, self.device), len(broken)

    def _skip(self, error: NotFiniteError, consequence: str) -> None:
        if self.config.checks.on_not_finite == "stop":
            raise error
        logger.warning(f"{error}; {consequence} (--on-not-finite skip)")

    def _check_packing(self, batch: TokenBatch) -> dict[str, float]:
        """Once in a process. A resumed run reports only what it would have reported without the stop."""
        if self._is_checked:
            return {}
        self._is_checked = True
        found = rescore_in_another_packing(self.model, self._scorer, batch, self.config, max_tokens=self.max_tokens)
        return found if self.num_steps == 0 else {}

    def _check_samples(self, samples: Sequence[TrainSample]) -> None:
        rollout, trained = self.config.rollout, [s for s in samples if any(s.loss_mask)]
        last_id, context = self.model.spec.vocab_size - 1, self.model.spec.max_position_embeddings
        # a GPU would be of no more use after such an id
        if wrong := [s.index for s in trained if not 0 <= min(s.tokens) <= max(s.tokens) <= last_id]:
            raise TrainError(f"samples {name_samples(wrong)} have token ids that are not from 0 to {last_id}")
        if long := [s.index for s in trained if len(s.tokens) > context]:
            raise TrainError(f"samples {name_samples(long)} have more tokens than the {context} of the model's context")
        cuts = rollout.rollout_top_k > 0 or rollout.rollout_top_p < 1.0 or rollout.rollout_min_p > 0.0
        lacking = [sample.index for sample in trained if sample.kept_token_ids is None]
        if lacking and self.is_policy and (cuts or any(sample.kept_token_ids is not None for sample in samples)):
            raise TrainError(
                f"with top-k, top-p or min-p the engine returned no kept sets for samples {name_samples(lacking)}; "
                "scored over all tokens every ratio would be wrong. Use an engine that returns them, or no cut"
            )

    def _note_age(self, age: int) -> int:
        """Versions between the oldest token and the weights. When that grows, say what is done and what is advised."""
        if age > self._oldest_age and self.is_policy:
            correction = correction_in_use(self.config.algorithm, oldest_age=age)
            if self._oldest_age == 0:
                logger.info(
                    f"samples are older than the weights: off-policy correction {correction or 'none'} "
                    f"(--off-policy-correction {self.config.algorithm.off_policy_correction})"
                )
            self._oldest_age = age
            logger.warning(
                f"samples are up to {age} weight versions old. The largest stable --lr falls in proportion to the "
                f"steps between weight updates: divide a rate that is right for fresh samples by {age + 1}"
            )
        return age

    def _inputs(
        self, batch: TokenBatch, advantages_S: Tensor, scored_S: Tensor, judged: Judged, *, num_steps: int
    ) -> TokenInputs:
        algorithm, rollout_R = self.config.algorithm, batch.rollout_log_probs_R
        if not self.is_policy:
            return TokenInputs(batch.spread(advantages_S).float())
        signal = token_signal(advantages_S, batch.lengths_S, judged.tokens, algorithm, scored_S=scored_S)
        old_R = judged.tokens.policy_R if num_steps > 1 else None
        if algorithm.use_rollout_logprobs:
            assert rollout_R is not None, "--use-rollout-logprobs: the samples carry no log-probs"
            old_R = rollout_R
        if algorithm.use_score_centering:
            assert batch.engine_top is not None or batch.num_tokens == 0, "the engine returned no most likely tokens"
        return TokenInputs(
            advantages_R=signal.advantages_R,
            old_log_probs_R=old_R,
            ref_log_probs_R=judged.tokens.ref_R,
            rollout_log_probs_R=rollout_R,
            returns_R=signal.returns_R,
            values_R=judged.tokens.values_R,
            teacher_top=judged.teacher_top,
            engine_top=batch.engine_top if algorithm.use_score_centering else None,
            correction=correction_in_use(algorithm, oldest_age=self._oldest_age),
            custom_correction=self._hooks.correct,
        )

    def _pack(self, batch: TokenBatch, members: Sequence[int], *, learns: bool) -> list[MicroBatch]:
        return micro_batches(
            batch,
            members,
            max_tokens=self.max_tokens,
            max_samples=self.config.batch.micro_batch_size,
            learns=learns,
            share=self.config.batch.share_prompts_in_training,
            cost=self._sequence_flops if self.config.batch.balance_by_flops else int,
        )

    def _sequence_flops(self, num_tokens: int) -> int:
        return forward_flops(self.model.spec, [num_tokens])

    def _step(
        self, batch: TokenBatch, inputs: TokenInputs, *, updates: bool, begun: int
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """One optimizer step: its record, and log-prob and entropy of its tokens. Without `updates` the policy is only
        scored. `begun`: the updates that had been made when the rollout came."""
        nothing = ("train/loss", "train/grad_norm", "train/num_micro_batches", "train/tflop", "train/num_not_finite")
        record = dict.fromkeys(nothing, 0.0) | {
            "train/lr-pg_0": self.optimizer.learning_rate,
            "train/num_samples": len(batch.samples),
            "train/num_tokens": batch.num_tokens,
            "train/num_skipped_steps": 1,
        }
        nothing_R = torch.empty(0, device=self.device)
        if batch.num_tokens == 0:
            return record, {"log_probs": nothing_R, "entropy": nothing_R}
        try:
            return self._update(batch, inputs, record, updates=updates, begun=begun)
        except NotFiniteError as error:
            self._skip(error, "the optimizer step is skipped")
            record["train/num_not_finite"] = max(len(error.samples), 1)
            return record, {"log_probs": nothing_R, "entropy": nothing_R}

    def _update(
        self, batch: TokenBatch, inputs: TokenInputs, record: dict[str, float], *, updates: bool, begun: int
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        weights_R = make_weights(batch.lengths_S, batch.samples, self.config, reducer=self._hooks.reducer)
        if self.critic is not None:
            record = record | self._step_critic(batch, inputs, weights_R)
        learning = self._learning(inputs) if updates else []
        watched = sorted(set(range(len(batch.samples))) - set(learning))
        packed = self._pack(batch, learning, learns=True) + self._pack(batch, watched, learns=False)
        work = StepWork(batch, packed, inputs, weights_R, is_first=self.optimizer.num_updates == begun)
        with self._timers.span("actor_train"):
            result = self._learner.step(work, updates=updates)
        passes = 3 if self.model.lora is None else 2  # frozen weights need no gradient
        record = record | loss_metrics(result.loss_values, weights_R, batch)
        if (both := self._learner.comparable_log_probs(work, result)) is not None:
            record |= gap_metrics(*both, weights_R)
        record |= {
            "train/grad_norm": result.grad_norm,
            "train/num_micro_batches": len(packed),
            "train/num_skipped_steps": int(not updates),
            "train/tflop": sum(self._forward_flops(mb) * (passes if mb.learns else 1) for mb in packed) / 1e12,
        }
        return record, {"log_probs": result.log_probs_R, "entropy": result.entropy_R}

    def _step_critic(self, batch: TokenBatch, inputs: TokenInputs, weights_R: Tensor) -> dict[str, float]:
        assert self.critic is not None and inputs.values_R is not None and inputs.returns_R is not None, "ppo has all"
        packed = self._pack(batch, range(len(batch.samples)), learns=True)
        with self._timers.span("critic_train"):
            return self.critic.step(
                packed, old_values_R=inputs.values_R, returns_R=inputs.returns_R, weights_R=weights_R
            )

    def _forward_flops(self, micro_batch: MicroBatch) -> int:
        """A backward pass takes as many for the inputs, and for the weights, of the products."""
        lengths, shared = zip(*micro_batch.reads, strict=True)
        num_head_tokens = micro_batch.targets_R.numel()
        return forward_flops(self.model.spec, lengths, num_head_tokens=num_head_tokens, shared=shared)

    def _learning(self, inputs: TokenInputs) -> list[int]:
        """The samples that can have a gradient."""
        algorithm = self.config.algorithm
        assert inputs.lengths_S is not None, "the inputs of a step have lengths"
        everyone = list(range(len(inputs.lengths_S)))
        if algorithm.loss_type != "policy_loss" or algorithm.entropy_coef != 0.0 or algorithm.use_kl_loss:
            return everyone
        if inputs.teacher_top is not None:
            return everyone
        signal_S = answer_sums(inputs.advantages_R.abs(), inputs.lengths_S).tolist()
        return [i for i in everyone if signal_S[i] != 0.0]

    def _rollout_metrics(
        self,
        batch: TokenBatch,
        advantages_S: Tensor,
        inputs: TokenInputs,
        judged: Judged,
        scores: dict[str, Tensor],
    ) -> dict[str, float]:
        metrics = sample_metrics(batch)
        tokens = judged.tokens
        values = {**scores, "ref_log_probs": tokens.ref_R, "rollout_log_probs": batch.rollout_log_probs_R}
        if self.is_policy:
            metrics["rollout/rewards"] = float(advantages_S.mean()) if len(advantages_S) else 0.0
            metrics |= group_metrics(batch, inputs.advantages_R)
            values |= {"advantages": inputs.advantages_R, "returns": inputs.returns_R}
            values |= {"teacher_log_probs": tokens.teacher_R, "values": tokens.values_R}
            if tokens.teacher_R is not None and tokens.policy_R is not None:
                values["opd_reverse_kl"] = tokens.policy_R - tokens.teacher_R
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
        if (sources[name].dtype == torch.uint8) != (target.dtype == torch.uint8):
            raise CheckpointError(
                f"{stem}: {name!r} is {sources[name].dtype} in the checkpoint and {target.dtype} here: Adam states of "
                "8 bit cannot be converted. Give the --adam-state it was saved with, or start afresh from its weights "
                "with --init-from"
            )
        if sources[name].shape != target.shape:
            raise CheckpointError(
                f"{stem}: tensor {name!r} has shape {tuple(sources[name].shape)}, this model needs "
                f"{tuple(target.shape)}; the checkpoint is of another model or --lora-rank"
            )
    return [(target, sources[name]) for name, target in targets.items()]


def _encode(rng_state: Tensor) -> str:
    return base64.b64encode(rng_state.numpy().tobytes()).decode("ascii")


def _decode(rng_state: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(rng_state)), dtype=torch.uint8)
