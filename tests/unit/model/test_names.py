from __future__ import annotations

import pytest
import torch

from miles.model.decoder import Decoder
from miles.model.names import name_table, to_hf
from miles.model.spec import load_spec
from tests.unit.model.random_checkpoints import CHECKPOINTS, write_checkpoint


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_the_map_is_lossless_both_ways(case, tmp_path):
    reference = write_checkpoint(case, tmp_path)
    spec = load_spec(tmp_path)
    published = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    parts = {}
    for entry in name_table(spec):
        parts.setdefault(entry.name, []).append(published[entry.hf_name])
    ours = {name: torch.cat(rows) for name, rows in parts.items()}
    shapes = {
        name: parameter.shape
        for name, parameter in Decoder(spec, dtype=torch.float32, device="meta").named_parameters()
    }
    assert {name: tensor.shape for name, tensor in ours.items()} == shapes
    back = to_hf(spec, ours)
    assert back.keys() == published.keys()
    assert all(torch.equal(back[name], published[name]) for name in published)


def test_our_names_map_to_views_that_share_memory(tmp_path):
    write_checkpoint("qwen3", tmp_path)
    spec = load_spec(tmp_path)
    model = Decoder(spec, dtype=torch.float32, device="cpu")
    published = to_hf(spec, {name: parameter.detach() for name, parameter in model.named_parameters()})
    published["model.layers.1.self_attn.k_proj.weight"].fill_(7.0)
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    assert (model.get_parameter("layers.1.attention.qkv.weight")[q_rows : q_rows + kv_rows] == 7.0).all()
