"""Rows for `--loss-type sft_loss`: answers that are given, so no engine and no reward takes part."""

from __future__ import annotations

from dataclasses import dataclass

from miles.config.sections import DataConfig
from miles.data.prompts import PromptSet, read_content, read_label, read_tools
from miles.data.rows import BadRows, Row, stream_rows
from miles.data.store import store_for
from miles.errors import DataError
from miles.observe.log import get_logger
from miles.text.tokenizer import Message, Tokenizer
from miles.types import DataSource, Sample, SampleStatus

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Text that is tokenized by itself, as it is when the model answers; `learn` marks an answer."""

    text: str
    learn: bool


class SftProducer:
    """Takes the place of `Producer`: a group is one row."""

    def __init__(self, source: DataSource, *, rollout_batch_size: int) -> None:
        self._source = source
        self._rollout_batch_size = rollout_batch_size
        self.counts: dict[str, float] = {}

    async def collect(self, rollout_id: int) -> list[list[Sample]]:
        return self._source.next(self._rollout_batch_size)


def load_sft_rows(data: DataConfig, tokenizer: Tokenizer, *, max_context_len: int) -> PromptSet:
    """Load `data.prompt_data` as finished samples with a loss mask.

    A row is a list of messages, where every assistant turn is learned; or, with `--label-key`, a prompt (text or
    messages) whose label is the answer, and only that is learned. An answer is learned up to the end token that the
    chat template puts after it; without a template the tokenizer's end token is added. Rows of more than
    `max_context_len` tokens are left out, counted and reported. Raises `DataError` like `load_prompts`.
    """
    assert data.prompt_data is not None, "the rules of the config ask for --prompt-data"
    path, rows = stream_rows(data.prompt_data, flag="--prompt-data")
    bad, kept = BadRows(path, flag="--prompt-data"), store_for(path)
    num_rows = num_too_long = 0
    for number, row in rows:
        num_rows += 1
        try:
            sample = _read_sample(row, data, tokenizer)
        except DataError as error:
            bad.add(number, str(error))
            continue
        if len(sample.tokens) <= max_context_len:
            kept.append(sample)
        else:
            num_too_long += 1
    bad.raise_if_any(num_rows=num_rows)
    if not kept:
        file = f"--prompt-data {data.prompt_data}"
        raise DataError(f"{file}: all {num_rows} rows have more than {max_context_len} tokens")
    if num_too_long:
        logger.warning(
            f"{path}: {num_too_long} of {num_rows} rows have more than {max_context_len} tokens and are left out"
        )
    return PromptSet(path, kept, num_too_long)


def _read_sample(row: Row, data: DataConfig, tokenizer: Tokenizer) -> Sample:
    content = read_content(row, data.input_key, flag="--input-key")
    label = read_label(row, data.label_key, flag="--label-key")
    if data.apply_chat_template:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if label is not None:
            messages = [*messages, {"role": "assistant", "content": str(label)}]
            answers = [len(messages) - 1]
        pieces = _chat_pieces(messages, answers, data, tokenizer, tools=read_tools(row, data.tool_key))
        end: list[int] = []
    elif isinstance(content, str) and label is not None:
        pieces = [_Piece(content, learn=False), _Piece(str(label), learn=True)]
        end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    else:
        raise DataError("has no answer to learn: give --label-key, or messages with --apply-chat-template")
    return _to_sample(pieces, end, label=label, tokenizer=tokenizer)


def _chat_pieces(
    messages: list[Message], answers: list[int], data: DataConfig, tokenizer: Tokenizer, *, tools: list[Message] | None
) -> list[_Piece]:
    """The rendered conversation, cut where each answer begins (there its prompt ends) and ends."""
    if not answers:
        raise DataError("has no assistant turn to learn; give one, or --label-key")

    def render(count: int, *, add_generation_prompt: bool) -> str:
        return tokenizer.render(
            messages[:count],
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **data.apply_chat_template_kwargs,
        )

    whole = render(answers[-1] + 1, add_generation_prompt=False)
    pieces = []
    position = 0
    for answer in answers:
        before = render(answer, add_generation_prompt=True)
        after = render(answer + 1, add_generation_prompt=False)
        if not (whole.startswith(before) and whole.startswith(after) and position <= len(before) < len(after)):
            raise DataError(
                f"the chat template changes turn {answer + 1} when later turns follow, so its tokens cannot be told "
                "apart; make a row of its own for each assistant turn, as the last message"
            )
        pieces += [
            _Piece(whole[position : len(before)], learn=False),
            _Piece(whole[len(before) : len(after)], learn=True),
        ]
        position = len(after)
    return pieces


def _to_sample(pieces: list[_Piece], end: list[int], *, label: object, tokenizer: Tokenizer) -> Sample:
    tokens: list[int] = []
    mask: list[int] = []
    for piece in pieces:
        ids = tokenizer.encode(piece.text)
        learned = _num_learned(ids, tokenizer) if piece.learn else 0
        tokens += ids
        mask += [1] * learned + [0] * (len(ids) - learned)
    tokens += end
    mask += [1] * len(end)
    if 1 not in mask:
        raise DataError("its answer has no tokens")
    first, last = mask.index(1), len(mask) - mask[::-1].index(1)
    if first == 0:
        raise DataError("its prompt has no tokens")
    prompt, response = tokens[:first], tokens[first:last]  # what follows the last learned token is no use
    return Sample(
        prompt=tokenizer.decode(prompt, skip_special_tokens=False),
        tokens=prompt + response,
        response=tokenizer.decode(response),
        response_length=len(response),
        label=label,
        reward=0.0,
        loss_mask=mask[first:last],
        status=SampleStatus.COMPLETED,
    )


def _num_learned(ids: list[int], tokenizer: Tokenizer) -> int:
    """Up to and including the last end token: what a template writes after it is never generated."""
    ends = [position for position, token_id in enumerate(ids) if token_id in tokenizer.eos_token_ids]
    return ends[-1] + 1 if ends else len(ids)
