"""A file of prompts as samples that are ready to be answered: rendered, tokenized and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from miles.config.hook_section import HookConfig
from miles.config.sections import DataConfig
from miles.data.rows import BATCH_ROWS, BadRows, Row, column, stream_rows
from miles.data.store import store_for
from miles.errors import DataError, PluginError
from miles.observe.log import get_logger
from miles.plugins import load_object
from miles.text.tokenizer import Tokenizer
from miles.types import NOTES, Sample

logger = get_logger(__name__)

# What is wrong with a label, given the row's metadata; None when answers can be graded with it.
LabelCheck = Callable[[Any, dict[str, Any]], str | None]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Rows of a file as samples without an answer: `prompt` is the text the model sees and `tokens` its ids."""

    path: Path
    prompts: Sequence[Sample]
    num_too_long: int  # rows left out because of their length


@dataclass(frozen=True, slots=True)
class PromptFlags:
    """Names of the flags behind the settings, for messages: an evaluation set has its own."""

    file: str = "--prompt-data"
    input_key: str = "--input-key"
    label_key: str = "--label-key"


def load_prompts(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    max_context_len: int,
    max_prompt_len: int | None = None,
    check_label: LabelCheck | None = None,
    hooks: HookConfig = HookConfig(),  # noqa: B008 - frozen
    flags: PromptFlags = PromptFlags(),  # noqa: B008 - frozen
) -> PromptSet:
    """Load `data.prompt_data`.

    Prompts of more than `max_prompt_len` tokens are left out, counted and reported. A prompt that leaves no room for
    an answer in `max_context_len` is an error, like every row that is malformed, lacks a column or has a label that
    `check_label` refuses: one `DataError` names the file, the number of bad rows and the first of them.
    """
    assert data.prompt_data is not None, "the rules of the config ask for --prompt-data"
    path, rows = stream_rows(data.prompt_data, flag=flags.file)
    bad, prompts = BadRows(path, flag=flags.file), store_for(path)
    keeps_messages, tools = hooks.custom_agent_function_path is not None, load_tool_specs(hooks)
    num_rows = num_too_long = num_read = 0
    advice = ""
    while batch := list(islice(rows, BATCH_ROWS)):
        num_rows += len(batch)
        read: list[tuple[int, Sample]] = []
        texts: list[str] = []
        for number, row in batch:
            try:
                sample = _read_prompt(row, data, check_label, flags)
                texts.append(_render(sample.prompt, row, data, tokenizer, tools))
                sample.prompt = sample.prompt if keeps_messages else texts[-1]
                read.append((number, sample))
            except DataError as error:
                bad.add(number, str(error))
        num_read += len(read)
        for (number, sample), ids in zip(read, tokenizer.encode_batch(texts), strict=True):
            sample.tokens = ids
            if max_prompt_len is not None and len(ids) > max_prompt_len:
                num_too_long += 1
            elif not ids:
                bad.add(number, "its prompt has no tokens")
            elif len(ids) >= max_context_len:
                bad.add(number, f"its prompt has {len(ids)} tokens; the context holds {max_context_len}")
                advice = f"--rollout-max-prompt-len N with N below {max_context_len} leaves such prompts out"
            else:
                prompts.append(sample)
    bad.raise_if_any(num_rows=num_rows, advice=advice)
    if not prompts:
        raise DataError(
            f"{flags.file} {data.prompt_data}: all {num_read} prompts have more than {max_prompt_len} tokens; "
            "raise --rollout-max-prompt-len"
        )
    if num_too_long:
        logger.warning(
            f"{path}: {num_too_long} of {num_read} prompts have more than {max_prompt_len} tokens "
            "(--rollout-max-prompt-len) and are left out"
        )
    return PromptSet(path, prompts, num_too_long)


def _read_prompt(row: Row, data: DataConfig, check_label: LabelCheck | None, flags: PromptFlags) -> Sample:
    """A sample without tokens, whose prompt is what the row says. `DataError` says what is wrong with the row."""
    content = read_content(row, data.input_key, flag=flags.input_key)
    label = read_label(row, data.label_key, flag=flags.label_key)
    metadata = _read_metadata(row, data.metadata_key)
    problem = check_label(label, metadata) if check_label is not None else None
    if problem is not None:
        raise DataError(f"its label {label!r} cannot be read: {problem}")
    return Sample(prompt=content, label=label, metadata=metadata)


def _render(
    content: str | list[dict[str, Any]], row: Row, data: DataConfig, tokenizer: Tokenizer, tools: list[Any] | None
) -> str:
    """The text that the model sees of a prompt."""
    tools = read_tools(row, data.tool_key) or tools
    if data.apply_chat_template:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        content = tokenizer.render(messages, tools=tools, **data.apply_chat_template_kwargs)
    if not isinstance(content, str):
        raise DataError("its prompt is a list of messages, which needs --apply-chat-template")
    if not _is_unicode(content):
        raise DataError("its prompt has half of a surrogate pair, which is no character")
    return content


def load_tool_specs(hooks: HookConfig) -> list[dict[str, Any]] | None:
    """The list that --generate-tool-specs-path names. Raises `PluginError`."""
    if hooks.generate_tool_specs_path is None:
        return None
    flag = "--generate-tool-specs-path"
    specs = load_object(hooks.generate_tool_specs_path, flag=flag)
    if not isinstance(specs, list) or not all(isinstance(spec, dict) and "function" in spec for spec in specs):
        raise PluginError(
            f"{flag} {hooks.generate_tool_specs_path}: expected a list of OpenAI tools, each with a function"
        )
    return specs


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_content(row: Row, key: str, *, flag: str) -> str | list[dict[str, Any]]:
    """A text that is not blank, or a list of messages, from column `key`. `DataError` says what else it is."""
    content = column(key, row, flag=flag)
    if isinstance(content, str):
        if not content.strip():
            raise DataError(f"its prompt {key!r} is empty")
        return content
    if not isinstance(content, list):
        raise DataError(f"its prompt {key!r} is a {type(content).__name__}; expected a text or a list of messages")
    if not content:
        raise DataError(f"its prompt {key!r} is an empty list")
    for position, message in enumerate(content, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"message {position} of its prompt {key!r} has no role and content: {message!r:.80}")
    return content


def read_label(row: Row, key: str | None, *, flag: str) -> Any:
    if key is None:
        return None
    if column(key, row, flag=flag) is None:
        raise DataError(f"its label {key!r} is null")
    return row[key]


def _read_metadata(row: Row, key: str) -> dict[str, Any]:
    metadata = row.get(key) if key == DataConfig.metadata_key else column(key, row, flag="--metadata-key")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise DataError(f"its {key!r} (--metadata-key) is a {type(metadata).__name__}; expected a mapping")
    if taken := ", ".join(name for name in NOTES if name in metadata):
        raise DataError(f"its {key!r} (--metadata-key) has {taken}, where a run keeps what it measures; rename that")
    return metadata


def read_tools(row: Row, key: str | None) -> list[dict[str, Any]] | None:
    """Tool specifications, as a list or as the JSON text of one (parquet files often hold text)."""
    if key is None:
        return None
    tools = column(key, row, flag="--tool-key")
    if tools is None:
        return None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"its {key!r} (--tool-key) is not JSON: {error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"its {key!r} (--tool-key) is not a list of tool specifications")
    return tools
