"""Finds out whether this device, its libraries and this model have invariant operations, before a run relies on them.

Each operation of the decoder is called with few and with many rows, on tensors of the model's shapes, and the bits are
compared; a layer is walked in one piece, in chunks and token by token. On a CPU larger tiles are tried until all agree.

Shapes: T packed tokens, D hidden, M rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from miles.errors import ConfigError
from miles.model.context import ForwardContext, packed_context
from miles.model.decoder import Decoder
from miles.ops import numerics
from miles.ops.kernels import HEAD_SIZES
from miles.ops.logprob import row_log_probs
from miles.ops.matmul import project_float32
from miles.ops.numerics import CpuTiles
from miles.ops.paged_attention import PagedView
from miles.ops.rope import rope_at

CANDIDATES = (
    *(CpuTiles(rows, query_rows) for rows in (16, 32, 64) for query_rows in (4, 16, 64)),
    *(CpuTiles(16, query_rows, doubles=True) for query_rows in (4, 16, 64)),
)
# One for each number of tiles that 1 to 64 rows can fill, then a few beyond; compared with as many rows as a batch has.
ROWS = (1, 17, 33, 49, 65, 129, 257, 513, 1000)
MANY_ROWS = 1024
LENGTHS = (1, 19, 150, 300)  # of the sequences that a layer reads
PAGE = 16

_proven: dict[tuple[object, ...], CpuTiles] = {}


def require_invariance(model: Decoder, *, flag: str) -> None:
    """Set the tiles of this process to the first that are invariant for this model. Raises a `ConfigError` that names
    the `flag` and what is missing. The same model is tried once in a process."""
    weight = model.head_weight
    shapes = tuple(parameter.shape for parameter in model.layers[0].parameters())  # adapters are among them
    key = (weight.device, weight.dtype, model.spec, shapes)
    if key not in _proven:
        _refuse_unsupported(model, flag)
        _proven[key] = _find_tiles(model, flag)
    best = _proven[key]
    if best != numerics.cpu_tiles():  # another model of this process may need more
        now = numerics.cpu_tiles()
        best = CpuTiles(max(best.rows, now.rows), max(best.query_rows, now.query_rows), best.doubles or now.doubles)
        numerics.set_cpu_tiles(best)


def _refuse_unsupported(model: Decoder, flag: str) -> None:
    spec, weight = model.spec, model.head_weight
    if weight.device.type == "cpu":
        return
    inputs = {weight.shape[1] for name, weight in model.named_parameters() if weight.ndim == 2}
    missing = []
    if spec.head_dim not in HEAD_SIZES:
        missing.append(f"attention for heads of {spec.head_dim} (there is one for {', '.join(map(str, HEAD_SIZES))})")
    if odd := sorted(size for size in inputs if size * weight.element_size() % 16):
        missing.append(f"a matrix product of {odd[0]} inputs (it must be a multiple of {16 // weight.element_size()})")
    if missing:
        raise ConfigError(f"{flag} is not possible for this model on this device: missing is {' and '.join(missing)}")


def _find_tiles(model: Decoder, flag: str) -> CpuTiles:
    before = numerics.cpu_tiles()
    candidates = CANDIDATES if model.head_weight.device.type == "cpu" else CANDIDATES[:1]
    differ: list[str] = []
    try:
        for tiles in candidates:
            numerics.set_cpu_tiles(tiles)
            differ = list(differing(model))
            if not differ:
                return tiles
    finally:
        numerics.set_cpu_tiles(before)
    raise ConfigError(
        f"{flag}: on this device, with torch {torch.__version__}, the bits of {', '.join(differ)} depend on the "
        "batch; leave the flag out, or use another device or build of torch"
    )


@torch.no_grad()
def differing(model: Decoder) -> Iterator[str]:
    """The names of the operations whose bits depend on the number of rows. Leaves the state of random generators."""
    device, dtype = model.head_weight.device, model.head_weight.dtype
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    with numerics.invariant():
        layer, many = model.layers[0], MANY_ROWS
        for part in ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down"):
            product = layer.get_submodule(part)
            x_MD = random(many, product.weight.shape[1])
            if not _is_invariant(lambda x: product(x, packed_context([len(x)], device=device)), x_MD):  # noqa: B023
                yield f"the matrix product {part}"
        head, hidden_MD = model.head_weight, random(many, model.spec.hidden_size)
        if not _is_invariant(lambda x: project_float32(x, head), hidden_MD):
            yield "the matrix product of the head"
        if not _is_invariant(model.norm, hidden_MD):
            yield "the norm"
        logits_MV = random(256, model.spec.vocab_size).float()
        if not _is_invariant(lambda x: row_log_probs(x, x.argmax(-1, keepdim=True)), logits_MV):
            yield "the log-probs"
        lengths = [min(length, model.spec.max_position_embeddings) for length in LENGTHS]
        if not _layer_is_invariant(model, lengths, random(sum(lengths), model.spec.hidden_size)):
            yield "a layer with its attention"


def _is_invariant(operation: Callable[[Tensor], Tensor], x_MD: Tensor) -> bool:
    """Whether the first and the last rows get the same bits alone as among all."""
    all_rows, most = operation(x_MD), len(x_MD)
    counts = [count for count in ROWS if count < most]
    return all(torch.equal(operation(x_MD[:count]), all_rows[:count]) for count in counts) and torch.equal(
        operation(x_MD[-5:].contiguous()), all_rows[-5:]
    )


def _layer_is_invariant(model: Decoder, lengths: list[int], x_TD: Tensor) -> bool:
    """Whether a layer over whole packed sequences equals one over a cache, filled in chunks and token by token."""
    layer, device = model.layers[0], x_TD.device
    context = packed_context(lengths, device=device)
    packed_TD, added_TD = layer(x_TD, None, *rope_at(model.rope_table_SH, context.positions_T), context)
    bounds = context.cu_seqlens.tolist()
    for num_last in (1, 7):  # new tokens of each sequence in the last step
        cache = _Cache(model, lengths)
        done = [max(length - num_last, 0) for length in lengths]
        steps = [*pairwise(sorted({0, *(place for length in done for place in (length // 3, length))}))]
        for first, last in steps:
            cache.walk(layer, x_TD, bounds, [(min(first, d), min(last, d)) for d in done])
        rows, (x, added) = cache.walk(layer, x_TD, bounds, list(zip(done, lengths, strict=True)))
        if not (torch.equal(x, packed_TD[rows]) and torch.equal(added, added_TD[rows])):
            return False
    return True


class _Cache:
    """Keys and values of one layer for a few sequences, whose blocks lie in turn."""

    def __init__(self, model: Decoder, lengths: list[int]) -> None:
        spec, weight = model.spec, model.head_weight
        num_seqs, num_blocks = len(lengths), -(-max(lengths) // PAGE)
        shape = (spec.num_kv_heads, num_seqs * num_blocks * PAGE, spec.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self.table_BP = torch.arange(num_seqs * num_blocks, dtype=torch.int32).view(num_blocks, num_seqs).t()
        self.rope_table_SH = model.rope_table_SH

    def walk(
        self, layer: torch.nn.Module, x_TD: Tensor, bounds: list[int], spans: list[tuple[int, int]]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Compute places first to last - 1 of each sequence: their rows of `x_TD`, and what the layer returns."""
        members = [i for i, (first, last) in enumerate(spans) if last > first]
        places = [torch.arange(*spans[i]) for i in members]
        table_BP, positions_T = self.table_BP[members], torch.cat(places)
        rows_T = torch.cat([bounds[i] + place for i, place in zip(members, places, strict=True)])
        located = zip(members, places, strict=True)
        slots = [self.table_BP[i][place // PAGE] * PAGE + place % PAGE for i, place in located]
        counts = torch.tensor([len(place) for place in places])
        query_bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        contexts_B = torch.tensor([spans[i][1] for i in members], dtype=torch.int32)
        num_blocks = -(-int(contexts_B.max()) // PAGE)
        device = x_TD.device
        view = PagedView(
            [self.k], [self.v], torch.cat(slots).long().to(device), PAGE,
            table_BP[:, :num_blocks].contiguous().to(device), contexts_B.to(device), query_bounds.to(device),
        )  # fmt: skip
        context = ForwardContext(positions_T.to(device), view.query_bounds, int(counts.max()), view)
        rows_T = rows_T.to(device)
        rope = rope_at(self.rope_table_SH, context.positions_T)
        return rows_T, layer(x_TD[rows_T], None, *rope, context)
