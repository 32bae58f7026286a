"""The estimate against numbers worked out by hand, and what must hold whatever the numbers are."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.config.flags import with_values
from miles.config.lora_section import LoraConfig
from miles.config.resolve import resolve
from miles.config.sections import RunConfig
from miles.errors import ConfigError
from miles.model.activations import Recompute
from miles.model.context import packed_context
from miles.plan.advice import KNOBS, _less_on_host, changed, fastest, flags_text, largest_models, remedies
from miles.plan.disk import SPARE_BYTES, disk_of
from miles.plan.machine import GIB, cpu_machine, gpu_machine
from miles.plan.memory import CPU_PROCESS_BYTES, Job, MicroBatch, estimate
from miles.plan.seconds import step_seconds
from miles.plan.shapes import SHAPES
from miles.trainer.batch import micro_batches, token_batch
from miles.types import TrainSample
from tests.unit.engine.tiny import make_model
from tests.unit.living import outcome

# As their model cards and `model.safetensors.index.json` have them.
PUBLISHED = {
    "SmolLM2-135M": 134_515_008,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen3-0.6B": 596_049_920,
    "Llama-3.2-1B": 1_235_814_400,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen3-4B": 4_022_468_096,
    "Qwen2.5-7B": 7_615_616_512,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
}

CPU = cpu_machine(host_bytes=64 * GIB, disk_bytes=0)


def machine(name="H200", **changes):
    return gpu_machine(name, host_bytes=128 * GIB, disk_bytes=500 * GIB, **changes)


def job(shape="Qwen3-0.6B", where=None, prompt_len=100, answer_len=1000, **flags) -> Job:
    config = resolve(with_values(RunConfig(), {"rollout_max_response_len": answer_len, **flags}))[0]
    return Job(config, SHAPES[shape], where or machine(), prompt_len, answer_len)


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_published_number_of_parameters(name):
    assert SHAPES[name].num_parameters == PUBLISHED[name]


def test_parts_by_hand():
    """Qwen3-0.6B: 596,049,920 parameters; a token of the cache takes 2 x 28 layers x 8 heads x 128 x 2 bytes; a layer
    keeps of a token 4 x 1,024 + 2 x 4,096 + 2,048 + 32 + 3 x 3,072 numbers of 2 bytes."""
    parts = estimate(
        job(max_tokens_per_gpu=4400, engine_max_total_tokens=160_000, log_probs_chunk_size=1024, use_kl_loss=True)
    ).device
    num = 596_049_920
    assert parts["weights"] == parts["reference and teacher"] == 2 * num
    assert parts["masters"] == parts["gradients"] == 4 * num
    assert parts["Adam states"] == 8 * num
    assert parts["KV cache"] == 160_000 * 114_688
    around = 1024 * 2 + 2 * 128 * 4  # the sum before the last norm; cosines and sines
    assert parts["activations"] == 4 * 1099 * (28 * 23_584 * 2 + around)  # 4 samples; the last token is not read
    # 1,024 logits of a chunk in float32 and their gradient in bfloat16; the head's gradient is added to its sum at once
    assert parts["head or layer at work"] == 1024 * 151_936 * 6 + 1024 * 2 * 4000 * 2


def test_cheap_parts_that_are_made_again_by_hand():
    """The goal of 8,192 tokens of Qwen3-0.6B with 20 GB: 4,096 + 4,096 + 1,024 of the 23,584 numbers are not kept."""
    flags = {"max_tokens_per_gpu": 8192, "engine_max_total_tokens": 16_000, "log_probs_chunk_size": 1024}
    asked = job(answer_len=717, prompt_len=112, recompute_granularity="selective", **flags)
    parts = estimate(asked).device
    tokens, around = asked.micro_batch(8192).tokens, 1024 * 2 + 2 * 128 * 4
    assert parts["activations"] == tokens * (28 * (23_584 - 2 * 1024 - 4096 - 3072) * 2 + around)
    trainer = ("weights", "masters", "gradients", "Adam states", "activations", "head or layer at work")
    assert sum(parts[name] for name in trainer) < 18.6 * GIB
    seconds = [step_seconds(one, estimate(one)).update for one in (asked, job(answer_len=717, prompt_len=112, **flags))]
    assert 1.0 < seconds[0] / seconds[1] < 1.05


def test_cheap_parts_come_before_whole_layers():
    """Activations may take 16 GiB: 12,000 tokens whole, 16,384 without cheap parts, 30,000 with fewer layers."""
    budget = job(where=machine("H100", memory_gib=80)).limits.activations
    assert budget.recompute_for(12_000) == Recompute()
    assert budget.recompute_for(16_384) == Recompute(selective=True)
    assert 0 < budget.recompute_for(30_000).num_layers < 28


def test_micro_batches_are_balanced():
    """256 samples of 1,100 tokens: 14 fit into 16,000, so there are 19 micro-batches of at most 14."""
    assert job().micro_batch(16_000) == MicroBatch(14 * 1099, 14 * 1000, 19, 13 * 1099)
    assert job().micro_batch(500) == MicroBatch(1099, 1000, 256, 1099)  # a longer sample is alone
    assert job(micro_batch_size=2).micro_batch(16_000) == MicroBatch(2198, 2000, 128, 2198)


def test_the_smallest_micro_batch_may_keep_most():
    """4B with LoRA on an H200: six micro-batches of 21 or 22 samples with 349 inputs. 21 fit whole, 22 do not."""
    asked = job(
        "Qwen3-4B", prompt_len=250, answer_len=100, rollout_batch_size=16, max_tokens_per_gpu=8000, lora_rank=16
    )
    batch, budget = asked.micro_batch(8000), asked.limits.activations
    assert (batch.fewest_tokens, batch.tokens) == (21 * 349, 22 * 349)
    assert budget.recompute_for(21 * 349) == Recompute()
    assert budget.recompute_for(22 * 349) == Recompute(selective=True)
    layer = 4 * 2560 + 2 * 6144 + 4096 + 64 + 3 * 9728
    assert estimate(asked).device["activations"] == 21 * 349 * (36 * layer * 2 + 2560 * 2 + 2 * 128 * 4)


def test_shared_prompts_are_read_once_in_a_group():
    """64 of 100 tokens of a prompt are shared: a group of 8 has 64 + 8 x 235 tokens instead of 8 x 299."""
    shared = job(answer_len=200, share_prompts_in_training=True)
    assert shared.micro_batch(4000) == MicroBatch(2 * (64 + 8 * 235), 2 * 8 * 200, 16, 2 * (64 + 8 * 235))
    assert shared.micro_batch(800) == MicroBatch(64 + 3 * 235, 3 * 200, 96, 64 + 3 * 235)
    assert changed(shared, {"micro_batch_size": 1}).micro_batch(4000) == MicroBatch(299, 200, 256, 299)
    longer = dataclasses.replace(shared, prompt_len=128)  # its last token is read for each answer, and with it 63 more
    assert longer.micro_batch(4000).tokens == 64 + 8 * 263


@pytest.mark.parametrize(
    ("tokens", "prompt", "answer", "flags"),
    [
        (300, 100, 5, {}),  # a group is split evenly, not into one that is full and a rest
        (1000, 256, 200, {"n_samples_per_prompt": 4}),
        (20_000, 300, 30, {"n_samples_per_prompt": 4, "micro_batch_size": 3}),  # alone there are fewer micro-batches
        (3000, 65, 100, {"n_samples_per_prompt": 2, "num_steps_per_rollout": 2}),
        (3000, 65, 100, {"loss_type": "sft_loss"}),
    ],
)
def test_shared_prompts_are_planned_as_they_are_packed(tokens, prompt, answer, flags):
    planned = job(
        prompt_len=prompt, answer_len=answer, rollout_batch_size=4, max_tokens_per_gpu=tokens,
        share_prompts_in_training=True, **flags,
    )  # fmt: skip
    group = 1 if planned.config.algorithm.loss_type == "sft_loss" else planned.config.rollout.n_samples_per_prompt
    samples = [
        TrainSample([i // group] * prompt + [i] * answer, answer, [1] * answer, 0.0, 0.0, i // group, i)
        for i in range(planned.samples_per_step)
    ]
    packed = micro_batches(
        token_batch(samples, torch.device("cpu")), range(len(samples)), max_tokens=tokens, share=True,
        max_samples=planned.config.batch.micro_batch_size,
    )  # fmt: skip
    sizes = [len(one.input_ids_T) for one in packed]
    expected = MicroBatch(max(sizes), max(len(one.targets_R) for one in packed), len(packed), min(sizes))
    assert planned.micro_batch(tokens) == expected


def test_a_released_cache_lies_where_the_trainer_works():
    flags = {"max_tokens_per_gpu": 8192, "engine_max_total_tokens": 300_000}
    kept, released = estimate(job(**flags)), estimate(job(offload_rollout=True, **flags))
    assert "activations" in kept.device and "KV cache" in kept.device
    assert "activations" not in released.device  # answers are written with more than training takes
    small = {**flags, "engine_max_total_tokens": 16_000}
    assert "KV cache" not in estimate(job(offload_rollout=True, **small)).device
    both = estimate(job(offload_rollout=True, offload_train=True, **flags))
    assert released.process_bytes - both.process_bytes == 16 * 596_049_920
    assert both.host["masters"] + both.host["Adam states"] == 12 * 596_049_920


@pytest.mark.parametrize(
    ("flags", "device", "host"),
    [
        ({"adam_state": "bfloat16"}, -4.0, 0.0),
        ({"adam_state": "8bit"}, -8 + 2 + 8 / 256, 0.0),
        ({"optimizer_cpu_offload": True}, -8.0, 8.0),
        ({"async_save": True}, 0.0, 12.0),
        ({"advantage_estimator": "ppo"}, 18.0, 0.0),
        ({"kl_coef": 0.1}, 2.0, 0.0),
        ({"dtype": "float32"}, -2.0, 0.0),
    ],
)
def test_bytes_of_a_parameter(flags, device, host):
    kept = ("weights", "masters", "gradients", "Adam states", "reference and teacher")

    def per_parameter(**changes):
        memory = estimate(job(engine_max_total_tokens=1600, max_tokens_per_gpu=1100, **changes))
        states = sum(memory.device.get(part, 0) for part in kept)
        return states / 596_049_920, sum(memory.host.values()) / 596_049_920

    before, after = per_parameter(), per_parameter(**flags)
    assert before[0] == 18
    assert after[0] - before[0] == pytest.approx(device, abs=1e-6)
    assert after[1] - before[1] == pytest.approx(host, abs=1e-6)


@pytest.mark.parametrize("granularity", [None, "selective"])
def test_activations_are_what_a_forward_keeps_on_a_cpu(granularity):
    """Sequences of one length, so that nothing is padded."""
    spec = dataclasses.replace(SHAPES["Qwen3-0.6B"], num_layers=3, vocab_size=64, max_position_embeddings=64)
    model = make_model(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)})
    _, measured = outcome(model, Recompute(selective=granularity is not None), packed_context([16] * 4, device="cpu"))
    flags = {"rollout_batch_size": 1, "n_samples_per_prompt": 4, "max_tokens_per_gpu": 64}
    flags["recompute_granularity"] = granularity
    asked = job(where=CPU, prompt_len=8, answer_len=8, **flags)
    planned = estimate(dataclasses.replace(asked, spec=spec)).device["activations"]
    assert measured < planned < 1.2 * measured  # it plans for sequences of different lengths, which are padded


@settings(max_examples=60, deadline=None)
@given(
    budget=st.sampled_from([1024, 4096, 16384]),
    rows=st.sampled_from([16, 64, 256]),
    cache=st.sampled_from([20_000, 60_000]),
    layers=st.sampled_from([0, 7, 28]),
    shape=st.sampled_from(["Qwen3-0.6B", "Llama-3.2-1B", "Qwen3-4B"]),
)
def test_more_of_anything_takes_no_less_memory(budget, rows, cache, layers, shape):
    flags = {
        "max_tokens_per_gpu": budget, "engine_max_running_requests": rows, "engine_max_total_tokens": cache,
        "recompute_num_layers": layers,
    }  # fmt: skip
    least = estimate(job(shape, **flags)).process_bytes
    for more in (
        {"max_tokens_per_gpu": 2 * budget},
        {"engine_max_running_requests": 2 * rows},
        {"engine_max_total_tokens": 2 * cache},
        {"use_kl_loss": True},
        {"rollout_batch_size": 64},
    ):
        assert estimate(job(shape, **{**flags, **more})).process_bytes >= least, more
    assert estimate(job(shape, **{**flags, "adam_state": "8bit"})).process_bytes < least


@pytest.mark.parametrize(("rank", "num_bytes"), [(0, 6), (8, 4)])
def test_a_cpu_makes_the_head_and_its_gradient_wider_than_half_precision(rank, num_bytes):
    """However few tokens there are: the embedding's gradient in two bytes and in four, or the head in four alone."""
    flags = {"dtype": "bfloat16", "log_probs_chunk_size": 1, "micro_batch_size": 1, "lora_rank": rank}
    parts = estimate(job(where=CPU, prompt_len=2, answer_len=2, **flags)).device
    assert parts["head or layer at work"] == num_bytes * 151_936 * 1024 + 2 * 2 * 1024 * 2


