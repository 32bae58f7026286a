"""From numbers per token to one number: the weight of each trained token in a mean over the whole optimizer step.

A loss is `sum(weights_R * loss_R)`, whatever the micro-batches are, since every weight is made from counts of the whole
step. R: trained tokens; S: samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from miles.config.sections import RunConfig
from miles.errors import TrainError
from miles.types import TrainSample

Reducer = Callable[..., Callable[[Tensor], Tensor]]


def sample_mean_weights(lengths_S: Tensor, answers_S: Tensor | None = None) -> Tensor:
    """Mean per answer, then mean over the answers: 1 / (tokens of the answer * answers). Float64.

    Answers without a trained token carry no information and are not counted. `answers_S` numbers the answers from 0
    where some have several rows: these weigh as one.
    """
    lengths_A = _by_answer(lengths_S, answers_S)
    tokens_S = lengths_A if answers_S is None else lengths_A[answers_S]
    weights_S = 1.0 / (tokens_S.double().clamp(min=1.0) * max(int((lengths_A > 0).sum()), 1))
    return weights_S.repeat_interleave(lengths_S)


def _by_answer(lengths_S: Tensor, answers_S: Tensor | None) -> Tensor:
    if answers_S is None:
        return lengths_S
    return lengths_S.new_zeros(int(answers_S.max()) + 1).index_add(0, answers_S, lengths_S)


def answers_of(samples: Sequence[TrainSample], device: torch.device) -> Tensor | None:
    """The number of each sample's answer; None when every answer is one row."""
    keys = [(sample.group_index, sample.index) for sample in samples]
    number = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return None if len(number) == len(keys) else torch.tensor([number[key] for key in keys], device=device)


def token_mean_weights(lengths_S: Tensor) -> Tensor:
    """Mean over all tokens of the step: 1 / tokens (DAPO, arXiv 2503.14476). Float64."""
    num_tokens = int(lengths_S.sum())
    return torch.full((num_tokens,), 1.0 / max(num_tokens, 1), dtype=torch.float64, device=lengths_S.device)


def constant_weights(lengths_S: Tensor, answers_S: Tensor | None = None, *, length: float) -> Tensor:
    """Sum over the tokens of an answer divided by one length for all, then mean over the answers: long answers weigh
    more, as in the policy gradient itself (Dr.GRPO, arXiv 2503.20783). Float64.
    """
    num_answers = int((_by_answer(lengths_S, answers_S) > 0).sum())
    weight = 1.0 / (length * max(num_answers, 1))
    return torch.full((int(lengths_S.sum()),), weight, dtype=torch.float64, device=lengths_S.device)


def reducer_weights(reducer: Reducer, samples: Sequence[TrainSample], *, per_token: bool) -> Tensor:
    """The weights behind a reducer of the user, which sums values of all response tokens: its slope, over the answers.

    Whatever is linear can be had this way, and then neither micro-batches nor packing matter.
    """
    masks = [torch.tensor(sample.loss_mask, dtype=torch.float64) for sample in samples]
    lengths = [sample.response_length for sample in samples]
    reduce_values = reducer([len(sample.tokens) for sample in samples], lengths, masks, per_token)
    values = torch.zeros(sum(lengths), dtype=torch.float64, requires_grad=True)
    (weights,) = torch.autograd.grad(reduce_values(values).sum(), values)
    probe = torch.linspace(0.5, 1.5, sum(lengths), dtype=torch.float64)
    if not torch.allclose(reduce_values(probe), (weights * probe).sum()):
        raise TrainError(
            "--custom-pg-loss-reducer-function-path: the reducer is not a weighted sum of the values it is given, so "
            "its result would depend on the micro-batches"
        )
    if float(weights.sum()) <= 0:
        raise TrainError("--custom-pg-loss-reducer-function-path: the weights of the tokens do not sum to more than 0")
    num_samples = sum(bool(mask.any()) for mask in masks)
    return weights[torch.cat(masks) > 0] / max(num_samples, 1)


def make_weights(
    lengths_S: Tensor, samples: Sequence[TrainSample], config: RunConfig, *, reducer: Reducer | None = None
) -> Tensor:
    """The weight of each token of an optimizer step, as the flags ask for it."""
    algorithm = config.algorithm
    if reducer is not None:
        weights_R = reducer_weights(reducer, samples, per_token=algorithm.calculate_per_token_loss)
        return weights_R.to(lengths_S.device)
    if algorithm.calculate_per_token_loss:
        return token_mean_weights(lengths_S)
    constant = algorithm.loss_constant_length
    if constant is None and algorithm.advantage_estimator == "dr_grpo" and algorithm.loss_type != "sft_loss":
        constant = config.rollout.rollout_max_response_len
    answers_S = answers_of(samples, lengths_S.device)
    if constant is None:
        return sample_mean_weights(lengths_S, answers_S)
    return constant_weights(lengths_S, answers_S, length=constant)


def weighted_sum(values_R: Tensor, weights_R: Tensor) -> float:
    """A metric: the mean that the weights stand for, summed in float64."""
    return float((values_R.double() * weights_R).sum())
