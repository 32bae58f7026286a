"""Learn to use a tool: products that the model cannot work out, and a Python tool that can.

    python recipes/retool.py FOLDER [--model SMOLLM2_FOLDER] [--tool calculator|python] [--seed 0] [--steps 40]
        [--device cuda] [--share 0.2]

Three runs of `miles train`. The first two are supervised: how to call the tool and copy what it says, then the habit of
guessing at once three times in four. Then reinforcement learning finds out which one pays: right answers go from about
one in four to nearly all, and `rollout/num_turns` from about 1.25 to 2. Without `--model` a tiny decoder is made from
nothing, in some minutes on two CPU cores. The Python tool runs in the sandbox of the code reward.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import torch

from miles.checkpoint.hf import export_hf
from miles.model.decoder import Decoder
from miles.model.names import to_hf
from miles.model.spec import load_spec
from recipes.quickstart_warmup import initialise, write_config, write_tokenizer

PIECES = ["<tool_call>", "</tool_call>", '{"name": "python", "arguments": {"code": "print(', ')"}}', "####"]
PIECES += ["user", "assistant", "tool", "system"]
CHARACTERS = ["\n", " ", *dict.fromkeys("0123456789*=?error:.,()'\"{}-+/")]
GUESS_SHARE = 0.75
NUM_WARM_UP, NUM_TRAINING, NUM_HELD_OUT = 8_000, 2_000, 200
WARM_UP = ("calls", 0.0), ("guesses", GUESS_SHARE)  # name of the run, share of guesses in its data
MODELS = {  # steps and learning rate of each warm-up, and the rate of reinforcement learning
    "tiny": (((200, 3e-3), (60, 5e-4)), 5e-4),
    "given": (((40, 5e-5), (40, 2e-5)), 1e-5),
}


def calculator(name: str, params: dict) -> str:
    """A tool that knows products only, and works on machines on which the sandbox cannot be built."""
    product = re.fullmatch(r"print\((\d{1,6})\*(\d{1,6})\)", str(params.get("code")))
    return str(int(product[1]) * int(product[2])) if product and name == "python" else "error"


def call_text(a: int, b: int) -> str:
    return f'<tool_call>{{"name": "python", "arguments": {{"code": "print({a}*{b})"}}}}</tool_call>'


def conversation(a: int, b: int, *, guesses: bool) -> list[dict[str, str]]:
    asked = {"role": "user", "content": f"{a}*{b}=?"}
    answer = {"role": "assistant", "content": f"#### {a * b}"}
    if guesses:
        return [asked, answer]
    return [asked, {"role": "assistant", "content": call_text(a, b)}, {"role": "tool", "content": str(a * b)}, answer]


def write_data(folder: Path, *, seed: int) -> None:
    """Warm-up, training and held-out files whose pairs of factors have nothing in common."""
    chance = random.Random(seed)
    pairs = [(a, b) for a in range(100, 1000) for b in range(12, 100)]
    chance.shuffle(pairs)
    warm_up, rest = pairs[:NUM_WARM_UP], pairs[NUM_WARM_UP:]
    for name, share in WARM_UP:
        rows = [{"input": conversation(a, b, guesses=chance.random() < share)} for a, b in warm_up]
        _write_rows(folder / f"{name}.jsonl", rows)
    for name, start, count in (("train", 0, NUM_TRAINING), ("held_out", NUM_TRAINING, NUM_HELD_OUT)):
        chosen = rest[start : start + count]
        _write_rows(folder / f"{name}.jsonl", [{"input": f"{a}*{b}=?", "label": str(a * b)} for a, b in chosen])


def _write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_tiny_model(folder: Path, *, seed: int) -> None:
    """Random weights and a vocabulary of single characters and the fixed parts of a call."""
    source = folder.parent / "tiny_config"
    source.mkdir(parents=True, exist_ok=True)
    write_config(source, vocab_size=write_tokenizer(source, pieces=PIECES, characters=CHARACTERS))
    spec = load_spec(source)
    model = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"))
    initialise(model, seed=seed)
    export_hf(folder, source=source, tensors=to_hf(spec, dict(model.named_parameters())), dtype=torch.float32)


def train(folder: Path, name: str, *flags: object) -> Path:
    """One run of `miles train`; the weights it ends with."""
    command = [sys.executable, "-m", "miles", "train", "--runs-dir", folder / "runs", "--run-name", name]
    command += ["--input-key", "input", "--apply-chat-template", "--rollout-shuffle", *flags]
    subprocess.run([*map(str, command), "--save-hf", str(folder / name)], check=True)
    return folder / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, help="start from this model folder; default: a tiny one")
    parser.add_argument("--tool", choices=("calculator", "python"), default="calculator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40, help="of reinforcement learning")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--share", type=float, help="of the GPU's memory for the engine, where other runs need some")
    arguments = parser.parse_args()
    folder, seed = arguments.folder, arguments.seed
    warm_ups, rate_of_learning = MODELS["tiny" if arguments.model is None else "given"]
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder, seed=seed)
    start = arguments.model or folder / "start"
    if arguments.model is None:
        make_tiny_model(start, seed=seed)
    common = ("--device", arguments.device, "--seed", seed, "--rollout-seed", seed)
    common += ("--max-tokens-per-gpu", 16_384) if arguments.share else ()
    share = ("--engine-mem-fraction-static", arguments.share) if arguments.share else ()
    for (name, _), (steps, rate) in zip(WARM_UP, warm_ups, strict=True):
        start = train(
            folder,
            name,
            *("--hf-checkpoint", start, "--prompt-data", folder / f"{name}.jsonl", "--loss-type", "sft_loss", *common),
            *("--calculate-per-token-loss", "--rollout-batch-size", 64, "--num-rollout", steps, "--lr", rate),
            *("--lr-decay-style", "linear", "--min-lr", rate / 10, "--lr-warmup-iters", 20, "--adam-beta2", 0.95),
        )
    tools = {"python": "miles.rollout.generate_hub.python_tool.execute", "calculator": "recipes.retool.calculator"}
    train(
        folder,
        "learned",
        *("--hf-checkpoint", start, "--prompt-data", folder / "train.jsonl", "--label-key", "label", *common),
        *("--custom-generate-function-path", "miles.rollout.generate_hub.multi_turn.generate"),
        *("--generate-execute-tool-function-path", tools[arguments.tool], "--generate-max-turns", 3),
        *share,
        *("--rm-type", "gsm8k", "--num-rollout", arguments.steps, "--rollout-batch-size", 32),
        *("--n-samples-per-prompt", 8, "--rollout-max-response-len", 96, "--lr", rate_of_learning),
        *("--eval-interval", max(1, arguments.steps // 4), "--eval-prompt-data", "products", folder / "held_out.jsonl"),
    )
    records = [json.loads(line) for line in (folder / "runs" / "learned" / "metrics.jsonl").read_text().splitlines()]
    scores = [record["eval/products"] for record in records if record["kind"] == "eval"]
    turns = [record["rollout/num_turns"] for record in records if record["kind"] == "step"]
    print(f"right answers {scores[0]:.3f} -> {scores[-1]:.3f}; turns {turns[0]:.2f} -> {turns[-1]:.2f}")


if __name__ == "__main__":
    main()
