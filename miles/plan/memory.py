"""Bytes that a run needs, part by part: the one formula of `miles plan`, of the checks before a run, of the trainer's
token budget and of the engine's cache.

Every term is a count of tensors that the code holds; what had to be measured stands in the constants below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from miles.config.lora_section import LoraConfig
from miles.config.memory_section import MemoryConfig
from miles.config.resolve import reads_reference, samples_per_rollout
from miles.config.sections import EngineConfig, RunConfig
from miles.model.activations import ActivationBudget, Recompute, layer_numbers
from miles.model.spec import ModelSpec
from miles.plan.machine import GIB, Machine

MASTER_BYTES, GRADIENT_BYTES = 4, 4  # a parameter; one that is float32 is its own master
MOMENT_BYTES = {"float32": 8.0, "bfloat16": 4.0, "8bit": 2 + 8 / 256}  # both of them; 8 bits have a scale for 256

CPU_ACTIVATION_BYTES, CPU_CHUNK_SIZE = GIB, 1024
GPU_ACTIVATION_SHARE, GPU_LOGITS_SHARE = 0.2, 0.02  # of the device's memory
FREE_SHARE = 0.4  # what activations may take of the memory that is free: the KV cache needs some, and work space
FEWEST_TOKENS = {"cpu": 512, "cuda": 4096}  # layers are computed again before micro-batches become smaller

# Whole blocks of keys are shared, so attention meets the same blocks as without sharing and changes no bit of a score.
SHARED_MULTIPLE = 64
MICRO_BATCH_COST = 1024  # tokens: the time that a micro-batch takes whatever its size
DEFAULT_ROWS = {"cpu": 256, "cuda": 512}
DEFAULT_PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}
# Of the memory that is free on a CPU; the trainer, the page cache and other programs need the rest.
CPU_CACHE_SHARE = 0.2
# Of a GPU's memory: left free for what a trainer on it keeps of a micro-batch, and for CUDA graphs;
# for the latter only when the cache is released while the trainer works.
GPU_CACHE_RESERVE, GPU_CACHE_RESERVE_RELEASED = 0.35, 0.1
LEAST_CACHE_SHARE = 0.25  # of the memory that is free, where less would be left for the cache

# Measured: torch and the libraries of the worker on a CPU; a CUDA context with its libraries and kernels on a GPU.
CPU_PROCESS_BYTES = int(0.36 * GIB)
GPU_PROCESS_BYTES = int(0.87 * GIB)
CPU_PAGE_BYTES = 2 << 20  # Linux gives memory that is touched in pieces of this size
# On the side of the CPU: supervisor and reward processes, and the worker's own memory where it computes on a GPU.
OTHER_PROCESSES_BYTES, GPU_WORKER_HOST_BYTES = int(0.8 * GIB), int(2.0 * GIB)
GRAPH_BYTES = 16 << 20  # of each captured size of decode batch: its kernels and what the pool rounds up
# Of what is allocated and freed again: holes of the CPU's heap, blocks of the caching allocator that fit nothing else.
ALLOCATOR_SHARE, ALLOCATOR_BYTES = {"cpu": 0.25, "cuda": 0.03}, {"cpu": 0, "cuda": GIB}

CPU_PADDING = 1.1  # of the stacks that the CPU's attention pads sequences of different lengths to

STAY = ("process", "weights", "reference and teacher")  # where the model is computed, with --offload-train

# A plan is exact to a few percent: it is trusted up to the first share of the memory, and refused beyond the second.
SAFE_SHARE, HOPELESS_SHARE = 0.95, 1.05
DEFAULT_PROMPT_LEN = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_tokens` of a micro-batch (a longer sample is one of its own), tokens whose logits exist at one time, and
    what the activations may take."""

    max_tokens: int
    chunk_size: int
    activations: ActivationBudget


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens that are read, tokens that are trained on, how many micro-batches an optimizer step has, and what the
    smallest of them reads."""

    tokens: int
    answers: int
    number: int
    fewest_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """A run to plan. `prompt_len` and `max_answer_len` are what its samples are expected to have, at most."""

    config: RunConfig
    spec: ModelSpec
    machine: Machine
    prompt_len: int
    max_answer_len: int

    @property
    def itemsize(self) -> int:
        """Bytes of a weight: as `loop/placement.py` decides it."""
        dtype = self.config.model.dtype
        return 2 if dtype == "bfloat16" or (dtype == "auto" and self.machine.on_gpu) else 4

    @property
    def device(self) -> str:
        return "cuda" if self.machine.on_gpu else "cpu"

    @property
    def context_len(self) -> int:
        return self.spec.context_len(self.config.rollout.rollout_max_context_len)

    @property
    def answer_len(self) -> int:
        """Tokens: an answer also ends where the context is full."""
        return max(min(self.max_answer_len, self.context_len - self.prompt_len), 1)

    @property
    def sample_len(self) -> int:
        return min(self.prompt_len + self.answer_len, self.context_len)

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
        return num_adapter_parameters(self.spec, self.config.lora)

    @property
    def num_trained_parameters(self) -> int:
        return (self.num_trained - self.config.lora.is_on) * self.spec.num_parameters + self.num_adapted

    @property
    def num_scorers(self) -> int:
        """Models that only score: the reference (with LoRA the policy itself, without its adapters) and the teacher."""
        config = self.config
        has_copy = reads_reference(config.algorithm) and (not config.lora.is_on or config.model.ref_load is not None)
        return int(has_copy) + int(config.algorithm.use_opd)

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

    def micro_batch(self, max_tokens: int) -> MicroBatch:
        """The largest one of equal samples; with shared prompts those of a group stay together where that is faster."""
        # The last token of a prompt predicts one of an answer: each sample reads it for itself.
        blocks = (min(self.prompt_len, self.sample_len - 1) - 1) // SHARED_MULTIPLE
        ways = (0, blocks * SHARED_MULTIPLE) if self.config.batch.share_prompts_in_training else (0,)
        return min((self._packed(max_tokens, shared) for shared in ways), key=lambda way: way[0])[1]

    def _packed(self, max_tokens: int, shared: int) -> tuple[int, MicroBatch]:
        """What it costs, in tokens, to read so many first tokens of a group once, and the micro-batch."""
        config, num_samples = self.config, self.samples_per_step
        own = max(self.sample_len - 1 - shared, 1)  # nothing is predicted after the last token
        most = config.batch.micro_batch_size or num_samples
        group = min(samples_per_rollout(config) // config.rollout.rollout_batch_size, num_samples) if shared else 1
        parts = -(-group // min(max((max_tokens - shared) // own, 1), most))  # of a group, as even as possible
        together, units = -(-group // parts), -(-num_samples * parts // group)
        length = shared + together * own
        num = -(-units // max(min(max_tokens // length, most // together), 1))
        largest = -(-units // num)
        answers = largest * together * min(self.answer_len, self.sample_len - 1)
        cost = units * shared + num_samples * own + MICRO_BATCH_COST * num
        return cost, MicroBatch(largest * length, answers, num, units // num * length)


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
    def cannot_fit(self) -> bool:
        return self.use > HOPELESS_SHARE

    @property
    def fits(self) -> bool:
        """Whether the run has room, with some to spare, and the cache holds at least one answer."""
        return self.use <= SAFE_SHARE and self.cache_tokens >= self.min_cache_tokens


def trainer_limits(
    spec: ModelSpec, config: RunConfig, *, itemsize: int, free_bytes: int, unused_bytes: int, gpu_bytes: int | None
) -> Limits:
    """From the flags and the memory: of a GPU of `gpu_bytes`, or of the machine.

    The token budget depends on what this process leaves unused, not on what other programs leave free, so that a run
    packs alike each time; what is computed again, which changes no bit of a result, does.
    """
    packed_bytes, chunk_size, max_bytes = CPU_ACTIVATION_BYTES, CPU_CHUNK_SIZE, int(FREE_SHARE * free_bytes)
    if gpu_bytes is not None:
        packed_bytes = int(min(GPU_ACTIVATION_SHARE * gpu_bytes, FREE_SHARE * unused_bytes))
        max_bytes = min(packed_bytes, max_bytes)
        chunk_size = default_chunk_size(spec, memory_bytes=int(GPU_LOGITS_SHARE * gpu_bytes))
    budget = ActivationBudget(spec, itemsize, max_bytes, fixed_recompute(config.memory, spec.num_layers))
    fewest = FEWEST_TOKENS["cpu" if gpu_bytes is None else "cuda"]
    packed = replace(budget, max_bytes=packed_bytes)
    max_tokens = config.batch.max_tokens_per_gpu or packed.default_tokens(fewest=fewest)
    return Limits(max_tokens, config.batch.log_probs_chunk_size or chunk_size, budget)


def fixed_recompute(memory: MemoryConfig, num_layers: int) -> Recompute | None:
    """What the flags want computed again of the model's layers; None: as much as memory asks for."""
    if memory.recompute_num_layers is not None and memory.recompute_method != "uniform":
        return Recompute(num_layers=min(memory.recompute_num_layers, num_layers))
    by_name = {"full": Recompute(num_layers=num_layers), "selective": Recompute(selective=True)}
    return by_name.get(memory.recompute_granularity or "")


