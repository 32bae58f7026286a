"""What each source puts between the engine's and the trainer's log-probs of the same tokens, and what removes it.

    python benchmarks/gap_sources.py MODEL [--device cuda] [--answers 256] [--lr 1e-5] [--write FOLDER]

The model answers sums. Its answers are scored by the trainer as a setting would have it: mean, 99th percentile and
maximum of the distance, in nat. Staleness is that of one update at `--lr`. Tokens: the share of answers whose text is
other ids when it is encoded again.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import record
from miles.config.flags import with_values
from miles.config.sections import RunConfig
from miles.engine.core import EngineCore
from miles.model.decoder import Decoder
from miles.model.load import load_model
from miles.rollout.producer import rollout_sampling
from miles.text.tokenizer import Tokenizer, load_tokenizer
from miles.trainer.batch import micro_batches, token_batch
from miles.trainer.forward import Scorer
from miles.trainer.trainer import LocalTrainer
from miles.types import GenerationRequest, TrainSample

CUT = {"rollout_top_p": 0.9}
GROUP = 8


def write(model: Decoder, tokenizer: Tokenizer, config: RunConfig, num_answers: int) -> list[TrainSample]:
    device = model.head_weight.device
    core = EngineCore(model, tokenizer=tokenizer, config=config.engine, device=device)
    requests = []
    for number in range(num_answers):
        first, second = 10 + 7 * (number // GROUP) % 90, 11 + 13 * (number // GROUP) % 89
        text = tokenizer.render([{"role": "user", "content": f"{first}+{second}=?"}], add_generation_prompt=True)
        requests.append(GenerationRequest(number, tokenizer.encode(text), rollout_sampling(config), noise_key=number))
    core.add(requests)
    results = {}
    while core.has_work:
        results |= {result.request_id: result for result in core.step()}
    samples = []
    for request in requests:
        result = results[request.request_id]
        length, number = len(result.output_ids), request.request_id
        reward = float(sum(result.output_ids) % 2)
        samples.append(TrainSample(
            [*request.prompt_ids, *result.output_ids], length, [1] * length, reward, reward, number // GROUP, number,
            rollout_log_probs=result.log_probs, weight_versions=result.weight_versions,
            kept_token_ids=result.kept_token_ids,
        ))  # fmt: skip
    return samples


def gap(model: Decoder, config: RunConfig, samples: Sequence[TrainSample], *, exact: bool = False) -> dict[str, float]:
    batch = token_batch(samples, model.head_weight.device)
    packed = micro_batches(batch, range(len(samples)), max_tokens=4096)
    scorer = Scorer(config.rollout.rollout_temperature, 1024, invariant=exact)
    gap_R: Tensor = (scorer.score_all(model, packed)[0] - batch.rollout_log_probs_R).abs().double()
    rank = math.ceil(0.99 * len(gap_R))
    return {"mean": float(gap_R.mean()), "p99": float(gap_R.kthvalue(rank).values), "max": float(gap_R.max())}


def without_kept(samples: Sequence[TrainSample]) -> list[TrainSample]:
    return [dataclasses.replace(sample, kept_token_ids=None) for sample in samples]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--max-len", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    start = time.perf_counter()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(arguments.model, dtype=dtype, device=device)
    tokenizer = load_tokenizer(arguments.model)
    base = {"rollout_max_response_len": arguments.max_len, "engine_max_total_tokens": 100_000, "lr": arguments.lr}
    in_any_batch = {"engine_enable_deterministic_inference": True}
    fast, engine_only = with_values(RunConfig(), base), with_values(RunConfig(), base | in_any_batch)
    exact = with_values(engine_only, {"true_on_policy_mode": True})
    plain = write(model, tokenizer, fast, arguments.answers)
    same = write(model, tokenizer, exact, arguments.answers)
    cut = write(model, tokenizer, with_values(fast, CUT), arguments.answers)
    exact_cut = write(model, tokenizer, with_values(exact, CUT), arguments.answers)
    found: dict[str, Any] = {
        "numbers: default": gap(model, fast, plain),
        "numbers: --engine-enable-deterministic-inference alone": gap(model, engine_only, same),
        "numbers: --true-on-policy-mode": gap(model, exact, same, exact=True),
        "sampling: --rollout-top-p 0.9, scored over all tokens": gap(model, fast, without_kept(cut)),
        "sampling: --rollout-top-p 0.9, replayed (default)": gap(model, fast, cut),
        "sampling: --rollout-top-p 0.9 --true-on-policy-mode": gap(model, exact, exact_cut, exact=True),
    }
    answers = [sample.tokens[-sample.response_length :] for sample in plain]
    encoded_again = [tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=False)) for ids in answers]
    changed = sum(ids != again for ids, again in zip(answers, encoded_again, strict=True))
    found["tokens: share of answers that encoding again would change"] = changed / len(answers)
    trainer = LocalTrainer(model, None, with_values(exact, {"max_logprob_gap": 0.0}), total_steps=1)
    trainer.train(same, rollout_id=0, weight_version=0)
    found[f"staleness: one update at --lr {arguments.lr:g}"] = gap(model, exact, same, exact=True)
    for name, numbers in found.items():
        print(f"{name}: {numbers}")
    result = {
        "name": f"gap_sources_{'-'.join(arguments.model.parts[-2:])}",
        "seconds": time.perf_counter() - start,
        "gaps": found,
        "answers": len(answers),
        "tokens": sum(map(len, answers)),
        "dtype": str(dtype),
        "peers": {},
    }
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
