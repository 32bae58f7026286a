from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from miles.model.context import ForwardContext, packed_context
from miles.model.decoder import Decoder
from miles.model.load import load_model
from miles.model.names import to_hf
from miles.ops.matmul import project_float32
from miles.ops.paged_attention import PagedView
from tests.unit.model.random_checkpoints import CHECKPOINTS, write_checkpoint

LENGTHS = [7, 200, 31, 32, 9, 1, 31]


def reference_log_probs(model: PreTrainedModel, sequences: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.log_softmax(model(ids.unsqueeze(0)).logits[0].float(), -1) for ids in sequences])


def packed_log_probs(model: Decoder, sequences: list[torch.Tensor]) -> torch.Tensor:
    context = packed_context([len(ids) for ids in sequences], device="cpu")
    hidden_TD = model(torch.cat(sequences), context)
    return torch.log_softmax(project_float32(hidden_TD, model.head_weight), -1)


def random_sequences(lengths: list[int], vocab_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


# Log-probs to 1e-5: float32 noise of three layers is about 4e-6. Gradients relative to the largest of each tensor.
@pytest.mark.parametrize("case", CHECKPOINTS)
def test_log_probs_and_gradients_equal_transformers(case, tmp_path):
    reference = write_checkpoint(case, tmp_path)
    ours = load_model(tmp_path, dtype=torch.float32, device="cpu")
    sequences = random_sequences(LENGTHS, ours.spec.vocab_size)
    expected, actual = reference_log_probs(reference, sequences), packed_log_probs(ours, sequences)
    assert (actual - expected).abs().max() < 1e-5

    weights = torch.randn(actual.shape, generator=torch.Generator().manual_seed(2)) / 100
    (expected * weights).sum().backward()
    (actual * weights).sum().backward()
    gradients = to_hf(ours.spec, {name: parameter.grad for name, parameter in ours.named_parameters()})
    expected_gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert (gradients[name] - gradient).abs().max() < 1e-4 * gradient.abs().max(), name


def test_no_grad_gives_the_bits_of_the_training_forward(tmp_path):
    write_checkpoint("qwen3", tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    sequences = random_sequences(LENGTHS, model.spec.vocab_size)
    with torch.no_grad():
        expected = packed_log_probs(model, sequences)
    assert torch.equal(packed_log_probs(model, sequences), expected)


@pytest.mark.parametrize("case", ["llama-tied-llama3-rope", "qwen3"])
def test_chunks_and_single_tokens_over_the_cache_equal_the_packed_forward(case, tmp_path):
    write_checkpoint(case, tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    spec = model.spec
    ids = random_sequences([37], spec.vocab_size)[0]
    page_size, num_slots = 8, 48
    caches = [
        [torch.zeros(spec.num_kv_heads, num_slots, spec.head_dim) for _ in range(spec.num_layers)] for _ in range(2)
    ]
    block_table = torch.tensor([[4, 1, 5, 0, 2]])
    slots = (block_table[0].unsqueeze(1) * page_size + torch.arange(page_size)).flatten()
    hidden = []
    with torch.no_grad():
        for start, stop in [(0, 13), (13, 30), *((t, t + 1) for t in range(30, 37))]:
            bounds = torch.tensor([0, stop - start], dtype=torch.int32)
            view = PagedView(
                *caches,
                slots_T=slots[start:stop],
                page_size=page_size,
                block_table_BP=block_table,
                context_lens_B=torch.tensor([stop]),
                query_bounds=bounds,
            )
            hidden.append(model(ids[start:stop], ForwardContext(torch.arange(start, stop), bounds, stop - start, view)))
        expected = model(ids, packed_context([37], device="cpu"))
    torch.testing.assert_close(torch.cat(hidden), expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_stays_near_float32(tmp_path):
    write_checkpoint("llama-biases", tmp_path)
    sequences = random_sequences(LENGTHS, 211)
    with torch.no_grad():
        exact = packed_log_probs(load_model(tmp_path, dtype=torch.float32, device="cpu"), sequences)
        rounded = packed_log_probs(load_model(tmp_path, dtype=torch.bfloat16, device="cpu"), sequences)
    # bfloat16 keeps 8 bits: about 0.01 on average here; a wrong cast or position would give about 1.
    assert 0 < (rounded - exact).abs().mean() < 0.03


def test_tied_head_is_the_embedding_and_is_trained_through_both(tmp_path):
    write_checkpoint("qwen2-tied", tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    assert model.head_weight is model.embedding.weight
    sequences = random_sequences([5], model.spec.vocab_size)
    before = packed_log_probs(model, sequences)
    with torch.no_grad():
        model.embedding.weight[100] *= 3  # not in the input, so only the head can show it
    assert 100 not in sequences[0]
    assert not torch.equal(packed_log_probs(model, sequences), before)


def test_packed_context_counts_positions_anew_in_each_sequence():
    context = packed_context([3, 1, 2], device="cpu")
    assert context.positions_T.tolist() == [0, 1, 2, 0, 0, 1]
    assert context.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert context.cu_seqlens.dtype == torch.int32
    assert context.max_seqlen == 3


def test_smollm2_equals_transformers(smollm2_dir):
    reference = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    ours = load_model(smollm2_dir, dtype=torch.float32, device="cpu")
    assert ours.spec.num_parameters == 134_515_008
    vocabulary = json.loads((smollm2_dir / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    words = "The Ġquick Ġbrown Ġfox Ġmoves Ġat Ġa Ġspeed Ġof Ġ 4 2 Ġmiles Ġper Ġhour . ĠHow Ġfar Ġdoes Ġit".split()
    text = torch.tensor([vocabulary[word] for word in words])
    sequences = [text, text[5:].repeat(4), text[:7]]
    with torch.no_grad():
        difference = packed_log_probs(ours, sequences) - reference_log_probs(reference, sequences)
    assert difference.abs().max() < 1e-4
