"""Functions of the user that take part in the loss: loaded, and called once on a small example before a run starts.

R: trained tokens; S: samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from miles.config.flags import Args
from miles.config.sections import AlgorithmConfig, RunConfig
from miles.errors import PluginError
from miles.plugins import check_signature, describe_error, load_function
from miles.trainer.losses import LOSSES, CustomCorrection, LossFunction, TokenInputs
from miles.trainer.reduce import Reducer, make_weights
from miles.types import TrainSample

LOSS_FLAG = "--custom-loss-function-path"
TIS_FLAG = "--custom-tis-function-path"
REDUCER_FLAG = "--custom-pg-loss-reducer-function-path"
TIS_ARGUMENTS = (
    *("args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks"),
    *("total_lengths", "response_lengths", "parallel_state", "max_seq_lens"),
)


@dataclass(frozen=True, slots=True)
class Hooks:
    """The loss that is minimised, whoever wrote it, and what replaces the built-in correction and the mean."""

    loss: LossFunction
    correct: CustomCorrection | None = None
    reducer: Reducer | None = None


def load_hooks(config: RunConfig) -> Hooks:
    """Load what the flags name and try it. Raises `PluginError` that names the flag and the user's line."""
    algorithm, args = config.algorithm, Args(config)
    correct = reducer = None
    if algorithm.custom_tis_function_path is not None:
        correct = _load_correction(algorithm.custom_tis_function_path, args)
    if algorithm.custom_pg_loss_reducer_function_path is not None:
        reducer = _load_reducer(algorithm.custom_pg_loss_reducer_function_path, config)
    if algorithm.loss_type != "custom_loss":
        return Hooks(LOSSES[algorithm.loss_type], correct, reducer)
    assert algorithm.custom_loss_function_path is not None, "rules.py demands --custom-loss-function-path"
    return Hooks(_load_loss(algorithm.custom_loss_function_path, config), correct, reducer)


def _load_loss(path: str, config: RunConfig) -> LossFunction:
    function = load_function(path, flag=LOSS_FLAG)
    check_signature(function, "args", "log_probs", "entropy", "inputs", path=path, flag=LOSS_FLAG)
    args = Args(config)

    def loss(log_probs_R: Tensor, entropy_R: Tensor, inputs: TokenInputs, _: AlgorithmConfig) -> dict[str, Tensor]:
        returned = _call(function, args, log_probs_R, entropy_R, inputs, path=path, flag=LOSS_FLAG)
        values = dict(returned) if isinstance(returned, dict) else {"loss": returned}
        for name, value_R in values.items():
            if not isinstance(value_R, Tensor) or value_R.shape != log_probs_R.shape:
                raise PluginError(
                    f"{LOSS_FLAG} {path}: {name!r} must be a tensor with one number per token, of shape "
                    f"{tuple(log_probs_R.shape)}; how tokens are averaged is decided by other flags"
                )
        if "loss" not in values:
            raise PluginError(f"{LOSS_FLAG} {path}: the returned dict has no 'loss', only {', '.join(values)}")
        custom = {f"custom_{name}": value_R for name, value_R in values.items() if name != "loss"}
        return {"loss": values["loss"], "entropy_loss": entropy_R, **custom}

    log_probs_R = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    entropy_R = torch.tensor([0.5, 0.6, 0.7], requires_grad=True)
    if not loss(log_probs_R, entropy_R, _example(), config.algorithm)["loss"].requires_grad:
        raise PluginError(f"{LOSS_FLAG} {path}: the loss has no gradient; it must be made from log_probs or entropy")
    return loss


def _load_correction(path: str, args: Args) -> CustomCorrection:
    function = load_function(path, flag=TIS_FLAG)
    try:
        inspect.signature(function).bind(**dict.fromkeys(TIS_ARGUMENTS))
    except TypeError as error:
        raise PluginError(
            f"{TIS_FLAG} {path}: is called with the keywords {', '.join(TIS_ARGUMENTS)}: {error}"
        ) from None

    def correct(pg_loss_R: Tensor, old_R: Tensor, rollout_R: Tensor, lengths_S: Tensor) -> dict[str, Tensor]:
        lengths = lengths_S.tolist()
        masks = [torch.ones(length, device=old_R.device) for length in lengths]
        log_probs = list(old_R.split(lengths)), list(rollout_R.split(lengths))
        given = zip(TIS_ARGUMENTS, (args, pg_loss_R, *log_probs, masks, lengths, lengths, None, None), strict=True)
        new_loss_R, masks, metrics = _call(function, path=path, flag=TIS_FLAG, **dict(given))
        values = {f"custom_{name}": value_R for name, value_R in metrics.items()}
        for name, value_R in {"pg_loss": new_loss_R, **values}.items():
            if value_R.shape != pg_loss_R.shape:
                raise PluginError(f"{TIS_FLAG} {path}: {name!r} must have one number per token")
        return {**values, "pg_loss": new_loss_R * torch.cat(list(masks))}

    example = _example()
    rollout_R, lengths_S = example.rollout_log_probs_R, example.lengths_S
    assert rollout_R is not None and lengths_S is not None, "the example has both"
    pg_loss_R = -example.advantages_R.clone().requires_grad_()
    _call(correct, pg_loss_R, rollout_R + 0.1, rollout_R, lengths_S, path=path, flag=TIS_FLAG)
    return correct


def _load_reducer(path: str, config: RunConfig) -> Reducer:
    reducer = load_function(path, flag=REDUCER_FLAG)
    given = ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss")
    check_signature(reducer, *given, path=path, flag=REDUCER_FLAG)
    samples = [TrainSample([1] * (n + 2), n, [1] * n, 0.0, 0.0, 0, n) for n in (2, 3)]
    weigh = partial(make_weights, torch.tensor([2, 3]), samples, config, reducer=reducer)
    _call(weigh, path=path, flag=REDUCER_FLAG)
    return reducer


def _example() -> TokenInputs:
    """Two answers of one and two tokens."""
    log_probs_R = torch.tensor([-0.6, -1.1, -1.9])
    return TokenInputs(
        advantages_R=torch.tensor([1.0, -1.0, -1.0]),
        old_log_probs_R=log_probs_R,
        ref_log_probs_R=log_probs_R,
        lengths_S=torch.tensor([1, 2]),
        rollout_log_probs_R=log_probs_R,
        returns_R=torch.tensor([1.0, 0.0, 0.0]),
    )


def _call(function: Callable[..., Any], *arguments: Any, path: str, flag: str, **named: Any) -> Any:
    try:
        return function(*arguments, **named)
    except PluginError:
        raise
    except Exception as error:  # fault boundary: this is code of the user, which can raise anything
        raise PluginError(f"{flag} {path}: failed: {describe_error(error, function=function)}") from error
