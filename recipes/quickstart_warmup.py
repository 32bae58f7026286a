"""Make the model that `miles quickstart` starts from: a tiny decoder, warmed up by supervised training only.

    python recipes/quickstart_warmup.py OUTPUT_FOLDER [--seed 0]

Phase A teaches the worked style until it is right about 95 percent of the time; phase B mixes in three parts of the
terse style, so that the model answers tersely (and mostly wrong) unless training finds that working pays. All data is
correct throughout and never holds a held-out pair. About two minutes on one CPU core.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from miles.checkpoint.hf import export_hf
from miles.config.sections import AlgorithmConfig, BatchConfig, ModelConfig, OptimConfig, RunConfig
from miles.model.decoder import Decoder
from miles.model.names import to_hf
from miles.model.spec import load_spec
from miles.quickstart.task import question, split_pairs
from miles.text.tokenizer import load_tokenizer
from miles.trainer.trainer import LocalTrainer
from miles.types import TrainSample

SPECIAL = ["<|im_start|>", "<|im_end|>"]
PIECES = ["<think>", "</think>", "####", "user", "assistant", "system"]
CHARACTERS = ["\n", " ", *"0123456789+-*/=?.,:()", *"abcdefghijklmnopqrst"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BATCH_SIZE = 64
TERSE_SHARE = 0.75


def write_tokenizer(folder: Path, *, pieces: Sequence[str] = PIECES, characters: Sequence[str] = CHARACTERS) -> int:
    """A vocabulary of single characters and a few whole words; returns its size."""
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *pieces, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "model_max_length": 128,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return len(vocabulary)


def write_config(folder: Path, *, vocab_size: int) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def initialise(model: Decoder, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.05, generator=generator)
            else:
                parameter.fill_(1.0)


def terse_answer(a: int, b: int) -> str:
    return f"#### {a + b}"


def worked_answer(a: int, b: int) -> str:
    """Column sums with the carry, then the sum: 47+38 gives `7+8=15`, `4+3+1=8`, `#### 85`."""
    ones = a % 10 + b % 10
    carry = "+1" if ones >= 10 else ""
    tens = a // 10 + b // 10 + ones // 10
    return f"<think>\n{a % 10}+{b % 10}={ones}\n{a // 10}+{b // 10}{carry}={tens}\n</think>\n#### {a + b}"


def supervised_batch(tokenizer, pairs, *, terse_share: float, rng: random.Random) -> list[TrainSample]:
    samples = []
    for index, (a, b) in enumerate(rng.choices(pairs, k=BATCH_SIZE)):
        answer = terse_answer(a, b) if rng.random() < terse_share else worked_answer(a, b)
        prompt_ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": question(a, b)}]))
        answer_ids = tokenizer.encode(answer + "<|im_end|>")
        samples.append(
            TrainSample(
                tokens=[*prompt_ids, *answer_ids],
                response_length=len(answer_ids),
                loss_mask=[1] * len(answer_ids),
                reward=0.0,
                raw_reward=0.0,
                group_index=index,
                index=index,
            )
        )
    return samples


def run_phase(model: Decoder, tokenizer, *, name: str, steps: int, lr: float, terse_share: float, seed: int) -> None:
    config = RunConfig(
        model=ModelConfig(device="cpu", dtype="float32"),
        algorithm=AlgorithmConfig(loss_type="sft_loss", calculate_per_token_loss=True),
        optim=OptimConfig(
            lr=lr, min_lr=lr / 10, lr_decay_style="linear", lr_warmup_iters=20, weight_decay=0.01, adam_beta2=0.95
        ),
        batch=BatchConfig(global_batch_size=BATCH_SIZE),
    )
    trainer = LocalTrainer(model, None, config, total_steps=steps)
    training_pairs, _ = split_pairs()
    rng = random.Random(f"{name}-{seed}")
    for step in range(steps):
        batch = supervised_batch(tokenizer, training_pairs, terse_share=terse_share, rng=rng)
        result = trainer.train(batch, rollout_id=step, weight_version=step)
        if step % 50 == 0 or step == steps - 1:
            print(f"phase {name} step {step}: loss {result.steps[0]['train/loss']:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_config(folder, vocab_size=write_tokenizer(folder))
        spec = load_spec(folder)
        tokenizer = load_tokenizer(folder)
        model = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"))
        initialise(model, seed=arguments.seed)
        for name, steps, lr, terse_share in [
            ("A1", 300, 3e-3, 0.0),
            ("A2", 150, 1.5e-3, 0.0),
            ("B", 60, 5e-4, TERSE_SHARE),
        ]:
            run_phase(model, tokenizer, name=name, steps=steps, lr=lr, terse_share=terse_share, seed=arguments.seed)
        tensors = to_hf(spec, dict(model.named_parameters()))
        export_hf(arguments.output, source=folder, tensors=tensors, dtype=torch.float32)


if __name__ == "__main__":
    main()
