"""Time one engine on a job of `rollout_throughput.py`: `python rollouts.py JOB.json`, in a process of its own.

Each engine gets the same folder of weights, prompts and answer lengths, draws at temperature 1 over the whole
vocabulary, and returns the log-prob of each token. Each runs as its documentation advises for throughput.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from typing import Any

from measuring import emit, read_job, since_start, time_rollouts

Job = dict[str, Any]
Answers = tuple[list[list[int]], list[list[float]]]


def longest_sequence(job: Job) -> int:
    """Positions that a prompt with its answer needs at most, rounded up."""
    longest = max(
        len(prompt) + length
        for workload in job["workloads"]
        for prompt, length in zip(workload["repetitions"][0], workload["lengths"], strict=True)
    )
    return -(-(longest + 1) // 256) * 256


def most_requests(job: Job) -> int:
    return max(len(workload["lengths"]) for workload in job["workloads"])


def miles(job: Job) -> None:
    """Ours, with the flags' defaults."""
    from pathlib import Path

    import torch

    from benchmarks.profile_step import rollout_parts
    from miles.config.sections import EngineConfig
    from miles.engine.local import LocalEngine
    from miles.loop.placement import keep_memory_in_one_piece
    from miles.model.load import load_model
    from miles.types import GenerationRequest, SamplingParams

    start_up = {"import": since_start()}
    start = time.perf_counter()
    dtype = getattr(torch, job["dtype"])
    keep_memory_in_one_piece()  # as a run does
    model = load_model(Path(job["model"]), dtype=dtype, device=job["device"])
    engine = LocalEngine(model, None, EngineConfig(), device=job["device"])
    start_up["engine"] = time.perf_counter() - start
    seen = 0

    def requests(prompts: list[list[int]], lengths: list[int]) -> list[GenerationRequest]:
        nonlocal seen
        pairs = enumerate(zip(prompts, lengths, strict=True), start=seen)
        seen += len(lengths)
        return [
            GenerationRequest(key, prompt, SamplingParams(max_new_tokens=length, ignore_eos=True), key)
            for key, (prompt, length) in pairs
        ]

    def generate(prompts: list[list[int]], lengths: list[int]) -> Answers:
        sent = requests(prompts, lengths)

        async def collect() -> Answers:
            engine.submit(sent)
            results: dict[int, Any] = {}
            while len(results) < len(sent):
                for result in await engine.results():
                    assert result.error is None, result.error
                    results[result.request_id] = result
            ordered = [results[request.request_id] for request in sent]
            return [result.output_ids for result in ordered], [result.log_probs for result in ordered]

        return asyncio.run(collect())

    time_rollouts(job, generate, start_up)
    engine.close()
    if job["device"] == "cuda":
        emit(job, peak_gb=torch.cuda.max_memory_allocated() / 2**30)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        first = job["workloads"][0]
        prompts = [[(token + 7) % 150_000 for token in prompt] for prompt in first["warm_up"]]
        runs = [requests(chosen, first["lengths"]) for chosen in (first["warm_up"], prompts)]
        emit(job, parts=rollout_parts(model, runs))


def transformers_cb(job: Job) -> None:
    """transformers with continuous batching; FlashAttention 3 where `flash_attn_interface` is importable."""
    import importlib.util

    import torch
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    start_up = {"import": since_start()}
    start = time.perf_counter()
    has_flash = job["device"] == "cuda" and importlib.util.find_spec("flash_attn_interface") is not None
    attention = "flash_attention_3" if has_flash else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"]), attn_implementation=attention
    )
    model = model.to(job["device"]).eval()
    longest_answer = max(max(workload["lengths"]) for workload in job["workloads"])
    longest_prompt = max(len(prompt) for workload in job["workloads"] for prompt in workload["repetitions"][0])
    generation = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=longest_answer,
        eos_token_id=-1,
        pad_token_id=0,
    )
    batching = ContinuousBatchingConfig(
        return_logprobs=True,
        max_memory_percent=0.6,
        max_requests_per_batch=most_requests(job),
        **job.get("cb_options", {}),
    )
    hints = WorkloadHints(
        max_prompt_length=longest_prompt, max_generated_length=longest_answer, num_requests=most_requests(job)
    )
    manager_context = model.continuous_batching_context_manager(
        generation_config=generation,
        continuous_batching_config=batching,
        block=True,
        timeout=5,
        workload_hints=hints,
    )
    with torch.no_grad(), manager_context as manager:
        start_up["engine"] = time.perf_counter() - start

        def generate(prompts: list[list[int]], lengths: list[int]) -> Answers:
            pairs = zip(prompts, lengths, strict=True)
            names = [manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1) for prompt, length in pairs]
            results: dict[str, Any] = {}
            while len(results) < len(names):
                result = manager.get_result(timeout=1)
                assert result is not None or manager.is_running(), "the thread of continuous batching has ended"
                if result is not None and result.is_finished():
                    assert not result.error, result.error
                    results[result.request_id] = result
            ordered = [results[name] for name in names]
            return [list(result.generated_tokens) for result in ordered], [list(result.logprobs) for result in ordered]

        time_rollouts(job, generate, start_up, version=transformers.__version__, attention=attention)
        os._exit(0)  # its thread may wait for ever


def sglang(job: Job) -> None:
    import sglang as package

    start_up = {"import": since_start()}
    start = time.perf_counter()
    rows = most_requests(job)
    engine = package.Engine(
        model_path=job["model"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        context_length=longest_sequence(job),
        mem_fraction_static=0.8,
        max_running_requests=rows,
        cuda_graph_max_bs_decode=rows,
        sampling_backend="pytorch",  # nothing is cut, so the faster kernels for top-k and top-p are not needed
        random_seed=0,
    )
    start_up["engine"] = time.perf_counter() - start

    def generate(prompts: list[list[int]], lengths: list[int]) -> Answers:
        sampling = [{"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True} for length in lengths]
        answers = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        tokens = [list(answer["output_ids"]) for answer in answers]
        log_probs = [[entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
        return tokens, log_probs

    time_rollouts(job, generate, start_up, version=package.__version__)
    engine.shutdown()


def vllm(job: Job) -> None:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # nothing is cut
    import vllm as package

    start_up = {"import": since_start()}
    start = time.perf_counter()
    engine = package.LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        max_model_len=longest_sequence(job),
        gpu_memory_utilization=0.85,
        max_num_seqs=most_requests(job),
        seed=0,
    )
    start_up["engine"] = time.perf_counter() - start

    def generate(prompts: list[list[int]], lengths: list[int]) -> Answers:
        sampling = [
            package.SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
            for length in lengths
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = [output.outputs[0] for output in engine.generate(inputs, sampling, use_tqdm=False)]
        log_probs = [
            [found[token].logprob for found, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            for answer in answers
        ]
        return [list(answer.token_ids) for answer in answers], log_probs

    time_rollouts(job, generate, start_up, version=package.__version__)


ENGINES = {"miles": miles, "transformers-cb": transformers_cb, "sglang": sglang, "vllm": vllm}


def main() -> None:
    job = read_job()
    ENGINES[job["part"]](job)


if __name__ == "__main__":
    main()
