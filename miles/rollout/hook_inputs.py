"""What hooks get and give back, under the public names."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.errors import RequestError
from miles.rollout.client import EngineClient
from miles.text.tokenizer import Tokenizer
from miles.types import GenerationResult, Sample, SamplingParams

_ENDED = "the sample of this request has ended"


class GenerateState:
    """The engine as a hook sees it: `await state.generate(ids, sampling_params)`, from any thread and event loop."""

    def __init__(self, args: Any, client: EngineClient, *, noise_key: int, max_context_len: int) -> None:
        self.args, self.max_context_len = args, max_context_len
        self._client, self._loop = client, asyncio.get_running_loop()
        self.draw_from(noise_key)
        self._writing: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def draw_from(self, noise_key: int) -> None:
        """Have the next calls draw what a new state with this key would."""
        self.noise_key = self._next_key = noise_key

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._client.tokenizer is not None, "build.py gives the client the tokenizer of the model"
        return self._client.tokenizer

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        *,
        noise_key: int | None = None,
    ) -> GenerationResult:
        """Write an answer to these tokens. Each call of a sample has draws of its own, unless `noise_key` is given:
        the draws are by key and position, so turns of one text can share it."""
        if not isinstance(sampling_params, SamplingParams):
            sampling_params = SamplingParams(**sampling_params)
        ids = [*map(operator.index, prompt_ids)]  # raises a TypeError for a text
        key = noise_key
        if key is None:
            key, self._next_key = self._next_key, (self._next_key + 1) % 2**64
        writing = self._write(ids, sampling_params, key)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(writing, self._loop))

    async def _write(self, prompt_ids: Sequence[int], sampling: SamplingParams, key: int) -> GenerationResult:
        if self._is_closed:
            raise RequestError(_ENDED, status=404)
        task = asyncio.current_task()
        assert task is not None
        self._writing.add(task)
        try:
            return await self._client.generate(prompt_ids, sampling, noise_key=key)
        except asyncio.CancelledError:
            if self._is_closed:
                raise RequestError(_ENDED, status=404) from None
            raise
        finally:
            self._writing.discard(task)

    def close(self) -> None:
        """Stop what is still being written, from the event loop that this was made in: a hook that has returned, or was
        given up, may have left a request behind."""
        self._is_closed = True
        for task in self._writing:
            task.cancel()


@dataclass(frozen=True, slots=True)
class GenerateFnInput:
    state: GenerateState
    sample: Sample
    sampling_params: dict[str, Any]
    evaluation: bool = False

    @property
    def args(self) -> Any:
        return self.state.args


@dataclass(frozen=True, slots=True)
class GenerateFnOutput:
    samples: Sample | list[Sample]


@dataclass(frozen=True, slots=True)
class RolloutFnConstructorInput:
    args: Any
    data_source: Any  # `get_samples(n)`, `add_samples(groups)`
    state: GenerateState


@dataclass(frozen=True, slots=True)
class RolloutFnTrainInput:
    rollout_id: int
    weight_version: int = 0


@dataclass(frozen=True, slots=True)
class RolloutFnEvalInput:
    """`hf_dir`: the evaluated weights as a Hugging Face folder, for a `CheckpointEvalFn`; else None."""

    rollout_id: int
    generate_state: GenerateState
    weight_version: int = 0
    hf_dir: str | None = None


@dataclass(frozen=True, slots=True)
class RolloutFnTrainOutput:
    samples: list[list[Sample]]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutFnEvalOutput:
    """`data`: by set, `rewards` and optionally `samples`."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalSkip:
    """Given back in place of a `RolloutFnEvalOutput`: there is no evaluation this time."""

    reason: str = "custom"


class CheckpointEvalFn:
    """Base of a class for `--eval-function-path` that evaluates a folder of weights: it defines
    `async evaluate_checkpoint(hf_dir, input)`, with a `RolloutFnEvalInput`, and may define `dispose`."""

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.input = input

    def dispose(self) -> Any:
        """Called once at the end of a run, also of one that fails; may be async."""