def test_the_cpu_pays_for_the_blocks_it_uses_only():
    where = cpu_machine(host_bytes=64 * GIB, disk_bytes=0)
    memory = estimate(
        job("SmolLM2-135M", where, prompt_len=20, answer_len=80, rollout_batch_size=4, n_samples_per_prompt=8)
    )
    # 2,640 tokens of a head take 660 KiB; keys and values of 3 heads in 30 layers lie apart, in pieces of 2 MiB
    assert memory.device["KV cache"] == 2 * 30 * 3 * (2 << 20)
    assert memory.device["process"] == CPU_PROCESS_BYTES
    assert "masters" not in memory.device and memory.device["weights"] == 4 * 134_515_008


def test_shared_memory_counts_both_sides():
    apart, shared = machine(memory_gib=100), machine(memory_gib=100, unified=True)
    on_host = {"optimizer_cpu_offload": True, "max_tokens_per_gpu": 2048, "engine_max_total_tokens": 20_000}
    assert estimate(job("Qwen3-4B", apart, **on_host)).fits
    on_gpu = {**on_host, "optimizer_cpu_offload": False}
    assert estimate(job("Qwen3-4B", apart, **on_gpu)).use - estimate(job("Qwen3-4B", apart, **on_host)).use > 0.2
    assert estimate(job("Qwen3-4B", shared, **on_host)).use > 0.85


