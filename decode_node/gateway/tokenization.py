"""What the gateway needs of a tokenizer, and the ids that end an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvstore.errors import ConfigError


class Tokenizer(Protocol):
    """Thread-safe and pure."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens left out; bytes that form no character as U+FFFD."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Raises InvalidRequest when the model has no template or its template refuses the messages."""
        ...


def end_token_ids(model_folder: Path) -> frozenset[int]:
    """The tokens that end an answer of the model: generation_config.json if it names them, else config.json. Raises ConfigError."""
    for name in ("generation_config.json", "config.json"):
        file = model_folder / name
        try:
            settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: cannot read {file}: {error}") from None
        named = settings.get("eos_token_id")
        if named is not None:
            return frozenset(named if isinstance(named, list) else [named])
    return frozenset()
