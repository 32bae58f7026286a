"""The troubleshooting chapter of the manual: what its logs show is recognised and answered with the right advice."""

import pytest

from miles.observe.symptoms import recognise
from tests.unit.observe.engine_logs import error_line, step_line

LINES = {
    "the GPU is idle and the log keeps growing": (error_line(0), "above the first"),
    "the run hangs after a reward import error": (
        "ModuleNotFoundError: No module named 'my_rewards'", "PYTHONPATH",
    ),
    "the engine stops at start with a FlashAttention 3 error": (
        "AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90. Please use `--attention-backend "
        "flashinfer`.", "leave true on-policy mode out",
    ),
    "the job stops with a Ray OutOfMemoryError": (
        "(TrainerController pid=2656) ray.exceptions.OutOfMemoryError: 1 worker(s) were killed due to the node running "
        "low on memory. Memory on the node (IP: 172.17.0.3, ID: 0890) was 115.86GB / 121.69GB (0.952127)",
        "smaller model",
    ),
    "the trainer rejects the attention implementation": (
        'ValueError: Specified `attn_implementation="triton"` is not supported. The only possible arguments are '
        '`attn_implementation="eager"`', "leave --attn-implementation out",
    ),
    "the engine runs out of memory at start": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "--engine-mem-fraction-static",
    ),
    "too low a memory fraction": ("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 3082, K size: 0.16 GB",
        "raise --engine-mem-fraction-static"),
    "the weight update fails on many GPUs, size": ("NCCL WARN Message truncated : received 8 bytes instead of 4",
        "deterministic serving"),
    "the weight update fails on many GPUs, tuner": ("Segmentation fault (core dumped) in libnccl-tuner.so", "2.31"),
    "training goes wrong after offload": (
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)", "--no-offload-train",
    ),
    "no group of the tracker": (
        "TypeError: unsupported operand type(s) for +: 'NoneType' and 'str'", "--wandb-group",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_the_line_is_recognised(name):
    line, advice = LINES[name]
    assert advice in recognise(line).fix


@pytest.mark.parametrize(
    "line",
    [
        step_line(0, 1),
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 308212, K size: 16 GB",
        "NCCL version 2.29.3+cuda13",
        "UserWarning: ModuleNotFoundError: No module named 'flash_attn'",
        "a prompt about memory on the node",
        "export NCCL_TIMEOUT=1800 TORCH_NCCL_BLOCKING_WAIT=0",
        "ProcessGroupNCCL initialization options: size: 1, global rank: 0, TIMEOUT(ms): 600000",
    ],
)
def test_healthy_lines_are_not(line):
    assert recognise(line) is None