@pytest.mark.parametrize(
    ("shape", "where", "flags"),
    [
        ("Qwen3-0.6B", machine(memory_gib=16), {"max_tokens_per_gpu": 16_384, "engine_max_total_tokens": 40_000}),
        ("Qwen3-4B", machine(), {"max_tokens_per_gpu": 32_768, "engine_max_total_tokens": 300_000}),
        ("Qwen3-1.7B", machine("RTX 4090"), {}),
        ("Qwen3-4B", machine("GB10"), {"engine_max_total_tokens": 500_000}),
    ],
)
def test_what_is_advised_fits(shape, where, flags):
    asked = job(shape, where, **flags)
    assert not estimate(asked).fits
    advice = remedies(asked)
    assert advice
    for changes in advice:
        assert flags_text(changes).startswith("--")
        assert estimate(changed(asked, changes)).fits, changes
        for name in changes:  # and nothing of it is needless
            fewer = {other: value for other, value in changes.items() if other != name}
            assert not estimate(changed(asked, fewer)).fits


def test_no_advice_where_none_helps():
    assert remedies(job("Qwen3-32B", machine("RTX 4090"))) == []
    assert fastest(job("Qwen3-32B", machine("RTX 4090"))) is None


def test_a_smaller_rank_is_advised_where_adapters_take_the_memory():
    asked = job("Qwen3-4B", lora_rank=100_000)
    (changes,) = remedies(asked)
    assert changes["lora_rank"] < 100_000 and estimate(changed(asked, changes)).fits


