"""A decoder with adapters against transformers with the adapters in its weights, and against the peft library."""

import dataclasses
import math

import pytest
import torch

from miles.checkpoint.peft import export_adapter, load_adapter
from miles.config.lora_section import MODULES, LoraConfig
from miles.errors import ConfigError
from miles.model.context import packed_context
from miles.model.decoder import Decoder
from miles.model.load import load_model
from miles.model.lora import PEFT_PREFIX, adapters_of, add_lora, to_peft
from miles.ops.matmul import project_float32
from miles.plan.memory import num_adapter_parameters
from tests.unit.model.random_checkpoints import CHECKPOINTS, write_checkpoint

RANK, ALPHA = 4, 6.0
LENGTHS = [7, 40, 31, 1]
LORA = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA)


def with_adapters(folder, lora=LORA) -> Decoder:
    """The model of a folder with random adapters, B not 0."""
    model = load_model(folder, dtype=torch.float32, device="cpu")
    add_lora(model, lora, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def trainable(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def log_probs(model, sequences, **lora):
    context = dataclasses.replace(packed_context([len(ids) for ids in sequences], device="cpu"), **lora)
    return torch.log_softmax(project_float32(model(torch.cat(sequences), context), model.head_weight), -1)


def expected_log_probs(reference, sequences):
    return torch.cat([torch.log_softmax(reference(ids.unsqueeze(0)).logits[0].float(), -1) for ids in sequences])


def sequences_of(model):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, model.spec.vocab_size, (length,), generator=generator) for length in LENGTHS]


