"""What has to be known of a rollout before its first update: log-probs by the old policy, the reference and a teacher,
and the values of a critic. Each is one pass without gradient, made only when something reads it.

Old policy. A rollout that makes one optimizer step needs no pass for the old log-probs: such a pass would run with the
very weights of the step, so the detached current log-probs are the old ones and every ratio is exactly 1. With several
steps the samples are scored once before the first update. `--use-rollout-logprobs` takes the engine's instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from miles.config.resolve import scores_policy
from miles.config.sections import AlgorithmConfig
from miles.model.decoder import Decoder
from miles.observe.timers import Timers
from miles.trainer.batch import MicroBatch
from miles.trainer.critic import Critic
from miles.trainer.forward import Scorer
from miles.trainer.partition import TopLogProbs
from miles.trainer.signal import Judgements


@dataclass(frozen=True, slots=True)
class Judged:
    """`entropy_R` belongs to the policy's log-probs in `tokens`."""

    tokens: Judgements = Judgements()
    entropy_R: Tensor | None = None
    teacher_top: TopLogProbs | None = None


@dataclass(frozen=True, slots=True)
class Judge:
    """The models that judge a rollout; None where the flags ask for none.

    A reference that is the policy itself is the policy without its adapters: what it was before LoRA.
    """

    policy: Decoder
    reference: Decoder | None
    teacher: Decoder | None
    critic: Critic | None
    scorer: Scorer
    config: AlgorithmConfig

    def passes(self, *, num_steps: int) -> bool:
        """Whether anything has to be scored."""
        others = (self.reference, self.teacher, self.critic)
        return scores_policy(self.config, num_steps=num_steps) or any(model is not None for model in others)

    def judge(self, micro_batches: Sequence[MicroBatch], timers: Timers, *, num_steps: int) -> Judged:
        """Score the tokens of these micro-batches, which together cover a batch."""
        policy_R = entropy_R = ref_R = teacher_R = values_R = teacher_top = None
        if scores_policy(self.config, num_steps=num_steps):
            with timers.span("log_probs"):
                policy_R, entropy_R = self.scorer.score_all(self.policy, micro_batches)
        if self.reference is not None:
            with timers.span("ref_log_probs"):
                adapter = self.reference is not self.policy
                ref_R, _ = self.scorer.score_all(self.reference, micro_batches, adapter=adapter)
        if self.teacher is not None:
            with timers.span("teacher_log_probs"):
                if self.config.opd_log_prob_top_k > 0:
                    teacher_top = self.scorer.top_all(self.teacher, micro_batches, self.config.opd_log_prob_top_k)
                else:
                    teacher_R, _ = self.scorer.score_all(self.teacher, micro_batches)
        if self.critic is not None:
            with timers.span("values"):
                values_R = self.critic.values(micro_batches)
        return Judged(Judgements(policy_R, ref_R, teacher_R, values_R), entropy_R, teacher_top)
