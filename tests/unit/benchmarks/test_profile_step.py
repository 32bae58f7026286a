"""Where the time of a rollout goes: kernels by name, and every step counted once."""

import pytest
import torch

from benchmarks.profile_step import part_of, rollout_parts
from miles.model.decoder import Decoder
from miles.model.spec import ModelSpec
from miles.types import GenerationRequest, SamplingParams


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("_attend_kernel", "attention"),
        ("_merge_kernel", "attention"),
        ("_race_kernel", "drawing"),
        ("nvjet_sm90_tst_128x152_64x4_2x1_v_bz_TNT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "matrix products"),
        ("_qk_norm_rope_store_kernel", "norms, rope, cache writes, activation"),
        ("_add_rms_norm_kernel", "norms, rope, cache writes, activation"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4>", "void at::native::vectorized_elementwise_kernel<4>"),
    ],
)
def test_kernels_belong_to_parts(kernel, part):
    assert part_of(kernel) == part


def test_a_rollout_is_stepped_through_once():
    spec = ModelSpec(
        "Qwen3ForCausalLM", 64, 16, 32, 1, 2, 1, 8, 1e-6, 1e4, None, 256, True, False, False, False, True
    )  # fmt: skip
    torch.manual_seed(0)
    model = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)

    def run(first):
        sampling = SamplingParams(max_new_tokens=50, ignore_eos=True)
        return [GenerationRequest(first + i, [1 + first, 2, 3], sampling, first + i) for i in range(3)]

    parts = rollout_parts(model, [run(0), run(10)], every=20, window=2)
    assert parts["engine_steps"] == 50
    assert parts["host_work"] > 0