def test_what_fills_the_host_is_advised_to_leave_it():
    full = {"offload_train": True, "offload_rollout": True, "optimizer_cpu_offload": True, "async_save": True}
    small = gpu_machine("H200", host_bytes=16 * GIB, disk_bytes=0)
    assert estimate(job("Qwen3-4B", small)).fits
    asked = job("Qwen3-4B", small, **full)
    (changes,) = remedies(asked)
    assert estimate(changed(asked, changes)).fits
    left = {"--no-async-save", "--no-offload-train", "--no-optimizer-cpu-offload"}
    assert set(flags_text(changes).split()) == left
    slow = job("Qwen3-4B", gpu_machine("A100", host_bytes=16 * GIB, disk_bytes=0), **full)
    assert fastest(changed(slow, fastest(slow))) == {}  # nothing faster is left to find


def test_the_fastest_setting_takes_back_what_slows_down():
    best = fastest(job(adam_state="8bit", recompute_num_layers=28))
    assert best is not None and best["adam_state"] == "float32" and best["recompute_num_layers"] == 0


def test_modules_with_adapters_are_found_once_in_a_search(monkeypatch):
    asked, adapts, calls = job("Qwen3-4B", lora_rank=12), LoraConfig.adapts, []
    monkeypatch.setattr(LoraConfig, "adapts", lambda self, module: calls.append(module) or adapts(self, module))
    fastest(asked)
    assert len(calls) <= 7 * asked.spec.num_layers


