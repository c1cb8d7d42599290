"""What the gateway needs of a tokenizer, and a bound on what a prompt may cost it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Thread-safe and pure."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens left out; bytes that form no character as U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for, perhaps a part of a character."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as the model's template writes it, special tokens included. Raises InvalidRequest when the model has no
        template or its template refuses the messages."""
        ...


class TextTooLong(Exception):
    """The beginning of a text alone has more than twice the tokens that were allowed."""


_CHARACTERS_A_TOKEN = 16
"""Of the first look; most texts have fewer."""


def encode_within(tokenizer: Tokenizer, text: str, *, limit: int, add_special_tokens: bool = True) -> list[int]:
    """The tokens of a text, at most about twice `limit` of them. Raises TextTooLong.

    Cost: that of encoding some 2 x `limit` tokens, however long the text is: 8 MB of it would keep a thread busy for a minute. A longer
    and longer beginning is encoded until it has too many tokens or is the whole. A cut may split a token or two, hence the twice.
    """
    characters = _CHARACTERS_A_TOKEN * limit
    while characters < len(text):
        if len(tokenizer.encode(text[:characters], add_special_tokens=False)) > 2 * limit:
            raise TextTooLong
        characters *= 2
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)
