"""The engine serves the adapters that the trainer updates."""

from __future__ import annotations

import pytest
import torch

from miles.config.lora_section import LoraConfig
from miles.model.decoder import Decoder
from miles.model.lora import PEFT_PREFIX, add_lora, to_peft
from miles.model.names import to_hf
from tests.unit.engine.tiny import full_logits, make_core, make_model, reference_answer, request, run_all

LORA = LoraConfig(lora_rank=2, lora_alpha=3.0)


@torch.no_grad()
def merged(model: Decoder) -> Decoder:
    """A plain decoder whose weights hold the adapters: W + alpha / rank * B A."""
    tensors = dict(model.named_parameters())
    plain = Decoder(model.spec, dtype=torch.float32, device="cpu")
    plain.load_state_dict({name: tensors[name] for name in plain.state_dict()})
    weights, adapters = to_hf(model.spec, plain.state_dict()), to_peft(model, tensors)
    for name in (name for name in adapters if ".lora_A." in name):
        weight = name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight") + ".weight"
        weights[weight].add_(1.5 * adapters[name.replace("lora_A", "lora_B")] @ adapters[name])
    return plain


@torch.no_grad()
def update(model: Decoder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora." in name:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_answers_are_those_of_the_adapters_of_now(family: str) -> None:
    architectures = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    changes = {"architecture": architectures[family], "qkv_bias": family == "qwen2", "qk_norm": family == "qwen3"}
    model = make_model(**changes)
    base = make_model(**changes)
    add_lora(model, LORA, seed=0)
    core = make_core(model)
    requests = [request(i, [2 + i, 5, 9, 4, 11], 6, ignore_eos=True) for i in range(3)]
    answers = []
    for version in range(3):
        if version > 0:
            update(model, seed=version)
        expected = merged(model) if version > 0 else base
        core.set_version(version)
        core.add(requests)
        answers.append(run_all(core))
        for wanted in requests:
            tokens, log_probs, _ = reference_answer(expected, wanted)
            got = answers[-1][wanted.request_id]
            assert got.output_ids == tokens
            assert got.log_probs == pytest.approx(log_probs, abs=1e-4)
            assert set(got.weight_versions) == {version}  # field note 32: every token names its adapter
    assert len({tuple(found[0].log_probs) for found in answers}) == 3


def test_each_token_of_an_answer_names_the_adapters_it_was_drawn_with() -> None:
    model = make_model()
    add_lora(model, LORA, seed=0)
    update(model, seed=3)
    core = make_core(model)
    core.set_version(3)
    wanted = request(0, [2, 3, 4, 5, 6, 7], 9, ignore_eos=True)
    core.add([wanted])
    for _ in range(4):
        core.step()
    core.pause("retract")
    by_version = {3: merged(model)}
    update(model, seed=4)
    core.set_version(4)
    by_version[4] = merged(model)
    result = run_all(core)[0]
    assert result.weight_versions == [3] * 4 + [4] * 5
    start = len(wanted.prompt_ids)
    for place, (token, version) in enumerate(zip(result.output_ids, result.weight_versions, strict=True)):
        logits = full_logits(by_version[version], [*wanted.prompt_ids, *result.output_ids])[start + place - 1]
        assert result.log_probs[place] == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-4)