def test_every_knob_turns_memory_down():
    asked = job("Qwen3-1.7B", max_tokens_per_gpu=16_384, engine_max_total_tokens=290_000, lora_rank=64)
    for knob in set(KNOBS) - {_less_on_host}:
        used = [estimate(changed(asked, changes)).process_bytes for changes in knob(asked)]
        assert used == sorted(used, reverse=True) and used[-1] < estimate(asked).process_bytes, knob


def test_the_fastest_setting_says_that_no_layer_is_computed_again():
    """Without the number the granularity means all of them."""
    asked = job(recompute_granularity="full", max_tokens_per_gpu=1024)
    assert changed(asked, fastest(asked)).limits.activations.fixed.num_layers == 0
    assert "recompute_num_layers" not in fastest(job(recompute_granularity="full", recompute_method="uniform"))


def test_the_fastest_setting_fits_and_is_not_slower():
    asked = job("Qwen3-4B", machine("GB10"), max_tokens_per_gpu=1024, engine_max_total_tokens=4096)
    best = changed(asked, fastest(asked))
    memory = estimate(best)
    assert memory.fits and best.config.optim.adam_state == "float32"
    assert step_seconds(best, memory).step < 0.8 * step_seconds(asked, estimate(asked)).step


def test_larger_machines_train_larger_models():
    sizes = []
    for name in ("RTX 4090", "L40S", "H200", "B200"):
        as_set, at_best = largest_models(job(where=machine(name)))
        sizes.append((SHAPES[as_set].num_parameters, SHAPES[at_best].num_parameters))
        assert sizes[-1][0] <= sizes[-1][1]
    assert sizes == sorted(sizes)


def test_4b_with_the_recipe_fits_a_unified_128_gb():
    """The machine and recipe on which the manual's system was stopped twice: 32 prompts, 8 answers of 1,024 tokens."""
    asked = job("Qwen3-4B", machine("", memory_gib=128, unified=True), answer_len=1024)
    assert fastest(asked) is not None
    assert estimate(changed(asked, fastest(asked))).fits


