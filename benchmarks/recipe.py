"""The workload of the recipe: Qwen3 shapes with random weights, 32 prompts x 8 answers of fixed lengths.

Answer lengths are forced (no end token counts), so every engine writes the same number of tokens and every trainer gets
the same batch. Prompts are random ids, new for each repetition, so that no prefix index carries over.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch

from miles.loop.placement import keep_memory_in_one_piece
from miles.model.decoder import Decoder
from miles.model.spec import ModelSpec
from miles.plan.shapes import SHAPES
from miles.types import GenerationRequest, GenerationResult, SamplingParams, TrainSample

LENGTHS = json.loads((Path(__file__).parent / "cases" / "recipe.json").read_text())
ANSWERS_PER_PROMPT = 8
_TINY = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


def spec_of(shape: str) -> ModelSpec:
    """Of Qwen3 `0.6b`, `1.7b` or `4b`, or of a `tiny` one to try a script out."""
    if shape == "tiny":
        return dataclasses.replace(SHAPES["Qwen3-0.6B"], **_TINY)
    return SHAPES[f"Qwen3-{shape.upper()}"]


def random_model(shape: str, *, dtype: torch.dtype, device: str, seed: int = 0) -> Decoder:
    return random_decoder(spec_of(shape), dtype=dtype, device=device, seed=seed)


def random_decoder(spec: ModelSpec, *, dtype: torch.dtype, device: str, seed: int = 0) -> Decoder:
    keep_memory_in_one_piece()  # as a run does
    model = Decoder(spec, dtype=dtype, device=torch.device(device))
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    return model


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups of requests that share a prompt. Answers have the lengths given here, whatever is drawn."""

    name: str
    prompt_lengths: list[int]  # of each group
    answer_lengths: list[list[int]]  # of each answer of each group

    @property
    def num_answer_tokens(self) -> int:
        return sum(map(sum, self.answer_lengths))

    def prompts(self, repetition: int) -> list[list[int]]:
        """A prompt of random ids for each group."""
        rng = random.Random(1000 + repetition)
        return [[rng.randrange(1000, 150000) for _ in range(length)] for length in self.prompt_lengths]

    def requests(self, repetition: int) -> list[GenerationRequest]:
        """The requests of one rollout, group by group."""
        groups = zip(self.prompts(repetition), self.answer_lengths, strict=True)
        pairs = [(prompt, length) for prompt, lengths in groups for length in lengths]
        return [
            GenerationRequest(
                index, prompt, SamplingParams(max_new_tokens=length, ignore_eos=True), repetition * 10**6 + index
            )
            for index, (prompt, length) in enumerate(pairs)
        ]

    def sequence_lengths(self) -> list[int]:
        """Prompt and answer of each request."""
        groups = zip(self.prompt_lengths, self.answer_lengths, strict=True)
        return [prompt + answer for prompt, answers in groups for answer in answers]

    def decode_bytes(self, spec: ModelSpec, dtype: torch.dtype) -> dict[str, int]:
        """Bytes that writing all answers at once must read at least: the weights once per token of the longest answer,
        keys and values once per token. A group's prompt counts once per answer, or once for the whole group."""
        token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
        weight_bytes = spec.num_parameters * dtype.itemsize * max(map(max, self.answer_lengths))
        own = sum(length * (length + 1) // 2 for lengths in self.answer_lengths for length in lengths)
        groups = list(zip(self.prompt_lengths, self.answer_lengths, strict=True))
        per_answer = sum(prompt * sum(answers) for prompt, answers in groups)
        per_group = sum(prompt * max(answers) for prompt, answers in groups)
        return {
            "prompts_per_answer": weight_bytes + token_bytes * (own + per_answer),
            "prompts_per_group": weight_bytes + token_bytes * (own + per_group),
        }


def recipe(*, answers_per_prompt: int = 8, num_prompts: int = 32, share: float = 1.0) -> Workload:
    """`share` below 1 shortens every answer; with fewer prompts than 32 it is for trying a script out."""
    lengths = [max(1, round(length * share)) for length in LENGTHS["answer_lengths"]]
    prompts = LENGTHS["prompt_lengths"][:num_prompts]
    endless = itertools.cycle(lengths)
    answers = [list(itertools.islice(endless, answers_per_prompt)) for _ in prompts]
    suffix = "" if answers_per_prompt == ANSWERS_PER_PROMPT else f"-x{answers_per_prompt}"
    return Workload(f"recipe{suffix}", prompts, answers)


def mini_sglang(*, num_prompts: int = 256, share: float = 1.0) -> Workload:
    """Requests that share nothing, 100 to 1,024 tokens in and out, as in mini-sglang's offline benchmark."""
    rng = random.Random(0)
    prompts = [rng.randint(100, 1024) for _ in range(num_prompts)]
    answers = [[max(1, round(rng.randint(100, 1024) * share))] for _ in prompts]
    return Workload("mini-sglang", prompts, answers)


def requests(repetition: int, *, share: float = 1.0) -> list[GenerationRequest]:
    """The requests of one rollout of the recipe."""
    return recipe(share=share).requests(repetition)


def to_train_samples(sent: list[GenerationRequest], results: dict[int, GenerationResult]) -> list[TrainSample]:
    """A training batch of the answers, with rewards that give every group a signal."""
    return [
        TrainSample(
            tokens=[*request.prompt_ids, *results[request.request_id].output_ids],
            response_length=len(results[request.request_id].output_ids),
            loss_mask=[1] * len(results[request.request_id].output_ids),
            reward=float(request.request_id % ANSWERS_PER_PROMPT < 3),
            raw_reward=float(request.request_id % ANSWERS_PER_PROMPT < 3),
            group_index=request.request_id // ANSWERS_PER_PROMPT,
            index=request.request_id,
            rollout_log_probs=results[request.request_id].log_probs,
            weight_versions=results[request.request_id].weight_versions,
        )
        for request in sent
    ]
