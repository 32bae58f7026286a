"""The tokenizer of a model folder: text to ids and back, the chat template, the ids that end an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from miles.errors import CheckpointError, ConfigError, DataError

Message = dict[str, Any]


class Tokenizer:
    """Wraps the fast tokenizer of a Hugging Face folder. `eos_token_ids` are all ids that end an answer, `eos_token_id`
    the one to write at the end of a text."""

    def __init__(
        self,
        fast: PreTrainedTokenizerFast,
        *,
        name_or_path: str,
        eos_token_ids: frozenset[int],
        chat_template: str | None = None,
    ) -> None:
        self._fast = fast
        self._backend = fast.backend_tokenizer
        # a tokenizer file can ask for padding and truncation; ids of a prompt must be all of it and nothing else
        self._backend.no_padding()
        self._backend.no_truncation()
        self._chat_template = chat_template
        self.name_or_path = name_or_path
        self.eos_token_ids = eos_token_ids
        self.eos_token_id: int | None = fast.eos_token_id
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.special_token_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids. Special tokens written in the text become their ids; none are added unless asked for, since
        text from a chat template already has them."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, several times faster than one by one."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def special_token_id(self, text: str) -> int | None:
        """Id of the special token that is written like this; None when there is none."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self.special_token_ids else None

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None or self._fast.chat_template is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The messages as one text through the chat template; `kwargs` are passed to the template.

        Raises `ConfigError` when there is no template, `DataError` when the template refuses the messages.
        """
        if not self.has_chat_template:
            raise ConfigError(
                f"--apply-chat-template: the tokenizer in {self.name_or_path} has no chat template; "
                "give one with --chat-template-path, or leave --apply-chat-template out"
            )
        try:
            return self._fast.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self._chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **kwargs,
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise DataError(f"the chat template cannot render these messages: {error}") from error

    def check_vocabulary(self, model_vocab_size: int, *, model: str) -> None:
        """Raise `CheckpointError` when this tokenizer has ids that the model does not know."""
        if self.vocab_size > model_vocab_size:
            raise CheckpointError(
                f"--hf-checkpoint {model}: the tokenizer in {self.name_or_path} has {self.vocab_size} tokens but the "
                f"model knows {model_vocab_size}: these files do not belong together; use the tokenizer of the model"
            )


def load_tokenizer(folder: str | Path, *, chat_template_path: str | None = None) -> Tokenizer:
    """Load `tokenizer.json` and its companions from a model folder.

    `chat_template_path` is a Jinja file that replaces the template of the folder. Raises `CheckpointError` when a
    file is missing or damaged, `ConfigError` when the template file cannot be used.
    """
    folder = Path(folder)
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise CheckpointError(
            f"{tokenizer_file} is missing: the model folder needs a fast tokenizer; "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(folder) writes one"
        )
    try:
        fast = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # fault boundary: the tokenizers library raises bare Exception for a damaged file
        raise CheckpointError(
            f"{tokenizer_file} or a file beside it cannot be read ({error}); download the tokenizer files again"
        ) from error
    eos_token_ids = _generation_eos(folder / "generation_config.json")
    if fast.eos_token_id is not None:
        eos_token_ids |= {fast.eos_token_id}
    return Tokenizer(
        fast,
        name_or_path=str(folder),
        eos_token_ids=eos_token_ids,
        chat_template=_read_template(chat_template_path) if chat_template_path is not None else None,
    )


def _generation_eos(path: Path) -> frozenset[int]:
    if not path.is_file():
        return frozenset()
    try:
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a JSON object ({error}); download it again") from error
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template-path {path}: cannot be read as text: {error}") from error