def test_time_of_the_measured_step():
    """benchmarks/results/grpo_step_0.6b_nvidia-h200_2026-11-30.json: 4.2 s and 1.8 s, mean answer 717 tokens."""
    planned = job(answer_len=717, prompt_len=112)
    seconds = step_seconds(planned, estimate(planned))
    assert seconds.generate == pytest.approx(4.17 * 717 / 1024, rel=0.25)  # the longest answer has 1,024
    assert seconds.update == pytest.approx(1.82, rel=0.2)
    assert seconds.log_probs == 0


def test_time_of_the_passes_before_the_first_update():
    def passes(**flags) -> float:
        planned = job(**flags)
        one = job(use_kl_loss=True)
        return step_seconds(planned, estimate(planned)).log_probs / step_seconds(one, estimate(one)).log_probs

    assert passes(lora_rank=8, use_kl_loss=True) == 1  # the policy without its adapters
    assert passes(kl_coef=0.1) == passes(advantage_estimator="ppo", num_steps_per_rollout=2) == 2
    assert passes(num_steps_per_rollout=2, use_rollout_logprobs=True) == 0
    assert passes(use_opd=True, opd_teacher_load="teacher") == 2
    assert passes(use_opd=True, opd_teacher_load="teacher", opd_log_prob_top_k=4) == 1


def test_disk():
    found = disk_of(job(save_interval=2, save_keep_last=3), num_rollout=20)
    assert found.checkpoint_bytes == 12 * 596_049_920 + SPARE_BYTES
    assert (found.num_checkpoints, found.num_at_once) == (3, 4)
    assert found.needed_bytes > 4 * found.checkpoint_bytes
    repaired = disk_of(job(save_interval=2, save_keep_last=3, use_fault_tolerance=True), num_rollout=20)
    assert (repaired.num_checkpoints, repaired.num_at_once) == (3, 5)
    best = disk_of(job(save_interval=2, save_keep_best=2, eval_interval=2), num_rollout=20)
    assert (best.num_checkpoints, best.num_at_once) == (3, 4)  # the newest, and two
    assert disk_of(job(), num_rollout=20).num_at_once == 1
    assert disk_of(job(adam_state="8bit"), num_rollout=1).checkpoint_bytes < 0.55 * found.checkpoint_bytes
    assert disk_of(job(save_interval=2), num_rollout=20).num_checkpoints == 10
    reads = {"eval_function_path": "mine.Elsewhere", "eval_interval": 5}
    folder = disk_of(job(save_interval=2, save_keep_last=3, **reads), num_rollout=20)
    assert folder.needed_bytes - found.needed_bytes == folder.export_bytes == 2 * 596_049_920 + SPARE_BYTES
    assert disk_of(job(save_hf="out"), num_rollout=20).export_bytes == folder.export_bytes
    adapters = job(lora_rank=8, **reads)
    assert disk_of(adapters, num_rollout=20).export_bytes == folder.export_bytes + 4 * adapters.num_adapted > 0
    alone = job(lora_rank=8, save_hf="out")
    assert disk_of(alone, num_rollout=20).export_bytes == 4 * adapters.num_adapted + SPARE_BYTES
    assert disk_of(job(eval_function_path="mine.Elsewhere"), num_rollout=20).export_bytes == 0  # nothing is evaluated


@pytest.mark.parametrize(
    ("driver_name", "known"),
    [
        ("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA GB10", "GB10"), ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA L40S", "L40S"), ("NVIDIA A10", "A10"), ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
    ],
)  # fmt: skip
def test_gpus_are_known_by_the_name_of_the_driver(driver_name, known):
    assert machine(driver_name).name == known


@pytest.mark.parametrize("name", ["Voodoo 2", "NVIDIA L40", "NVIDIA GB200", "NVIDIA RTX A1000", ""])
def test_gpus_whose_names_have_another_in_them_are_not_taken_for_it(name):
    with pytest.raises(ConfigError, match="not a known GPU; give --gpu-memory too, or one of B200, "):
        gpu_machine(name, host_bytes=0, disk_bytes=0)


def test_planning_needs_no_torch():
    code = "import sys, miles.cli.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
