from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from miles.model.context import packed_context
from miles.model.flops import forward_flops
from miles.model.load import load_model
from miles.ops.matmul import linear
from tests.unit.model.random_checkpoints import write_checkpoint


def test_products_equal_what_torch_counts(tmp_path):
    write_checkpoint("llama", tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    lengths = [24, 24, 24]

    def run():
        hidden_TD = model(torch.zeros(72, dtype=torch.int64), packed_context(lengths, device="cpu"))
        return linear(hidden_TD, model.head_weight)

    with FlopCounterMode(display=False) as forward, torch.no_grad():
        run()
    products = forward.get_flop_counts()["Global"][torch.ops.aten.mm]
    spec = model.spec
    attention = spec.num_layers * 4 * spec.num_heads * spec.head_dim * sum(n * (n + 1) // 2 for n in lengths)
    assert forward_flops(spec, lengths) == products + attention

    with FlopCounterMode(display=False) as both:
        run().sum().backward()
    assert 3 * forward_flops(spec, lengths) == both.get_flop_counts()["Global"][torch.ops.aten.mm] + 3 * attention


def test_a_head_of_fewer_positions_costs_less(tmp_path):
    write_checkpoint("llama", tmp_path)
    spec = load_model(tmp_path, dtype=torch.float32, device="meta").spec
    saved = forward_flops(spec, [10, 5]) - forward_flops(spec, [10, 5], num_head_tokens=4)
    assert saved == 2 * 11 * 211 * 48
