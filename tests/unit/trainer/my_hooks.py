"""Functions of a user, as the flags name them by import path."""

from __future__ import annotations

import torch


def squared(args, log_probs, entropy, inputs):
    return {"loss": inputs.advantages_R * log_probs.square(), "twice": 2 * log_probs.detach()}


def reinforce(args, log_probs, entropy, inputs):
    assert inputs.rollout_log_probs_R.shape == entropy.shape == log_probs.shape
    assert inputs.lengths_S.sum() == len(log_probs) and args.eps_clip > 0
    return -inputs.advantages_R * log_probs


def one_number(args, log_probs, entropy, inputs):
    return log_probs.mean()


def without_gradient(args, log_probs, entropy, inputs):
    return inputs.advantages_R


def raises(args, log_probs, entropy, inputs):
    return inputs.no_such_thing


def raises_later(args, log_probs, entropy, inputs):
    if len(log_probs) > 3:  # more than the example has
        raise KeyError("later")
    return -log_probs


def wrong_signature(log_probs):
    return log_probs


def halve(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **unused):
    """Half the loss of every token, none of the last token of an answer."""
    for mask in loss_masks:
        mask[-1] = 0
    gap = torch.cat([(a - b).abs() for a, b in zip(train_log_probs, rollout_log_probs, strict=True)])
    return 0.5 * pg_loss, loss_masks, {"gap": gap}


def constant_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    mask = torch.cat(loss_masks)
    return lambda values: (values * mask).sum() / 7


def squaring_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: (values + 1).square().sum()
