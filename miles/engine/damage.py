"""Finds where numbers stop being finite. Runs after a failure only: no step pays for it.

Shapes: T tokens of the text, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from miles.model.context import packed_context
from miles.model.decoder import Decoder
from miles.ops.matmul import project_float32

_MAX_SHOWN = 5  # parameters


@torch.no_grad()
def find_damage(model: Decoder, ids_T: np.ndarray) -> str:
    """Computes a text again, without cache and graphs, and names the first part of the model whose output is not
    finite and the parameters that are not."""
    device, found = model.head_weight.device, list[str]()

    def watch(name: str) -> Callable[..., None]:
        def look(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            if not _are_finite(*(outputs if isinstance(outputs, tuple) else (outputs,))):
                found.append(name)

        return look

    hooks = [part.register_forward_hook(watch(name)) for name, part in model.named_modules() if name]
    try:
        hidden_TD = model(torch.from_numpy(ids_T).to(device), packed_context([len(ids_T)], device=device))
    finally:
        for hook in hooks:
            hook.remove()
    if not _are_finite(hidden_TD):
        found.append("norm")
    elif not _are_finite(project_float32(hidden_TD[-1:], model.head_weight)):
        found.append("head")
    bad = {name: int((~parameter.isfinite()).sum()) for name, parameter in model.named_parameters()}
    damaged = {name: count for name, count in bad.items() if count}
    if found:  # the layer's own, where it has some: its norms are seen by what follows them only
        layer = ".".join(found[0].split(".")[:2])
        damaged = {name: count for name, count in damaged.items() if name.startswith(layer)} or damaged
    where = f"they begin in {found[0]}" if found else "computed again without the KV cache, every layer is finite"
    if damaged:
        shown = [f"{name} ({count} not finite)" for name, count in damaged.items()]
        more = f" and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
        return f"{where}; the weights are damaged: {', '.join(shown[:_MAX_SHOWN])}{more}"
    return where + ("; its weights are finite, so its numbers overflow" if found else ": the cache was damaged")


def _are_finite(*tensors: Tensor) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
