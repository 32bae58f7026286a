"""How far `miles plan` is from the memory that runs really take.

    python benchmarks/plan_accuracy.py --device cpu|cuda [--round calibration|frozen|recipe|later|ragged]
        [--only NAME ...] [--write FOLDER]

Every configuration runs in a process of its own, with random weights: on a CPU a `miles train` of one step whose
worker reports its peak resident memory; on a GPU model, trainer and engine are built from the same flags, one rollout
of answers of full length is written (in the round `ragged` several, of any length), and an update made of each. What
the driver counts for the process is measured: all that the allocator has ever reserved, and what lies outside of it
(context, libraries, kernels). The constants of `miles/plan/memory.py` were fitted to the round `calibration`; the
cases of the round `frozen` were chosen afterwards, those of `later` after a frozen one had shown that the smallest
micro-batch can keep more than the largest, those of `ragged` because answers of one length leave the allocator no
gaps.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.grpo_step import generate
from benchmarks.machine import record
from benchmarks.recipe import ANSWERS_PER_PROMPT, Workload, random_decoder, to_train_samples
from miles.checkpoint.hf import export_hf
from miles.config.parse import parse_flags
from miles.config.sections import RunConfig
from miles.engine.local import LocalEngine
from miles.loop.placement import keep_memory_in_one_piece
from miles.model.lora import add_lora
from miles.model.names import to_hf
from miles.plan.machine import GIB, Machine, cpu_machine, gpu_machine, host_memory
from miles.plan.memory import Job, estimate
from miles.plan.shapes import find_spec
from miles.trainer.trainer import LocalTrainer

QUICKSTART = Path(__file__).parent.parent / "miles" / "quickstart" / "model"


@dataclasses.dataclass(frozen=True)
class Case:
    shape: str
    prompts: int
    prompt_len: int
    answer_len: int
    flags: str = ""
    shortest: int | None = None  # answers have `answer_len` tokens, or any number from this one on
    num_rollouts: int = 1

    def workload(self, rng: random.Random) -> Workload:
        lengths = range(self.shortest or self.answer_len, self.answer_len + 1)
        answers = [rng.choices(lengths, k=ANSWERS_PER_PROMPT) for _ in range(self.prompts)]
        return Workload("plan", [self.prompt_len] * self.prompts, answers)

    @property
    def config(self) -> RunConfig:
        sizes = f"--rollout-batch-size {self.prompts} --n-samples-per-prompt {ANSWERS_PER_PROMPT}"
        sizes += f" --rollout-max-response-len {self.answer_len} --lr 1e-6"
        return parse_flags(f"{sizes} {self.flags}".split()).config

    def job(self, machine: Machine) -> Job:
        return Job(self.config, find_spec(self.shape), machine, self.prompt_len, self.answer_len)


# The prompts of the CPU cases have 15 tokens: `12+34=?` in the chat template of the quickstart.
CASES = {
    "cpu": {
        "calibration": {
            "quickstart": Case(str(QUICKSTART), 8, 15, 40),
            "135M": Case("SmolLM2-135M", 2, 15, 100),
            "135M, small budget": Case("SmolLM2-135M", 2, 15, 100, "--max-tokens-per-gpu 256"),
        },
        "frozen": {"135M, reference": Case("SmolLM2-135M", 1, 15, 64, "--max-tokens-per-gpu 400 --use-kl-loss")},
    },
    "cuda": {
        "calibration": {
            "0.6B, defaults": Case("Qwen3-0.6B", 32, 100, 256),
            "0.6B, 16k tokens": Case(
                "Qwen3-0.6B", 32, 100, 200, "--max-tokens-per-gpu 16384 --engine-max-total-tokens 100000"
            ),
            "1.7B, share 0.3": Case(
                "Qwen3-1.7B", 16, 200, 128, "--max-tokens-per-gpu 8192 --engine-mem-fraction-static 0.3"
            ),
            "1.7B, no graphs": Case(
                "Qwen3-1.7B",
                32,
                100,
                100,
                "--max-tokens-per-gpu 24576 --engine-max-total-tokens 60000 --engine-disable-cuda-graph "
                "--log-probs-chunk-size 1024",
            ),
            "4B, 4k tokens": Case(
                "Qwen3-4B", 8, 200, 128, "--max-tokens-per-gpu 4096 --engine-max-total-tokens 40000"
            ),
            "4B, 16k tokens, recompute": Case(
                "Qwen3-4B",
                16,
                200,
                100,
                "--max-tokens-per-gpu 16384 --engine-max-total-tokens 60000 --recompute-granularity full "
                "--adam-state bfloat16",
            ),
        },
        "frozen": {
            "0.6B, reference": Case(
                "Qwen3-0.6B", 16, 150, 120, "--max-tokens-per-gpu 3000 --engine-mem-fraction-static 0.5 --use-kl-loss"
            ),
            "1.7B, moments on the host": Case(
                "Qwen3-1.7B",
                16,
                120,
                150,
                "--max-tokens-per-gpu 12000 --engine-max-total-tokens 80000 --optimizer-cpu-offload "
                "--recompute-method block --recompute-granularity full --recompute-num-layers 14",
            ),
            "4B, LoRA": Case(
                "Qwen3-4B",
                16,
                250,
                100,
                "--max-tokens-per-gpu 8000 --engine-max-total-tokens 100000 --lora-rank 16 --lora-alpha 32",
            ),
        },
        "recipe": {"4B, 32 x 8 x 1,024": Case("Qwen3-4B", 32, 100, 1024)},
        "later": {
            "0.6B, LoRA, shared prompts": Case(
                "Qwen3-0.6B",
                24,
                400,
                160,
                "--max-tokens-per-gpu 20000 --engine-mem-fraction-static 0.2 --lora-rank 64 --lora-alpha 64 "
                "--share-prompts-in-training",
            ),
            "1.7B, 8 bit, cheap parts again": Case(
                "Qwen3-1.7B",
                16,
                100,
                300,
                "--max-tokens-per-gpu 30000 --engine-max-total-tokens 50000 --adam-state 8bit "
                "--recompute-granularity selective",
            ),
            "4B, LoRA, 24k tokens": Case(
                "Qwen3-4B",
                32,
                60,
                180,
                "--max-tokens-per-gpu 24000 --engine-max-total-tokens 70000 --lora-rank 32 --lora-alpha 64",
            ),
            "4B, 10k tokens": Case(
                "Qwen3-4B",
                16,
                90,
                240,
                "--max-tokens-per-gpu 10000 --engine-max-total-tokens 30000 --adam-state bfloat16",
            ),
        },
        "ragged": {
            "0.6B, 16k tokens": Case(
                "Qwen3-0.6B", 32, 100, 1024, "--max-tokens-per-gpu 16384 --engine-max-total-tokens 100000", 50, 3
            ),
            "1.7B, 16k tokens": Case(
                "Qwen3-1.7B",
                24,
                100,
                600,
                "--max-tokens-per-gpu 16384 --engine-max-total-tokens 80000 --recompute-num-layers 0",
                50,
                3,
            ),
            "4B, nothing set": Case("Qwen3-4B", 24, 100, 400, "", 50, 2),
        },
    },
}  # fmt: skip


def run_on_gpu(case: Case) -> dict[str, Any]:
    """In this process: bytes after each stage, and the highest that the driver counted for it."""
    device, stages = torch.device("cuda"), {}

    def note(stage: str) -> None:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        stages[stage] = {
            "outside": total - free - reserved,
            "allocated": torch.cuda.memory_allocated(),
            "reserved": reserved,
            "max_allocated": torch.cuda.max_memory_allocated(),
            "max_reserved": torch.cuda.max_memory_reserved(),
        }
        torch.cuda.reset_peak_memory_stats()

    keep_memory_in_one_piece()
    torch.zeros(1, device=device)
    note("context")
    config = case.config
    spec = find_spec(case.shape)
    model = random_decoder(spec, dtype=torch.bfloat16, device="cuda")
    if config.lora.is_on:
        add_lora(model, config.lora, seed=0)
    reference = random_decoder(spec, dtype=torch.bfloat16, device="cuda") if config.algorithm.use_kl_loss else None
    note("model")
    trainer = LocalTrainer(model, reference, config, total_steps=case.num_rollouts)
    note("trainer")
    engine = LocalEngine(model, None, config.engine, device=device)
    note("engine")
    rng, seconds = random.Random(0), {"generate": 0.0, "train": 0.0}
    for rollout_id in range(case.num_rollouts):
        sent = case.workload(rng).requests(rollout_id)
        start = time.perf_counter()
        results = asyncio.run(generate(engine, sent))
        note(f"generate {rollout_id}")
        written = time.perf_counter()
        trainer.train(to_train_samples(sent, results), rollout_id=rollout_id, weight_version=engine.version)
        note(f"train {rollout_id}")
        seconds["generate"] += written - start
        seconds["train"] += time.perf_counter() - written
    engine.close()
    outside = max(stage["outside"] for stage in stages.values())
    measured = max(stage["max_reserved"] for stage in stages.values()) + outside
    total = torch.cuda.mem_get_info()[1]
    return {"measured": measured, "stages": stages, "seconds": seconds, "memory_bytes": total}


def run_on_cpu(case: Case, folder: Path) -> dict[str, Any]:
    """`miles train` with these flags; what its worker reported."""
    model, data = folder / "model", folder / "sums.jsonl"
    spec = find_spec(case.shape)
    source = json.loads((QUICKSTART / "config.json").read_text()) | {
        "architectures": [spec.architecture],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
    }
    (folder / "source").mkdir()
    for file in QUICKSTART.iterdir():
        if file.suffix == ".json":
            (folder / "source" / file.name).write_bytes(file.read_bytes())
    (folder / "source" / "config.json").write_text(json.dumps(source))
    decoder = random_decoder(spec, dtype=torch.float32, device="cpu")
    parameters = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    export_hf(model, source=folder / "source", tensors=to_hf(spec, parameters), dtype=torch.float32)
    data.write_text("".join(f'{{"input": "{a}+34=?", "label": "{a + 34}"}}\n' for a in range(12, 40)))
    command = [sys.executable, "-m", "miles", "train", *case.flags.split(), "--hf-checkpoint", str(model)]
    command += ["--prompt-data", str(data), "--label-key", "label", "--apply-chat-template", "--device", "cpu"]
    command += ["--rm-type", "deterministic_random", "--num-rollout", "1", "--runs-dir", str(folder), "--run-name", "r"]
    command += ["--rollout-batch-size", str(case.prompts), "--n-samples-per-prompt", str(ANSWERS_PER_PROMPT)]
    command += ["--rollout-max-response-len", str(case.answer_len), "--progress", "off"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = [json.loads(line) for line in (folder / "r" / "metrics.jsonl").read_text().splitlines()]
    return {"measured": max(entry["perf/peak_memory_gb"] for entry in records) * GIB}


def in_own_process(name: str, device: str, round_: str) -> dict[str, Any]:
    case = CASES[device][round_][name]
    if device == "cpu":
        with tempfile.TemporaryDirectory() as folder:
            return run_on_cpu(case, Path(folder))
    command = [sys.executable, __file__, "--device", device, "--round", round_, "--child", name]
    paths = filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--round", default="calibration", help=f"one of {', '.join(CASES['cuda'])}")
    parser.add_argument("--only", nargs="+", help="names of cases")
    parser.add_argument("--child", help="run this one here")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if arguments.round not in CASES[arguments.device]:
        parser.error(f"--round: with --device {arguments.device} one of {', '.join(CASES[arguments.device])}")
    cases = CASES[arguments.device][arguments.round]
    if arguments.child is not None:
        print(json.dumps(run_on_gpu(cases[arguments.child])))
        return
    rows: dict[str, Any] = {}
    failed: dict[str, str] = {}
    started = time.perf_counter()
    for name in arguments.only or cases:
        try:
            found = in_own_process(name, arguments.device, arguments.round)
        except AssertionError as error:
            print(f"{name}: {error}", flush=True)
            failed[name] = str(error).splitlines()[-1]
            continue
        machine = cpu_machine(host_bytes=host_memory(), disk_bytes=0)
        if arguments.device == "cuda":
            gib = found["memory_bytes"] / GIB
            machine = gpu_machine(torch.cuda.get_device_name(), memory_gib=gib, host_bytes=host_memory(), disk_bytes=0)
        plan = estimate(cases[name].job(machine))
        error = plan.process_bytes / found["measured"] - 1
        rows[name] = {"planned": plan.process_bytes, "error": error, "parts": plan.device, **found}
        print(
            f"{name:<24} planned {plan.process_bytes / GIB:7.2f}  measured {found['measured'] / GIB:7.2f} GiB  "
            f"error {error:+.1%}  {found.get('seconds', '')}",
            flush=True,
        )
    result = {
        "name": f"plan_accuracy_{arguments.device}_{arguments.round}",
        "seconds": time.perf_counter() - started,
        "largest_error": max((abs(row["error"]) for row in rows.values()), default=None),
        "cases": rows,
        "failed": failed,
    }
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
