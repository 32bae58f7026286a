"""Time one trainer on a job of `train_step.py`: `python training.py JOB.json`, in a process of its own.

Each gets the same folder of weights and the same sequences, and does two things: a pass that only scores the answers,
and a whole optimizer step (forward, backward, clip, AdamW). What it holds in memory for that is its own choice.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

from measuring import emit, read_job

Job = dict[str, Any]


class Clock:
    """Seconds of repeated calls, the first apart from the others, and the device's memory."""

    def __init__(self, job: Job, torch: Any) -> None:
        self.job, self.torch = job, torch
        self.on_gpu = job["device"] == "cuda"

    def clear(self) -> None:
        gc.collect()
        if self.on_gpu:
            self.torch.cuda.empty_cache()
            self.torch.cuda.reset_peak_memory_stats()

    def seconds(self, call: Callable[[], Any]) -> list[float]:
        spent = []
        for _ in range(self.job["repetitions"] + 1):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            spent.append(time.perf_counter() - start)
        return spent

    def synchronize(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def memory(self) -> dict[str, float]:
        if not self.on_gpu:
            return {}
        cuda = self.torch.cuda
        return {"peak_gb": cuda.max_memory_allocated() / 2**30, "reserved_gb": cuda.max_memory_reserved() / 2**30}


def guarded(job: Job, variant: str, measure: Callable[[], None]) -> None:
    """A variant that fails, for lack of memory say, must not cost the ones after it."""
    try:
        measure()
    except Exception as error:
        emit(job, variant=variant, error=f"{type(error).__name__}: {error}"[:500])


def miles(job: Job) -> None:
    """Ours: float32 masters, float32 sums of gradients and Adam states, 18 bytes a parameter."""
    from pathlib import Path

    import torch

    from miles.config.parse import parse_flags
    from miles.loop.placement import keep_memory_in_one_piece
    from miles.model.load import load_model
    from miles.trainer.batch import micro_batches, token_batch
    from miles.trainer.forward import Scorer
    from miles.trainer.limits import find_limits
    from miles.trainer.packing import canonical_order
    from miles.trainer.trainer import LocalTrainer
    from miles.types import TrainSample

    clock = Clock(job, torch)
    keep_memory_in_one_piece()  # as a run does
    model = load_model(Path(job["model"]), dtype=getattr(torch, job["dtype"]), device=job["device"])
    samples = [
        TrainSample(
            tokens=sequence["prompt"] + sequence["answer"],
            response_length=len(sequence["answer"]),
            loss_mask=[1] * len(sequence["answer"]),
            reward=float(index % 8 < 3),
            raw_reward=float(index % 8 < 3),
            group_index=index // 8,
            index=index,
        )
        for index, sequence in enumerate(job["sequences"])
    ]

    def measure(num_tokens: int) -> None:
        clock.clear()
        flags = [*job["flags"], "--max-tokens-per-gpu", str(num_tokens), "--global-batch-size", str(len(samples))]
        config = parse_flags(flags).config
        trainer = LocalTrainer(model, None, config, total_steps=100)
        limits = find_limits(model, config)
        scorer = Scorer(1.0, limits.chunk_size)
        batch = token_batch(canonical_order(samples), model.head_weight.device)
        packed = micro_batches(batch, range(len(samples)), max_tokens=limits.max_tokens)
        mean = float(scorer.score_all(model, packed)[0].mean())
        found = {
            "variant": str(num_tokens),
            "mean_log_prob": mean,
            "log_prob_all_seconds": clock.seconds(lambda: scorer.score_all(model, packed)),
        }
        emit(job, **found)
        records: list[Any] = []
        found["step_all_seconds"] = clock.seconds(
            lambda: records.append(trainer.train(samples, rollout_id=0, weight_version=0))
        )
        found["update_all_seconds"] = [record.seconds["actor_train"] for record in records]
        last = records[-1].steps[0]
        found |= {name: last[f"train/{name}"] for name in ("grad_norm", "num_micro_batches", "tflop")}
        found |= {"chunk_tokens": limits.chunk_size, "bytes_per_parameter": 18, **clock.memory()}
        emit(job, **found)

    for num_tokens in job["max_tokens"]:
        guarded(job, str(num_tokens), lambda: measure(num_tokens))  # noqa: B023 - called at once


def trl(job: Job) -> None:
    """TRL's padded path: its log-prob pass and its loss, bf16 weights and Adam states, no masters."""
    import torch
    import trl as package

    clock = Clock(job, torch)
    sequences, device = job["sequences"], job["device"]
    prompt_ids, prompt_mask = padded(torch, [sequence["prompt"] for sequence in sequences], device, left=True)
    answer_ids, answer_mask = padded(torch, [sequence["answer"] for sequence in sequences], device, left=False)
    ids, mask = torch.cat((prompt_ids, answer_ids), 1), torch.cat((prompt_mask, answer_mask), 1)
    advantages = torch.tensor([1.0 if index % 8 < 3 else -0.6 for index in range(len(sequences))], device=device)
    emit(job, version=package.__version__, attention="sdpa", padded_tokens=ids.numel())

    def measure(variant: str) -> None:
        rows, recomputes = int(variant.removesuffix("r")), variant.endswith("r")
        clock.clear()
        trainer = make_trl(job, micro_batch=rows, recomputes=recomputes)
        model = trainer.model
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = len(sequences) // rows

        def checkpointing(on: bool) -> None:
            if on:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            else:
                model.gradient_checkpointing_disable()

        def score() -> Any:
            with torch.no_grad(), autocast(torch, device):
                return trainer._get_per_token_logps_and_entropies(
                    model, ids, mask, answer_ids.shape[1], batch_size=rows
                )[0]

        def step() -> None:
            for first in range(0, len(sequences), rows):
                part = slice(first, first + rows)
                inputs = {
                    "prompt_ids": prompt_ids[part],
                    "prompt_mask": prompt_mask[part],
                    "completion_ids": answer_ids[part],
                    "completion_mask": answer_mask[part],
                    "advantages": advantages[part],
                    "num_items_in_batch": answer_mask.sum(),
                }
                with autocast(torch, device):
                    loss = trainer.compute_loss(model, inputs)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

        model.train()
        checkpointing(False)
        log_probs = score()
        found = {
            "variant": variant,
            "mean_log_prob": float((log_probs * answer_mask).sum() / answer_mask.sum()),
            "log_prob_all_seconds": clock.seconds(score),
        }
        emit(job, **found)
        checkpointing(recomputes)
        found["step_all_seconds"] = clock.seconds(step)
        emit(job, **found, bytes_per_parameter=8, **clock.memory())

    for variant in job["variants"]:
        guarded(job, variant, lambda: measure(variant))  # noqa: B023 - called at once


def autocast(torch: Any, device: str) -> Any:
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def padded(torch: Any, rows: list[list[int]], device: str, *, left: bool) -> tuple[Any, Any]:
    """Ids and mask, filled up on one side to the longest row."""
    longest = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(len(row))
        ids[i, place] = torch.tensor(row)
        mask[i, place] = 1
    return ids.to(device), mask.to(device)


def make_trl(job: Job, *, micro_batch: int, recomputes: bool, steps: int = 1, **options: Any) -> Any:
    """A GRPOTrainer over the job's prompts, as text that its tokenizer reads back to the same ids."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    on_gpu = job["device"] == "cuda"
    rows = len(job["sequences"])
    config = GRPOConfig(
        output_dir=os.path.join(os.path.dirname(job["found"]), "trl"),
        num_generations=8,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch,
        max_completion_length=max(len(sequence["answer"]) for sequence in job["sequences"]),
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=recomputes,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        optim="adamw_torch_fused",
        max_steps=steps,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **options,
    )
    prompts = [" ".join(f"t{token}" for token in sequence["prompt"]) for sequence in job["sequences"][::8]]
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"]), attn_implementation="sdpa"
    )
    return GRPOTrainer(
        model=model.to(job["device"]),
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts * steps}),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
    )


def transformers_packed(job: Job) -> None:
    """transformers without padding: attention with sequence bounds, and Liger's kernels, among them its head that never
    makes all logits. bf16 weights, gradients and Adam states; its loss is the plain sum of the answers' log-probs."""
    import torch
    import transformers
    from transformers import AttentionInterface, AutoModelForCausalLM

    clock = Clock(job, torch)
    device = job["device"]
    AttentionInterface.register("bounds", attention_with_bounds if device == "cuda" else attention_one_by_one)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    model.config._attn_implementation = "bounds"
    head_loss = with_liger(model) if device == "cuda" else plain_head_loss
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    num_answer_tokens = sum(len(sequence["answer"]) for sequence in job["sequences"])
    emit(job, version=transformers.__version__, attention="torch.nn.attention.varlen", head=head_loss.__module__)

    def loss_of(packed: dict[str, Any]) -> Any:
        hidden = model.model(
            input_ids=packed["ids"],
            position_ids=packed["positions"],
            use_cache=False,
            bounds=packed["bounds"],
            longest=packed["longest"],
        ).last_hidden_state[0]
        return head_loss(hidden.index_select(0, packed["rows"]), model.lm_head.weight, packed["targets"])

    def measure(num_tokens: int) -> None:
        clock.clear()
        packed = [pack_of(torch, part, device) for part in packs(job["sequences"], num_tokens)]

        def score() -> float:
            weight = model.lm_head.weight
            weight.requires_grad_(False)  # else its gradient is computed even where none is recorded
            with torch.no_grad():
                total = float(sum(loss_of(part) for part in packed))
            weight.requires_grad_(True)
            return -total / num_answer_tokens

        def step() -> None:
            for part in packed:
                (loss_of(part) / num_answer_tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        found = {
            "variant": str(num_tokens),
            "mean_log_prob": score(),
            "log_prob_all_seconds": clock.seconds(score),
        }
        emit(job, **found)
        found["step_all_seconds"] = clock.seconds(step)
        emit(job, **found, num_micro_batches=len(packed), bytes_per_parameter=8, **clock.memory())

    for num_tokens in job["max_tokens"]:
        guarded(job, str(num_tokens), lambda: measure(num_tokens))  # noqa: B023 - called at once


def with_liger(model: Any) -> Callable[[Any, Any, Any], Any]:
    """Give the model Liger's kernels; its head and loss in one."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False, model=model)

    def head_loss(hidden: Any, weight: Any, targets: Any) -> Any:
        # Its default keeps as few logits as the hidden states take, 128 tokens at a time here: slower.
        return liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="sum", chunk_mem_const=8)

    head_loss.__module__ = "liger_kernel"
    return head_loss


def plain_head_loss(hidden: Any, weight: Any, targets: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")


def attention_with_bounds(
    module: Any, query: Any, key: Any, value: Any, _mask: Any, *, scaling: float, bounds: Any, longest: int, **_: Any
) -> tuple[Any, None]:
    """PyTorch's flash attention over packed sequences; queries of a group get copies of their keys and values."""
    from torch.nn.attention.varlen import varlen_attn

    groups = module.num_key_value_groups
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # tokens, heads, head size
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    out = varlen_attn(
        query.contiguous(),
        key,
        value.contiguous(),
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),
    )
    return out[None], None


def attention_one_by_one(
    module: Any, query: Any, key: Any, value: Any, _mask: Any, *, scaling: float, bounds: Any, **_: Any
) -> tuple[Any, None]:
    """The same where there is no flash attention, for trying the script out."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    sizes = bounds.diff().tolist()
    parts = zip(*(tensor.split(sizes, dim=2) for tensor in (query, key, value)), strict=True)
    outs = [scaled_dot_product_attention(*part, is_causal=True, scale=scaling, enable_gqa=True) for part in parts]
    return torch.cat(outs, 2).transpose(1, 2), None


def packs(sequences: list[dict[str, list[int]]], num_tokens: int) -> list[list[dict[str, list[int]]]]:
    """Longest first, each into the first micro-batch with room."""
    bins: list[tuple[int, list[dict[str, list[int]]]]] = []
    for sequence in sorted(sequences, key=lambda one: -len(one["prompt"]) - len(one["answer"])):
        size = len(sequence["prompt"]) + len(sequence["answer"])
        place = next((i for i, (used, _) in enumerate(bins) if used + size <= num_tokens), None)
        if place is None:
            bins.append((size, [sequence]))
        else:
            used, members = bins[place]
            bins[place] = (used + size, [*members, sequence])
    return [members for _, members in bins]


def pack_of(torch: Any, members: list[dict[str, list[int]]], device: str) -> dict[str, Any]:
    """The tensors of a micro-batch; `rows` are the places whose next token belongs to an answer."""
    ids, positions, bounds, rows, targets = [], [], [0], [], []
    for member in members:
        first, tokens = len(ids), member["prompt"] + member["answer"]
        ids += tokens
        positions += range(len(tokens))
        bounds.append(len(ids))
        rows += range(first + len(member["prompt"]) - 1, first + len(tokens) - 1)
        targets += member["answer"]
    return {
        "ids": torch.tensor([ids], device=device),
        "positions": torch.tensor([positions], device=device),
        "bounds": torch.tensor(bounds, dtype=torch.int32, device=device),
        "longest": max(last - first for first, last in zip(bounds, bounds[1:], strict=False)),
        "rows": torch.tensor(rows, device=device),
        "targets": torch.tensor(targets, device=device),
    }


def trl_step(job: Job) -> None:
    """Whole steps of TRL with vLLM in the same process: generate, score, update, give vLLM the new weights."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # nothing is cut
    import torch
    import trl as package
    from transformers import TrainerCallback

    lengths = [len(sequence["answer"]) for sequence in job["sequences"]]
    options: dict[str, Any] = {}
    if job["device"] == "cuda":
        force_lengths(lengths)
        options = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3,
            "vllm_max_model_length": 2048,
        }
    clock = Clock(job, torch)
    start = time.perf_counter()
    trainer = make_trl(job, micro_batch=job["micro_batch"], recomputes=False, steps=job["repetitions"] + 1, **options)
    spans: dict[str, float] = {}

    def timed(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            clock.synchronize()
            began = time.perf_counter()
            try:
                return plain(*arguments, **keywords)
            finally:
                clock.synchronize()
                spans[name] = spans.get(name, 0.0) + time.perf_counter() - began

        setattr(owner, name, call)

    if job["device"] == "cuda":
        timed(trainer.vllm_generation, "generate")
        timed(trainer.vllm_generation, "sync_weights")
    timed(trainer, "_generate_and_score_completions")
    timed(trainer, "training_step")
    ends: list[float] = []
    steps: list[dict[str, float]] = []

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            emit(job, version=package.__version__, start_up_seconds=time.perf_counter() - start)
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.synchronize()
            ends.append(time.perf_counter())
            steps.append({"seconds": ends[-1] - ends[-2], **spans})
            spans.clear()
            emit(job, steps=steps, micro_batch=job["micro_batch"], **clock.memory())

    trainer.add_callback(Steps())
    trainer.train()
    os._exit(0)  # vLLM's threads may wait for ever


def force_lengths(lengths: list[int]) -> None:
    """Let every answer that vLLM writes have the length of the recipe."""
    import vllm

    plain = vllm.LLM.generate

    def generate(self: Any, prompts: Any, sampling_params: Any = None, **keywords: Any) -> Any:
        each = []
        for place, _ in enumerate(prompts):
            one = sampling_params.clone()
            one.max_tokens, one.ignore_eos = lengths[place % len(lengths)], True
            each.append(one)
        return plain(self, prompts, sampling_params=each, **keywords)

    vllm.LLM.generate = generate


TRAINERS = {"miles": miles, "trl": trl, "transformers-packed": transformers_packed, "trl-step": trl_step}


def main() -> None:
    job = read_job()
    TRAINERS[job["part"]](job)


if __name__ == "__main__":
    main()
