"""Records that cross a module's border, and the protocols that `loop/` knows.

Shape letters, here and everywhere: P prompts, G answers per prompt, T packed tokens, V vocabulary, D hidden,
N heads, H head size, S cache slots.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np


class SampleStatus(str, enum.Enum):
    """What became of an answer. `truncated`: it met a length limit. `failed`: it could not be generated or scored."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


# What a run itself keeps in the metadata of a sample: of a conversation; the rollout that began a parked sample, the
# first part of a weighted sum of rewards, and what the watching reward gave.
NUM_TURNS, TURN_START, TOOL_TIME = "num_turns", "turn_start", "tool_time_s"
BEGUN, RAW_ACCURACY, WATCH = "start_rollout_id", "raw_accuracy", "watch_reward"
NOTES = (BEGUN, NUM_TURNS, TURN_START, TOOL_TIME, RAW_ACCURACY, WATCH)

PER_TOKEN = (  # lists of a sample that cover its response
    *("loss_mask", "rollout_log_probs", "weight_versions"),
    *("kept_token_ids", "top_token_ids", "top_log_probs"),
)


@dataclass(slots=True)
class Sample:
    """One prompt and its answer, from the data file to the trainer. Attribute names are the public ones hooks use.

    `tokens` holds prompt and response ids; every per-token list (`loss_mask`, `rollout_log_probs`, `weight_versions`)
    covers the response only, so its length is `response_length`.
    """

    Status: ClassVar[type[SampleStatus]] = SampleStatus

    group_index: int = -1  # which prompt of the run, counted from 0; siblings share it
    index: int = -1  # which sample of the run, counted from 0
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    weight_versions: list[int] | None = None
    status: SampleStatus = SampleStatus.PENDING
    remove_sample: bool = False  # keeps the sample in the batch with a loss mask of zeros
    metadata: dict[str, Any] = field(default_factory=dict)
    kept_token_ids: list[np.ndarray] | None = None  # per token: ids that top-k, top-p or min-p left (sampling replay)
    top_token_ids: list[np.ndarray] | None = None  # per token: the most likely ids, for score centering
    top_log_probs: list[np.ndarray] | None = None  # their log-probs
    cached_tokens: int = 0  # prompt tokens served from the prefix index
    generate_function_path: str | None = None  # writes this sample, in place of --custom-generate-function-path

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    def __deepcopy__(self, memo: dict[int, Any]) -> Sample:
        """What lists per token hold never changes: a rollout, which copies many samples, does not go through them."""
        copied = memo[id(self)] = copy.copy(self)
        for name in ("prompt", "label", "reward", "metadata", *getattr(self, "__dict__", ())):  # of a subclass
            setattr(copied, name, copy.deepcopy(getattr(self, name), memo))
        for name in ("tokens", *PER_TOKEN):
            setattr(copied, name, copy.copy(getattr(self, name)))
        return copied


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the engine draws tokens. `temperature` 0 is greedy. `top_k` -1, `top_p` 1 and `min_p` 0 switch a cut off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # also ignores the model's own stop ids; used by benchmarks with forced lengths
    return_kept_tokens: bool = False
    num_top_log_probs: int = 0  # also return this many most likely ids of each token with their log-probs
    skip_special_tokens: bool = True  # leave special tokens out of the text of the answer

    def __post_init__(self) -> None:
        given: Any = self.stop
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise TypeError(f"stop must be a list of texts, not {given!r:.60}")

    @property
    def cuts_tokens(self) -> bool:
        """Whether some tokens may never be drawn. No for greedy answers: the most likely token survives every cut."""
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


class FinishReason(str, enum.Enum):
    """Why an answer ended. `stop`: an end token or a stop string. `length`: a limit. `error`: the request failed."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to write. `noise_key` fixes every random draw of it: the same key, same draws, in any batch."""

    request_id: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    noise_key: int = 0  # 64 bits, hash(run seed, rollout id, group, index)


