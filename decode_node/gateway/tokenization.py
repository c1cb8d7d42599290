"""What the gateway needs of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


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
