"""Bytes that a run needs, part by part: the one formula of `miles plan`, of the checks before a run, of the trainer's
token budget and of the engine's cache.

Every term is a count of tensors that the code holds; what had to be measured stands in the constants below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from miles.config.memory_section import MemoryConfig
from miles.config.resolve import samples_per_rollout
from miles.config.sections import EngineConfig, RunConfig
from miles.model.activations import ActivationBudget, layer_numbers
from miles.model.lora import num_adapter_parameters
from miles.model.spec import ModelSpec
from miles.plan.machine import GIB, Machine

MASTER_BYTES, GRADIENT_BYTES = 4, 4  # a parameter; one that is float32 is its own master
MOMENT_BYTES = {"float32": 8.0, "bfloat16": 4.0, "8bit": 2 + 8 / 256}  # both of them; 8 bits have a scale for 256

CPU_ACTIVATION_BYTES, CPU_CHUNK_SIZE = GIB, 1024
GPU_ACTIVATION_SHARE, GPU_LOGITS_SHARE = 0.2, 0.02  # of the device's memory
FREE_SHARE = 0.4  # what activations may take of the memory that is free: the KV cache needs some, and work space
FEWEST_TOKENS = {"cpu": 512, "cuda": 4096}  # layers are computed again before micro-batches become smaller

DEFAULT_ROWS = {"cpu": 256, "cuda": 512}
DEFAULT_PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}
# Of the memory that is free on a CPU; the trainer, the page cache and other programs need the rest.
CPU_CACHE_SHARE = 0.2
# Of a GPU's memory: left free for what a trainer on it keeps of a micro-batch, and for CUDA graphs;
# for the latter only when the cache is released while the trainer works.
GPU_CACHE_RESERVE, GPU_CACHE_RESERVE_RELEASED = 0.35, 0.1

# Measured: torch and the libraries of the worker on a CPU; a CUDA context with its libraries and kernels on a GPU.
CPU_PROCESS_BYTES = int(0.40 * GIB)
GPU_PROCESS_BYTES = int(0.60 * GIB)
# On the side of the CPU: supervisor and reward processes, and the worker's own memory where it computes on a GPU.
OTHER_PROCESSES_BYTES, GPU_WORKER_HOST_BYTES = int(0.8 * GIB), int(2.0 * GIB)
GRAPH_BYTES = 16 << 20  # of each captured size of decode batch: its kernels and what the pool rounds up
ALLOCATOR_SHARE = 0.03  # of what is allocated and freed again: blocks of the caching allocator that fit nothing else

CPU_PADDING = 1.1  # of the stacks that the CPU's attention pads sequences of different lengths to

MIN_TRUSTED = 0.95  # a plan that needs more of the memory than this may not fit: it is exact to a few percent


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_tokens` of a micro-batch (a longer sample is one of its own), tokens whose logits exist at one time, and
    what the activations may take."""

    max_tokens: int
    chunk_size: int
    activations: ActivationBudget