def default_chunk_size(spec: ModelSpec, *, memory_bytes: int) -> int:
    """Tokens whose float32 logits take about `memory_bytes`, between 256 and 4,096."""
    return min(max(memory_bytes // (4 * spec.vocab_size) // 256 * 256, 256), 4096)


@cache
def num_adapter_parameters(spec: ModelSpec, lora: LoraConfig) -> int:
    """Entries of the two matrices of every module that these flags give an adapter; 0 without LoRA."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    sizes = {  # inputs and outputs
        "self_attn.q_proj": hidden + queries, "self_attn.k_proj": hidden + keys, "self_attn.v_proj": hidden + keys,
        "self_attn.o_proj": queries + hidden, "mlp.gate_proj": hidden + inner, "mlp.up_proj": hidden + inner,
        "mlp.down_proj": inner + hidden,
    }  # fmt: skip
    modules = (
        (f"model.layers.{layer}.{name}", size) for layer in range(spec.num_layers) for name, size in sizes.items()
    )
    return lora.lora_rank * sum(size for module, size in modules if lora.is_on and lora.adapts(module))


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
    reserve, least = (cache_reserve(config), LEAST_CACHE_SHARE) if on_gpu else (1.0, CPU_CACHE_SHARE)
    allowed = max(free_bytes - reserve * total_bytes, least * free_bytes)
    return min(num_rows * spec.max_position_embeddings, int(allowed) // per_token)


def estimate(job: Job) -> Memory:
    """What the run holds at its highest: while it trains, or writes answers if that takes more."""
    config, machine = job.config, job.machine
    process = {"process": GPU_PROCESS_BYTES if machine.on_gpu else CPU_PROCESS_BYTES}
    training = {**process, **state_bytes(job)}
    writing = {name: size for name, size in training.items() if not config.memory.offload_train or name in STAY}
    cache_tokens, needed = _cache(job, machine.memory_bytes - sum(writing.values()))
    if needed:
        cache = {"KV cache": _touched_cache_bytes(job, cache_tokens)}
        graphs = {"CUDA graphs": _graph_bytes(job)}
        writing |= {**cache, **graphs}
        training |= graphs if "kv_cache" in released_tags(config.engine) else {**cache, **graphs}
    passing = _passing_bytes(job)
    slack = ALLOCATOR_BYTES[job.device] + int(ALLOCATOR_SHARE[job.device] * sum(passing.values()))
    training |= {**passing, "allocator": slack}
    host = {"other processes": OTHER_PROCESSES_BYTES + machine.on_gpu * GPU_WORKER_HOST_BYTES}
    if config.optim.optimizer_cpu_offload or config.memory.offload_train:
        host["Adam states"] = job.moment_bytes
    if config.memory.offload_train:
        host["masters"] = job.num_trained_parameters * MASTER_BYTES
    if config.run_dir.async_save:
        host["copy for --async-save"] = job.checkpoint_bytes
    highest = max(training, writing, key=lambda parts: sum(parts.values()))
    device = {name: size for name, size in highest.items() if size}
    return Memory(machine, device, host, cache_tokens, needed)


def state_bytes(job: Job) -> dict[str, int]:
    """What stays from step to step where the models are computed, for all of them, by kind."""
    config, num, itemsize = job.config, job.spec.num_parameters, job.itemsize
    return {
        "weights": (num * job.num_trained + job.num_adapted) * itemsize,
        "masters": job.num_trained_parameters * MASTER_BYTES * (itemsize < 4),
        "gradients": job.num_trained_parameters * GRADIENT_BYTES,
        "Adam states": 0 if config.optim.optimizer_cpu_offload else job.moment_bytes,
        "reference and teacher": num * job.num_scorers * itemsize,
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


def _touched_cache_bytes(job: Job, cache_tokens: int) -> int:
    """On a CPU blocks that nobody uses are never touched; keys and values of each head and layer lie apart."""
    if job.machine.on_gpu:
        return cache_tokens * token_bytes(job.spec, job.itemsize)
    answers = min(samples_per_rollout(job.config), job.num_rows)
    used = min(cache_tokens, job.config.rollout.rollout_batch_size * job.prompt_len + answers * job.answer_len)
    num_parts, row_bytes = 2 * job.spec.num_layers * job.spec.num_kv_heads, job.spec.head_dim * job.itemsize
    pages = -(-used * row_bytes // CPU_PAGE_BYTES)
    return num_parts * min(pages * CPU_PAGE_BYTES, cache_tokens * row_bytes)


def _passing_bytes(job: Job) -> dict[str, int]:
    """What micro-batches take when their backward pass begins, or comes to the layers that are computed again. Where
    less is computed again for the smallest, it may keep more than the largest."""
    spec, limits, itemsize = job.spec, job.limits, job.itemsize
    batch = job.micro_batch(limits.max_tokens)
    again = limits.activations.recompute_for
    numbers = layer_numbers(spec) + _padding_numbers(job) + 4 * spec.intermediate_size + spec.qkv_size
    whole = batch.tokens * numbers * itemsize if again(batch.tokens).num_layers else 0
    work = max(_head_bytes(job, batch.answers, limits.chunk_size), whole)
    kept = max(_kept_bytes(job, tokens, again(tokens)) for tokens in (batch.fewest_tokens, batch.tokens))
    return {"activations": kept, "head or layer at work": work}


def _kept_bytes(job: Job, tokens: int, again: Recompute) -> int:
    """What all layers keep of a micro-batch, with the last sum and the cosines and sines."""
    padding = (job.spec.num_layers - again.num_layers) * _padding_numbers(job, selective=again.selective)
    numbers = again.kept_numbers(job.spec) + padding + job.spec.hidden_size
    return tokens * (numbers * job.itemsize + 2 * 4 * job.spec.head_dim)


def _padding_numbers(job: Job, *, selective: bool = False) -> int:
    """Of a token in a layer: the CPU's attention pads sequences, and what is padded is not made again."""
    if job.machine.on_gpu:
        return 0
    queries, keys = job.spec.num_heads * job.spec.head_dim, job.spec.num_kv_heads * job.spec.head_dim
    padded = int(CPU_PADDING * (job.spec.qkv_size + queries))
    return padded - queries - 2 * keys + selective * job.spec.qkv_size


def _head_bytes(job: Job, answers: int, chunk_size: int) -> int:
    """The logits of a chunk, float32, and their gradient; the gradient of the head where it is not added up at once;
    and the hidden states with theirs."""
    spec, lora = job.spec, job.config.lora.is_on
    # As many logits as that are never cut into chunks: `ops/logprob.py`.
    rows = min(max(chunk_size, 4 * 2**20 // spec.vocab_size), answers)
    # The heap of a CPU does not give the place of the head's gradient to the embedding's.
    logit, gradient = (6, 4) if job.machine.on_gpu else (8, 8)
    table = logit * rows + gradient * spec.hidden_size * (job.itemsize == 4 and not lora)
    if job.itemsize < 4 and not job.machine.on_gpu:
        # The head in float32, as a CPU multiplies with it; later the embedding's gradient, as it comes and in float32.
        table = max(table, (4 if lora else 6) * spec.hidden_size)
    return spec.vocab_size * table + 2 * answers * spec.hidden_size * job.itemsize


def _graph_bytes(job: Job) -> int:
    """Each size of decode batch that comes up, and the logits of the largest, twice while they are drawn from."""
    if not job.machine.on_gpu or job.config.engine.engine_disable_cuda_graph or not job.has_engine:
        return 0
    rows = min(job.num_rows, samples_per_rollout(job.config))
    num_sizes = 6 + rows // 16
    return num_sizes * GRAPH_BYTES + 2 * 4 * rows * job.spec.vocab_size