@torch.no_grad()
def add_into(reference, adapters) -> None:
    """W += alpha / rank * B A, by the formula of arXiv 2106.09685."""
    weights = dict(reference.named_parameters())
    for name in (name for name in adapters if ".lora_A." in name):
        module = name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight")
        weights[f"{module}.weight"] += ALPHA / RANK * adapters[name.replace("lora_A", "lora_B")] @ adapters[name]


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_forward_and_gradients_are_those_of_merged_weights(case, tmp_path):
    reference = write_checkpoint(case, tmp_path)
    model = with_adapters(tmp_path)
    sequences = sequences_of(model)
    with torch.no_grad():
        off = log_probs(model, sequences, adapter=False)
        assert (off - expected_log_probs(reference, sequences)).abs().max() < 1e-5
    adapters = {name: tensor.detach() for name, tensor in to_peft(model, trainable(model)).items()}
    assert len(adapters) == 3 * len(MODULES) * 2
    add_into(reference, adapters)
    expected, actual = expected_log_probs(reference, sequences), log_probs(model, sequences)
    assert (actual - expected).abs().max() < 1e-5

    weights = torch.randn(actual.shape, generator=torch.Generator().manual_seed(2)) / 100
    (expected * weights).sum().backward()
    (actual * weights).sum().backward()
    assert all(p.grad is None for name, p in model.named_parameters() if ".lora." not in name)
    gradients = to_peft(model, {name: p.grad for name, p in trainable(model).items()})
    of_weights = {name: p.grad for name, p in reference.named_parameters()}
    for name in (name for name in adapters if ".lora_A." in name):
        other = name.replace("lora_A", "lora_B")
        gradient = ALPHA / RANK * of_weights[name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight") + ".weight"]
        for key, by_chain in ((name, adapters[other].T @ gradient), (other, gradient @ adapters[name].T)):
            assert (gradients[key] - by_chain).abs().max() < 1e-4 * by_chain.abs().max(), key


@pytest.mark.parametrize(
    ("target", "exclude", "expected"),
    [
        (("all-linear",), (), {(i, name) for i in range(3) for name in MODULES}),
        (("q_proj,v_proj",), (), {(i, name) for i in range(3) for name in ("q_proj", "v_proj")}),
        (("linear_qkv", "linear_fc2"), ("k_proj,v_proj",), {(i, n) for i in range(3) for n in ("q_proj", "down_proj")}),
        (("all-linear",), ("layers.0.*", "mlp.*"), {(i, name) for i in (1, 2) for name in MODULES[:4]}),
        (("layers.2.self_attn.o_proj",), (), {(2, "o_proj")}),
        (("model.layers.2.*",), ("*.mlp.*",), {(2, name) for name in MODULES[:4]}),
        (("*.layers.0.*.q_proj",), (), {(0, "q_proj")}),
    ],
)  # fmt: skip
def test_targets_and_excluded_modules(target, exclude, expected, tmp_path):
    write_checkpoint("qwen3", tmp_path)
    lora = LoraConfig(lora_rank=2, target_modules=target, exclude_modules=exclude)
    model = with_adapters(tmp_path, lora)
    found = [one for adapters in adapters_of(model.spec, lora).values() for one in adapters]
    assert {(int(one.hf_module.split(".")[2]), one.key) for one in found} == expected
    assert num_adapter_parameters(model.spec, lora) == sum(p.numel() for p in trainable(model).values())


def test_targets_that_name_nothing_are_refused(tmp_path):
    write_checkpoint("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="--target-modules layers.9.* names no module"):
        with_adapters(tmp_path, LoraConfig(lora_rank=2, target_modules=("layers.9.*",)))


def test_fresh_adapters_change_nothing_and_are_drawn_by_seed(tmp_path):
    write_checkpoint("llama", tmp_path)
    plain = load_model(tmp_path, dtype=torch.float32, device="cpu")
    model, same = (load_model(tmp_path, dtype=torch.float32, device="cpu") for _ in range(2))
    for one in (model, same):
        add_lora(one, LORA, seed=3)
    sequences = sequences_of(model)
    assert torch.equal(log_probs(model, sequences), log_probs(plain, sequences))
    drawn = {name: p for name, p in trainable(model).items() if name.endswith(".a")}
    assert all(torch.equal(p, trainable(same)[name]) for name, p in drawn.items())
    for p in drawn.values():
        assert 0.8 / math.sqrt(p.shape[1]) < p.abs().max() <= 1 / math.sqrt(p.shape[1])


def test_dropout_is_a_matter_of_the_pass(tmp_path):
    write_checkpoint("qwen2", tmp_path)
    model = with_adapters(tmp_path, LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, lora_dropout=0.3))
    sequences = sequences_of(model)
    plain = log_probs(model, sequences)
    assert torch.equal(plain, log_probs(with_adapters(tmp_path), sequences))
    first, again, other = (log_probs(model, sequences, dropout_seed=seed) for seed in (5, 5, 600))
    assert torch.equal(first, again)
    assert not torch.allclose(first, plain) and not torch.allclose(first, other)


@pytest.mark.parametrize("case", ["llama-biases", "qwen2-tied", "qwen3"])
def test_an_adapter_of_the_peft_library_gives_its_log_probs(case, tmp_path):
    peft = pytest.importorskip("peft", reason="the peft library is not installed (pip install peft)")
    reference = write_checkpoint(case, tmp_path / "model")
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
    theirs = peft.get_peft_model(reference, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.1)
    theirs.save_pretrained(tmp_path / "theirs")

    lora = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, target_modules=tuple(settings["target_modules"]))
    model = load_model(tmp_path / "model", dtype=torch.float32, device="cpu")
    add_lora(model, lora, seed=0)
    load_adapter(model, tmp_path / "theirs")
    sequences = sequences_of(model)
    with torch.no_grad():
        assert (log_probs(model, sequences) - expected_log_probs(theirs, sequences)).abs().max() < 1e-5

    # and back: ours, with settings of its own, in the library
    partly = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, exclude_modules=("layers.1.*",))
    ours = with_adapters(tmp_path / "model", partly)
    tensors = to_peft(ours, trainable(ours))
    export_adapter(tmp_path / "ours", source=tmp_path / "model", tensors=tensors, lora=partly)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    with torch.no_grad():
        assert (log_probs(ours, sequences) - expected_log_probs(loaded, sequences)).abs().max() < 1e-5