@dataclass(frozen=True, slots=True)
class Job:
    """A run to plan. `prompt_len` and `answer_len` are what its samples are expected to have, at most."""

    config: RunConfig
    spec: ModelSpec
    machine: Machine
    prompt_len: int
    answer_len: int

    @property
    def itemsize(self) -> int:
        """Bytes of a weight: as `loop/placement.py` decides it."""
        dtype = self.config.model.dtype
        return 2 if dtype == "bfloat16" or (dtype == "auto" and self.machine.on_gpu) else 4

    @property
    def device(self) -> str:
        return "cuda" if self.machine.on_gpu else "cpu"

    @property
    def sample_len(self) -> int:
        wanted = self.config.rollout.rollout_max_context_len or self.spec.max_position_embeddings
        return min(self.prompt_len + self.answer_len, wanted, self.spec.max_position_embeddings)

    @property
    def samples_per_step(self) -> int:
        batch = self.config.batch
        samples = samples_per_rollout(self.config)
        return batch.global_batch_size or samples // (batch.num_steps_per_rollout or 1)

    @property
    def has_engine(self) -> bool:
        return self.config.algorithm.loss_type != "sft_loss" and not self.config.debug.debug_train_only

    @property
    def num_rows(self) -> int:
        """Answers that the engine writes at one time, room in the cache aside."""
        return self.config.engine.engine_max_running_requests or DEFAULT_ROWS[self.device]

    @property
    def num_trained(self) -> int:
        """Models that are trained: a critic is one more."""
        algorithm = self.config.algorithm
        return 1 + (algorithm.advantage_estimator == "ppo" and algorithm.loss_type != "sft_loss")

    @property
    def num_adapted(self) -> int:
        """Parameters of the adapters, which are trained in place of the policy's own."""
        return num_adapter_parameters(self.spec, self.config.lora) if self.config.lora.is_on else 0

    @property
    def num_trained_parameters(self) -> int:
        return (self.num_trained - self.config.lora.is_on) * self.spec.num_parameters + self.num_adapted

    @property
    def moment_bytes(self) -> int:
        return int(self.num_trained_parameters * MOMENT_BYTES[self.config.optim.adam_state])

    @property
    def checkpoint_bytes(self) -> int:
        return self.num_trained_parameters * MASTER_BYTES + self.moment_bytes

    @property
    def limits(self) -> Limits:
        """The trainer's, as it finds them when its states are there."""
        free_bytes = max(self.machine.memory_bytes - sum(state_bytes(self).values()), 0)
        gpu_bytes = self.machine.memory_bytes if self.machine.on_gpu else None
        return trainer_limits(
            self.spec, self.config, itemsize=self.itemsize, free_bytes=free_bytes, unused_bytes=free_bytes,
            gpu_bytes=gpu_bytes,
        )  # fmt: skip

    def micro_batch(self, max_tokens: int) -> tuple[int, int]:
        """Tokens of the largest micro-batch of equal samples, and how many micro-batches an optimizer step has."""
        fitting = max(max_tokens // self.sample_len, 1)
        fitting = min(fitting, self.config.batch.micro_batch_size or fitting)
        num = -(-self.samples_per_step // fitting)
        return -(-self.samples_per_step // num) * self.sample_len, num


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of each part where the model is computed, and of each part on the side of the CPU; `machine` has them in
    one memory or in two."""

    machine: Machine
    device: dict[str, int]
    host: dict[str, int]
    cache_tokens: int
    min_cache_tokens: int

    @property
    def process_bytes(self) -> int:
        """What the worker holds at its highest, where the model is computed."""
        return sum(self.device.values())

    @property
    def use(self) -> float:
        """The share of the memory that is needed, of the fuller one where there are two."""
        host = sum(self.host.values())
        if self.machine.shares_memory:
            return (self.process_bytes + host) / self.machine.memory_bytes
        return max(self.process_bytes / self.machine.memory_bytes, host / self.machine.host_bytes)

    @property
    def fits(self) -> bool:
        """Whether the run has room, with some to spare, and the cache holds at least one answer."""
        return self.use <= MIN_TRUSTED and self.cache_tokens >= self.min_cache_tokens


def trainer_limits(
    spec: ModelSpec,
    config: RunConfig,
    *,
    itemsize: int,
    free_bytes: int,
    unused_bytes: int,
    gpu_bytes: int | None,
) -> Limits:
    """From the flags and the memory: of a GPU of `gpu_bytes`, or of the machine.

    The token budget depends on what this process leaves unused, not on what other programs leave free, so that a run
    packs alike each time; the number of layers that are computed again, which changes no bit of a result, does.
    """
    packed_bytes, chunk_size, max_bytes = CPU_ACTIVATION_BYTES, CPU_CHUNK_SIZE, int(FREE_SHARE * free_bytes)
    if gpu_bytes is not None:
        packed_bytes = int(min(GPU_ACTIVATION_SHARE * gpu_bytes, FREE_SHARE * unused_bytes))
        max_bytes = min(packed_bytes, max_bytes)
        chunk_size = default_chunk_size(spec, memory_bytes=int(GPU_LOGITS_SHARE * gpu_bytes))
    budget = ActivationBudget(spec, itemsize, max_bytes, recomputed_layers(config.memory, spec.num_layers))
    fewest = FEWEST_TOKENS["cpu" if gpu_bytes is None else "cuda"]
    max_tokens = config.batch.max_tokens_per_gpu or replace(budget, max_bytes=packed_bytes).default_tokens(
        fewest=fewest
    )
    return Limits(max_tokens, config.batch.log_probs_chunk_size or chunk_size, budget)


def recomputed_layers(memory: MemoryConfig, num_layers: int) -> int | None:
    """How many of the model's layers are computed again; None: as many as memory asks for."""
    if memory.recompute_num_layers is not None and memory.recompute_method != "uniform":
        return min(memory.recompute_num_layers, num_layers)
    if memory.recompute_granularity == "full":
        return num_layers
    if memory.recompute_granularity == "selective":
        return 0
    return None


def default_chunk_size(spec: ModelSpec, *, memory_bytes: int) -> int:
    """Tokens whose float32 logits take about `memory_bytes`, between 256 and 4,096."""
    return min(max(memory_bytes // (4 * spec.vocab_size) // 256 * 256, 256), 4096)


def token_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Bytes of the keys and values of one token, all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * itemsize


def released_tags(config: EngineConfig) -> tuple[str, ...]:
    """Tags of the engine's memory that is released while the trainer works."""
    tags = {"kv_cache": "kv_cache", "weight": "weights"}
    return tuple(tags[level] for level in config.offload_rollout_level or tags) if config.offload_rollout else ()


def cache_reserve(config: EngineConfig) -> float:
    """Share of a GPU's memory that the automatic choice leaves free."""
    return GPU_CACHE_RESERVE_RELEASED if "kv_cache" in released_tags(config) else GPU_CACHE_RESERVE


def wanted_cache_tokens(
    spec: ModelSpec,
    config: EngineConfig,
    *,
    num_rows: int,
    itemsize: int,
    free_bytes: int,
    total_bytes: int,
    on_gpu: bool,
) -> int:
    """Tokens that the settings ask the cache to hold, before it is known whether they fit."""
    if config.engine_max_total_tokens is not None:
        return config.engine_max_total_tokens
    per_token = token_bytes(spec, itemsize)
    if config.engine_mem_fraction_static is not None:
        rest = config.engine_mem_fraction_static * total_bytes - spec.num_parameters * itemsize
        return max(int(rest), 0) // per_token
    allowed = free_bytes - cache_reserve(config) * total_bytes if on_gpu else CPU_CACHE_SHARE * free_bytes
    return min(num_rows * spec.max_position_embeddings, max(int(allowed), 0) // per_token)


def estimate(job: Job) -> Memory:
    """What the run holds at its highest: while the gradient of the last layer of a micro-batch is computed."""
    spec, config, machine, itemsize = job.spec, job.config, job.machine, job.itemsize
    device = {"process": GPU_PROCESS_BYTES if machine.on_gpu else CPU_PROCESS_BYTES, **state_bytes(job)}
    cache_tokens, needed = _cache(job, machine.memory_bytes - sum(device.values()))
    held = cache_tokens
    if not machine.on_gpu:  # blocks that nobody uses are never touched
        prompts, answers = config.rollout.rollout_batch_size, samples_per_rollout(config)
        held = min(cache_tokens, prompts * job.prompt_len + min(answers, job.num_rows) * job.answer_len)
    passing = _passing_bytes(job)
    engine = {"KV cache": held * token_bytes(spec, itemsize), "CUDA graphs": _graph_bytes(job)} if needed else {}
    slack = int(ALLOCATOR_SHARE * sum(passing.values()))
    if engine and "kv_cache" in released_tags(config.engine):  # the trainer works in the same memory
        engine["KV cache"] = max(engine["KV cache"] - sum(passing.values()) - slack, 0)
    host = {"other processes": OTHER_PROCESSES_BYTES + machine.on_gpu * GPU_WORKER_HOST_BYTES}
    if config.optim.optimizer_cpu_offload:
        host["Adam states"] = job.moment_bytes
    if config.run_dir.async_save:
        host["copy for --async-save"] = job.checkpoint_bytes
    device |= {**engine, **passing, "allocator": slack}
    return Memory(machine, {name: size for name, size in device.items() if size}, host, cache_tokens, needed)


def state_bytes(job: Job) -> dict[str, int]:
    """What stays from step to step where the models are computed, for all of them, by kind."""
    config, num, itemsize = job.config, job.spec.num_parameters, job.itemsize
    # With LoRA the policy without its adapters is the reference, unless another is named.
    has_reference = config.algorithm.use_kl_loss or config.algorithm.kl_coef != 0
    has_reference &= not config.lora.is_on or config.model.ref_load is not None
    scorers = int(has_reference) + int(config.algorithm.use_opd)
    return {
        "weights": (num * job.num_trained + job.num_adapted) * itemsize,
        "masters": job.num_trained_parameters * MASTER_BYTES * (itemsize < 4),
        "gradients": job.num_trained_parameters * GRADIENT_BYTES,
        "Adam states": 0 if config.optim.optimizer_cpu_offload else job.moment_bytes,
        "reference and teacher": num * scorers * itemsize,
    }


def _cache(job: Job, free_bytes: int) -> tuple[int, int]:
    """Tokens that the cache will hold, and that it must hold for one answer; 0 without an engine."""
    if not job.has_engine:
        return 0, 0
    page = job.config.engine.engine_page_size
    wanted = wanted_cache_tokens(
        job.spec,
        job.config.engine,
        num_rows=job.num_rows,
        itemsize=job.itemsize,
        free_bytes=max(free_bytes, 0),
        total_bytes=job.machine.memory_bytes,
        on_gpu=job.machine.on_gpu,
    )
    return wanted // page * page, max(job.sample_len, 2 * page)


def _passing_bytes(job: Job) -> dict[str, int]:
    """What one micro-batch takes when its backward pass begins, or comes to the layers that are computed again."""
    spec, limits, itemsize = job.spec, job.limits, job.itemsize
    tokens, _ = job.micro_batch(limits.max_tokens)
    num_recomputed = limits.activations.recomputed_for(tokens)
    one_layer, inputs = layer_numbers(spec), 2 * spec.hidden_size
    if not job.machine.on_gpu:
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        one_layer += int(CPU_PADDING * (spec.qkv_size + queries)) - queries - 2 * keys
    layers = (spec.num_layers - num_recomputed) * one_layer + num_recomputed * inputs
    around = tokens * (spec.hidden_size * itemsize + 2 * 4 * spec.head_dim)  # the last sum, and cosines and sines
    again = tokens * (one_layer + 4 * spec.intermediate_size + spec.qkv_size) * itemsize
    work = max(_head_bytes(job, tokens, limits.chunk_size), again if num_recomputed else 0)
    return {"activations": tokens * layers * itemsize + around, "head or layer at work": work}


def _head_bytes(job: Job, tokens: int, chunk_size: int) -> int:
    """The logits of a chunk with those of the chunk before, float32, and their gradient; then the gradient of the
    head, and the hidden states with theirs."""
    spec, answers = job.spec, tokens * job.answer_len // (job.prompt_len + job.answer_len)
    small = 4 * 2**20 // spec.vocab_size  # as many logits are never cut into chunks: `ops/logprob.py`
    rows = min(max(chunk_size, small), answers)
    per_logit = (8 + 2 * (answers > rows)) if job.machine.on_gpu else 16
    head = 0 if job.config.lora.is_on else 4 * spec.vocab_size  # its gradient, where it has one
    return rows * spec.vocab_size * per_logit + spec.hidden_size * (head + 2 * answers * job.itemsize)


def _graph_bytes(job: Job) -> int:
    """Each size of decode batch that comes up, and the logits of the largest, twice while they are drawn from."""
    if not job.machine.on_gpu or job.config.engine.engine_disable_cuda_graph or not job.has_engine:
        return 0
    rows = min(job.num_rows, samples_per_rollout(job.config))
    num_sizes = 6 + rows // 16
    return num_sizes * GRAPH_BYTES + 2 * 4 * rows * job.spec.vocab_size
