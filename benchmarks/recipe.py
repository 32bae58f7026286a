"""The workload of the recipe: Qwen3 shapes with random weights, 32 prompts x 8 answers of fixed lengths.

Answer lengths are forced (no end token counts), so every engine writes the same number of tokens and every trainer gets
the same batch. Prompts are random ids, new for each repetition, so that no prefix index carries over.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from miles.model.decoder import Decoder
from miles.model.spec import ModelSpec
from miles.types import GenerationRequest, GenerationResult, SamplingParams, TrainSample

LENGTHS = json.loads((Path(__file__).parent / "cases" / "recipe.json").read_text())
ANSWERS_PER_PROMPT = 8
SHAPES = {  # hidden, intermediate, layers, heads, key/value heads, tied head
    "0.6b": (1024, 3072, 28, 16, 8, True),
    "1.7b": (2048, 6144, 28, 16, 8, True),
    "4b": (2560, 9728, 36, 32, 8, True),
    "tiny": (256, 512, 2, 4, 2, True),
}


def spec_of(shape: str) -> ModelSpec:
    hidden, intermediate, layers, heads, kv_heads, tied = SHAPES[shape]
    return ModelSpec(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        max_position_embeddings=40960,
        tied_head=tied,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=True,
    )


def random_model(shape: str, *, dtype: torch.dtype, device: str, seed: int = 0) -> Decoder:
    model = Decoder(spec_of(shape), dtype=dtype, device=torch.device(device))
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    return model


def requests(repetition: int, *, share: float = 1.0) -> list[GenerationRequest]:
    """The requests of one rollout; `share` below 1 shortens every answer, for trying the script out."""
    rng = random.Random(1000 + repetition)
    made: list[GenerationRequest] = []
    for place, prompt_length in enumerate(LENGTHS["prompt_lengths"]):
        prompt = [rng.randrange(1000, 150000) for _ in range(prompt_length)]
        for member in range(ANSWERS_PER_PROMPT):
            index = place * ANSWERS_PER_PROMPT + member
            length = max(1, round(LENGTHS["answer_lengths"][index] * share))
            sampling = SamplingParams(max_new_tokens=length, ignore_eos=True)
            made.append(GenerationRequest(index, prompt, sampling, noise_key=repetition * 10**6 + index))
    return made


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
