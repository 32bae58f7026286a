# ruff: noqa: E501 (lines as logs have them)
"""Writes the stored logs of `tests/cases/logs`: public Miles logs, healthy or with one planted fault.

    python -m tests.unit.report.planted

Lines follow the formats of the manual and of `reference/miles-facts.md`; numbers come from a seeded generator around
the manual's healthy ranges (Qwen3-0.6B on GSM8K: reward 0.53 to 0.77, gap 0.0136 to 0.0164, 152 s a step).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "cases" / "logs"
START = datetime(2026, 10, 17, 15, 53, 16, 726000)
EXEC = (
    "EXEC: export PYTHONUNBUFFERED=1 && ray start --head --num-gpus 1 && ray job submit -- python3 train.py "
    "--train-backend fsdp --hf-checkpoint /root/lab/models/Qwen3-0.6B --rollout-batch-size 32 "
    "--n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 1024 --rm-type math --colocate "
    "--sglang-mem-fraction-static 0.4"
)
REFUSED = "Error: Server error '503 Service Unavailable' for url 'http://172.17.0.3:20035/generate'"


class Writer:
    """A log being written, with its clock."""

    def __init__(self, seed: int = 0) -> None:
        self.now = START
        self.lines: list[str] = []
        self.random = random.Random(seed)

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def line(self, text: str, *, process: str = "launcher", place: str = "common.py:290", actor: str = "") -> None:
        stamp = self.now.strftime("%Y-%m-%d %H:%M:%S.") + f"{self.now.microsecond // 1000:03d}"
        prefix = f"({actor}) " if actor else ""
        self.lines.append(f"{prefix}[{stamp} {process}] {place} - {text}")

    def engine(self, text: str) -> None:
        self.lines.append(f"(CommandActor pid=2546) [{self.now:%Y-%m-%d %H:%M:%S}] {text}")

    def bare(self, text: str) -> None:
        self.lines.append(text)

    def trainer(self, text: str, *, place: str = "log_utils.py:554") -> None:
        self.line(text, process="actor_cell00000_rank00000", place=place, actor="FSDPTrainRayActor pid=2551")

    def rollout(self, text: str, *, place: str = "train_metric_utils.py:44") -> None:
        self.line(text, process="rollout_executor", place=place, actor="RolloutExecutor pid=2550")

    def start(self, *, command: str = EXEC, tokens: int = 345645) -> None:
        self.line(command)
        self.wait(82)
        self.engine("Load weight end. elapsed=5.85 s, type=Qwen3ForCausalLM, avail mem=94.82 GB, mem usage=1.40 GB.")
        self.engine(
            f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {tokens}, K size: 18.46 GB, V size: 18.46 GB"
        )

    def step(self, number: int, **change: float) -> None:
        """The four lines of a step. `change` sets values by the last part of their names."""
        draw, progress = self.random.uniform, min(number / 48, 1.0)
        reward = change.get("raw_reward", 0.62 + 0.13 * progress + draw(-0.05, 0.05))
        length = change.get("response_lengths", 740 - 150 * progress + draw(-30, 30))
        rollout_s = change.get("rollout_time", length * 0.08 + draw(-1, 1))
        train_s = change.get("actor_train_time", length * 0.105 + draw(-1, 1))
        cut = change.get("truncated", 0.33 - 0.22 * progress + draw(-0.03, 0.03))
        self.wait(rollout_s)
        written: dict[str, float] = {
            "rollout/response_len/mean": length,
            "rollout/response_len/median": length - 12.0,
            "rollout/response_len/max": change.get("longest", 1024),
            "rollout/response_len/min": 143,
            change.get("zero_name", "rollout/zero_std/count_0"): change.get("count_0", 3),  # type: ignore[dict-item]
            "rollout/zero_std/count_1": change.get("count_1", 7 + int(8 * progress)),
            "rollout/repetition_frac": 0.0,
            "rollout/truncated_ratio": cut,
            "rollout/weight_version/mean": number,
            "rollout/weight_version/mixed_version_ratio": change.get("mixed_version_ratio", 0.0),
            "perf/rollout_time": rollout_s,
            "perf/tokens_per_gpu_per_sec": 256 * length / rollout_s,
        }
        if "stale" in change:
            written["rollout/fully_async/stale_groups_filtered"] = change["stale"]
        self.rollout(f"perf {number}: {written}")
        seen = {
            "rollout/response_lengths": length,
            "rollout/total_lengths": length + 96.0,
            "rollout/rewards": 1e-09,
            "rollout/raw_reward": reward,
            "rollout/truncated": cut,
            "rollout/log_probs": -0.31,
            "rollout/rollout_log_probs": -0.32,
        }
        self.trainer(f"rollout {number}: {seen}", place="log_utils.py:125")
        self.wait(train_s + 25)
        trained = {
            "train/loss": change.get("loss", draw(-0.02, 0.02)),
            "train/pg_loss": change.get("loss", draw(-0.02, 0.02)),
            "train/entropy_loss": change.get("entropy_loss", 0.0),
            "train/pg_clipfrac": change.get("pg_clipfrac", 0.0),
            "train/ppo_kl": 0.0,
            "train/train_rollout_logprob_abs_diff": change.get("gap", draw(0.0141, 0.0160)),
            "train/grad_norm": change.get("grad_norm", draw(0.2, 0.5)),
            "train/lr-pg_0": 1e-06,
            "train/step": number,
        }
        self.trainer(f"step {number}: {trained}")
        times = {
            "perf/sleep_time": 0.76,
            "perf/wake_up_time": 0.87,
            "perf/log_probs_time": 23.4,
            "perf/actor_train_time": train_s,
            "perf/train_time": train_s + 24.3,
            "perf/update_weights_time": 0.64,
            "perf/train_wait_time": rollout_s + 1.4,
            "perf/step_time": rollout_s + train_s + 25.7,
        }
        self.trainer(f"perf {number}: {times}", place="perf.py:56")

    def steps(self, count: int, change: Callable[[int], dict[str, float]] = lambda number: {}) -> None:
        for number in range(count):
            self.step(number, **change(number))


def healthy(log: Writer) -> None:
    log.start()
    log.steps(16)


def dead_engine(log: Writer) -> None:
    log.line(EXEC + " --true-on-policy-mode --attn-implementation flash_attention_3")
    log.wait(40)
    log.bare("[2026-10-17 15:53:56] Received sigquit from a child process. It usually means the child failed.")
    for _ in range(160):
        log.rollout(REFUSED + " [repeated 148x across cluster]", place="http_utils.py:241")
        log.wait(4)


def flash_attention_3(log: Writer) -> None:
    log.line(EXEC + " --true-on-policy-mode")
    log.wait(30)
    log.engine("Enable deterministic inference because of legacy rl_on_policy_target.")
    log.bare(
        "AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90. Please use `--attention-backend flashinfer`."
    )
    for _ in range(160):
        log.rollout(REFUSED + " [repeated 148x across cluster]", place="http_utils.py:241")
        log.wait(4)


def refused_bursts(log: Writer) -> None:
    log.start(command=EXEC.replace("--n-samples-per-prompt 8", "--n-samples-per-prompt 16"))
    for number in range(8):
        for _ in range(20):
            log.rollout(REFUSED + " [repeated 40x across cluster]", place="http_utils.py:241")
            log.wait(2)
        log.wait(60)
        log.step(number)


def reward_import(log: Writer) -> None:
    log.start(command=EXEC.replace("--rm-type math", "--custom-rm-path my_rewards.custom_rm"))
    log.wait(20)
    log.rollout("Traceback (most recent call last):", place="rollout.py:310")
    log.bare("ModuleNotFoundError: No module named 'my_rewards'")
    for _ in range(44):
        log.wait(160)
        log.rollout(REFUSED, place="http_utils.py:241")


def node_memory(log: Writer) -> None:
    log.start(command=EXEC.replace("Qwen3-0.6B", "Qwen3-4B"))
    log.wait(700)
    controller = "(TrainerController pid=2656)"
    log.bare(
        f"{controller} ray.exceptions.OutOfMemoryError: 1 worker(s) were killed due to the node running low on memory. "
        "Memory on the node (IP: 172.17.0.3, ID: 08904870a17c) was 115.86GB / 121.69GB (0.952127)"
    )
    log.bare(f"{controller} Top 10 memory users: PID\tMEM(GB)\tCOMMAND")
    log.bare(f"{controller} 2657\t36.77\tray::FSDPTrainRayActor.train")


def attention_name(log: Writer) -> None:
    log.start(command=EXEC + " --attn-implementation triton")
    log.bare(
        'ValueError: Specified `attn_implementation="triton"` is not supported. The only possible arguments are '
        '`attn_implementation="eager"`, `"sdpa"`, `"flash_attention_2"`'
    )


def step_zero_gap(log: Writer) -> None:
    log.start()
    log.steps(3, lambda number: {"gap": 0.21})


def engine_memory(log: Writer) -> None:
    log.line(EXEC.replace("0.4", "0.9"))
    log.wait(60)
    log.engine("Load weight end. elapsed=5.85 s, type=Qwen3ForCausalLM, avail mem=4.82 GB, mem usage=1.40 GB.")
    log.bare(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.24 GiB. GPU 0 has a total capacity of 79 GiB"
    )


def small_cache(log: Writer) -> None:
    log.start(command=EXEC.replace("0.4", "0.02"), tokens=3082)
    log.steps(3, lambda number: {"rollout_time": 386.0})


def fractional_rewards(log: Writer) -> None:
    log.start(command=EXEC.replace("--rm-type math", "--custom-rm-path my_rewards.partial"))
    log.steps(4, lambda number: {"zero_name": "rollout/zero_std/count_0.3"})  # type: ignore[dict-item]


def offload_corruption(log: Writer) -> None:
    log.start()
    log.steps(6, lambda number: {"loss": float("nan"), "grad_norm": float("nan")} if number >= 3 else {})


def weight_update_crash(log: Writer) -> None:
    log.start(command=EXEC + " --pipeline-model-parallel-size 2")
    log.wait(200)
    log.trainer("Fatal Python error: Segmentation fault in update_weights (ncclTunerPlugin)", place="actor.py:80")


def weight_update_truncated(log: Writer) -> None:
    log.start(command=EXEC + " --sglang-enable-deterministic-inference --rollout-num-gpus-per-engine 2")
    log.wait(200)
    log.trainer("NCCL WARN Message truncated : received 4194304 bytes instead of 2097152", place="actor.py:80")


def many_requests(log: Writer) -> None:
    log.start(command=EXEC.replace("--n-samples-per-prompt 8", "--n-samples-per-prompt 64"))
    for running, speed in [(128, 5200.0)] * 8 + [(256, 5400.0)] * 8 + [(768, 3300.0)] * 8 + [(1536, 1900.0)] * 8:
        log.wait(5)
        log.engine(
            f"Decode batch, #running-req: {running}, #token: {running * 400}, token usage: 0.52, cuda graph: True, "
            f"gen throughput (token/s): {speed}, #queue-req: 0"
        )
    log.steps(3)


def ray_cluster(log: Writer) -> None:
    log.line("EXEC: export MILES_SCRIPT_EXTERNAL_RAY=1 && pkill -9 sglang; sleep 3; pkill -9 miles; pkill -9 redis")
    log.line(EXEC)


def heat_pauses(log: Writer) -> None:
    """The log alone: some steps take twice as long for the same tokens."""
    log.start()
    for number in range(14):
        log.step(number, response_lengths=700.0, actor_train_time=152.0 if number in (5, 8, 11) else 74.0)


def wandb_group(log: Writer) -> None:
    log.start(command=EXEC + " --use-wandb")
    log.bare("TypeError: unsupported operand type(s) for +: 'NoneType' and 'str'")


def eval_refused(log: Writer) -> None:
    log.start(command=EXEC + " --eval-interval 1 --eval-prompt-data gsm8k_test /root/lab/datasets/gsm8k/test.parquet")
    for _ in range(12):
        log.rollout(REFUSED + " [repeated 100x across cluster]", place="http_utils.py:241")
        log.wait(3)
    log.bare("httpx.HTTPStatusError: Server error for url 'http://172.17.0.3:20035/generate'")


def engine_never_starts(log: Writer) -> None:
    log.line(EXEC)
    log.wait(20)
    log.bare("AssertionError: the draft model does not fit")
    log.wait(700)
    log.line("waiting for the rollout engine")


def fresh_start(log: Writer) -> None:
    log.start(command=EXEC + " --save /ckpt/run-a --save-interval 20 --load /ckpt/run-a")
    log.steps(4)


def no_signal(log: Writer) -> None:
    log.start()
    log.steps(12, lambda number: {"count_0": 2, "count_1": 26, "raw_reward": 0.86 + 0.01 * (number % 2)})


def truncation(log: Writer) -> None:
    log.start()
    log.steps(8, lambda number: {"truncated": 0.62, "response_lengths": 930.0})


def all_wrong(log: Writer) -> None:
    log.start()
    log.steps(8, lambda number: {"raw_reward": 0.0, "count_0": 32, "count_1": 0})


def entropy_collapse(log: Writer) -> None:
    log.start()
    log.steps(
        20,
        lambda number: {
            "entropy_loss": 0.6 * 0.7**number,
            "raw_reward": 0.7 if number < 8 else 0.45 - 0.01 * (number % 3),
        },
    )


def clip_side(log: Writer) -> None:
    log.start()
    log.steps(10, lambda number: {"pg_clipfrac": 0.41})


def stale_samples(log: Writer) -> None:
    log.start(command=EXEC + " --fully-async")
    log.steps(10, lambda number: {"mixed_version_ratio": 0.8, "stale": 12})


def gap_growth(log: Writer) -> None:
    log.start()
    log.steps(16, lambda number: {"gap": 0.015 * 1.12**number})


def reward_hacking(log: Writer) -> None:
    log.start()
    scores = {0: 0.41, 8: 0.48, 15: 0.22}
    for number in range(16):
        log.step(number, raw_reward=0.4 + 0.035 * number, response_lengths=700 - 45.0 * number)
        if number in scores:
            log.rollout(
                f"eval {number}: {{'eval/gsm8k_test': {scores[number]}, 'eval/gsm8k_test-truncated_ratio': 0.01}}"
            )


def idle_engine(log: Writer) -> None:
    log.start()
    log.steps(8, lambda number: {"response_lengths": 240.0, "longest": 4096, "rollout_time": 190.0, "truncated": 0.02})


# Planted fault -> keys that `diagnose` must find, the first of them first.
PLANTED: dict[Callable[[Writer], None], list[str]] = {
    healthy: [],
    dead_engine: ["dead_engine"],
    flash_attention_3: ["flash_attention_3", "dead_engine"],
    refused_bursts: ["refused_bursts"],
    reward_import: ["reward_import"],
    node_memory: ["node_memory"],
    attention_name: ["attention_name"],
    step_zero_gap: ["step_zero_gap"],
    engine_memory: ["engine_memory"],
    small_cache: ["small_cache"],
    fractional_rewards: ["fractional_rewards"],
    offload_corruption: ["broken_numbers"],
    weight_update_crash: ["weight_update"],
    weight_update_truncated: ["weight_update"],
    many_requests: ["many_requests"],
    ray_cluster: ["ray_cluster"],
    heat_pauses: ["heat"],
    wandb_group: ["wandb_group"],
    eval_refused: ["eval_refused"],
    engine_never_starts: ["engine_start"],
    fresh_start: ["fresh_start"],
    no_signal: ["no_signal"],
    truncation: ["truncation"],
    all_wrong: ["extraction"],
    entropy_collapse: ["entropy_collapse"],
    clip_side: ["clipping"],
    stale_samples: ["stale"],
    gap_growth: ["gap_growth"],
    reward_hacking: ["reward_hacking"],
    idle_engine: ["idle_engine"],
}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for seed, plant in enumerate(PLANTED):
        log = Writer(seed)
        plant(log)
        (FOLDER / f"{plant.__name__}.log").write_text("\n".join(log.lines) + "\n", encoding="utf-8")
    expected = {f"{plant.__name__}.log": keys for plant, keys in PLANTED.items()}
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
