"""Text to token ids and back, from tokenizer.json alone: neither torch nor transformers is imported, so the gateway stays small."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from kvstore.errors import ConfigError, InvalidRequest

_SPACE = "\u2581"
"""How SentencePiece writes a space."""
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
"""How it writes a byte for which it has no piece."""


class Tokenizer:
    """Thread-safe; every method is a pure function of its arguments."""

    def __init__(self, fast: FastTokenizer, *, chat_template: str | None, special: Mapping[str, str]) -> None:
        self._fast = fast
        self._special = dict(special)
        # The decoder has no other word for what it is.
        by_letters = fast.decoder is not None and b"ByteLevel" in fast.decoder.__getstate__()
        self._byte_of = _bytes_of_letters() if by_letters else None
        self._template = None
        if chat_template is not None:
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
            environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
            environment.globals["raise_exception"] = _refuse
            environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
            self._template = environment.from_string(chat_template)

    @property
    def vocab_size(self) -> int:
        """Ids are below this; added tokens count."""
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Bytes that form no whole character decode to U+FFFD: wait for more tokens before showing the end of such a text."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for, special tokens by their names; perhaps a part of a character. Empty for an unknown id."""
        piece = self._fast.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_of is not None and all(letter in self._byte_of for letter in piece):
            return bytes(self._byte_of[letter] for letter in piece)
        if _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace(_SPACE, " ").encode()

    def token_to_id(self, token: str) -> int | None:
        found = self._fast.token_to_id(token)
        return None if found is None else int(found)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The text of the conversation in the model's own format, special tokens included: encode it without adding any. Raises
        InvalidRequest when the template refuses it."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions")
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **self._special)
        except (TemplateError, TypeError, KeyError) as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}") from None


def load_tokenizer(path: Path) -> Tokenizer:
    """Of a model folder. Raises ConfigError when it has no tokenizer.json."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"model: {path} has no tokenizer.json")
    try:
        fast = FastTokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"model: cannot read {file}: {error}") from None
    fast.no_truncation()
    fast.no_padding()
    settings = path / "tokenizer_config.json"
    try:
        config: dict[str, Any] = json.loads(settings.read_text()) if settings.is_file() else {}
        return Tokenizer(fast, chat_template=_chat_template(path, config), special=_special_tokens(config))
    except TemplateSyntaxError as error:
        raise ConfigError(f"model: the chat template of {path} is no Jinja template: {error.message} (line {error.lineno})") from None
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"model: cannot read {settings}: {error}") from None


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates: [{"name": "default", "template": "..."}]
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    special = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(key)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            special[key] = value
    return special


def _bytes_of_letters() -> dict[str, int]:
    """The letters in which byte-level vocabularies are written: printable bytes as themselves, the others from U+0100 on.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (bytes_to_unicode in its code).
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _refuse(message: str) -> None:
    raise TemplateError(message)