@dataclass(slots=True)
class GenerationResult:
    """A finished answer. Per-token lists have one entry for each id in `output_ids`.

    `output_ids` keeps the end token that stopped it. `text` is decoded without special tokens unless asked, and is cut
    before a stop string. `log_probs` come from the distribution the token was drawn from (temperature and cuts
    applied); for greedy answers from the untempered softmax.
    """

    request_id: int
    output_ids: list[int]
    log_probs: list[float]
    weight_versions: list[int]
    finish_reason: FinishReason
    text: str = ""
    cached_tokens: int = 0  # prompt tokens served from the prefix index
    kept_token_ids: list[np.ndarray] | None = None  # int32
    top_token_ids: list[np.ndarray] | None = None  # int32, most likely first
    top_log_probs: list[np.ndarray] | None = None  # float32
    error: str | None = None


class Generator(Protocol):
    """A rollout engine, in this process or behind a URL."""

    @property
    def version(self) -> int:
        """Version of the weights that the next token is drawn with."""

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests in order. Admission depends on this order and on engine steps only."""

    async def results(self) -> list[GenerationResult]:
        """Wait for the next finished answers; at least one. Raises `EngineError` when the engine has died."""

    def abort(self, request_ids: Iterable[int] | None = None) -> None:
        """Stop these requests, or all; each still gets a result, with finish reason `abort`."""

    def pause(self, mode: str = "retract") -> None:
        """Stop between two steps: `abort` ends all requests, `retract` recomputes them later, `in_place` keeps
        their cache. Returns when no step is running."""

    def resume(self) -> None: ...

    def release_memory(self, tags: Iterable[str]) -> dict[str, int]:
        """Give memory back by tag (`kv_cache`, `weights`, `cuda_graph`); the bytes of each. Requests in flight are
        retracted and, like new ones, wait for `resume_memory`. Weights that a trainer uses too stay: 0 bytes."""

    def resume_memory(self, tags: Iterable[str]) -> None:
        """Take released memory back and go on."""

    def close(self) -> None: ...


@dataclass(slots=True)
class TrainSample:
    """What the trainer sees of a sample. `reward` is what advantages come from, `raw_reward` what the grader said."""

    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    reward: float
    raw_reward: float
    group_index: int
    index: int
    rollout_log_probs: list[float] | None = None
    weight_versions: list[int] | None = None
    truncated: bool = False
    kept_token_ids: list[np.ndarray] | None = None
    top_token_ids: list[np.ndarray] | None = None
    top_log_probs: list[np.ndarray] | None = None
    rewards: dict[str, float] | None = None  # the numbers of a reward that is a dict


@dataclass(slots=True)
class TrainResult:
    """What one call of `Trainer.train` reports: the `rollout/...` means, one `train/...` record per optimizer step,
    and seconds per phase (`log_probs`, `ref_log_probs`, `actor_train`)."""

    rollout: dict[str, float]
    steps: list[dict[str, float]]
    seconds: dict[str, float]


class Trainer(Protocol):
    """What `loop/` knows of a trainer. `model` is a module whose parameters are updated in place; `num_updates` counts
    the optimizer steps that changed them, `offloaded_bytes` what the last `offload` gave back of the GPU."""

    model: Any
    offloaded_bytes: int

    @property
    def num_updates(self) -> int: ...

    def train(self, samples: Sequence[TrainSample], *, rollout_id: int, weight_version: int) -> TrainResult: ...

    def save(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Tensors by file stem (`model`, `optimizer`) and a JSON state (step count, schedule, RNG)."""

    def load(self, tensors: dict[str, dict[str, Any]], state: dict[str, Any]) -> None:
        """Copy a saved state in place: no parameter moves."""

    def offload(self) -> None:
        """Move to the host what only an update needs. No parameter moves."""

    def onload(self) -> None: ...


class DataSource(Protocol):
    """Groups of untouched samples in a fixed order that a seed decides."""

    def next(self, count: int) -> list[list[Sample]]:
        """The next `count` groups; passes into a new epoch when one ends."""

    def note(self, groups: Iterable[tuple[Sample, float]]) -> None:
        """How often the answers to these prompts were right: a sample of each group, and its share of right answers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
