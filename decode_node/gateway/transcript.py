"""What the client has. The only memory of a stream that must survive a decode node, so it checks every token that comes in. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class PositionFault(Exception):
    """A decode node sent a token for a position that is not the next one, or beyond the end: its stream cannot be trusted any further."""


class Transcript:
    """Prompt plus generated tokens. A token is taken exactly once, in order, or refused."""

    def __init__(self, prompt_token_ids: Sequence[int], *, max_tokens: int) -> None:
        self.prompt_token_ids = tuple(prompt_token_ids)
        self._max_tokens = max_tokens
        self._generated: list[int] = []

    @property
    def generated_token_ids(self) -> Sequence[int]:
        return self._generated

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and answer so far."""
        return (*self.prompt_token_ids, *self._generated)

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self._generated)

    def take(self, *, token_id: int, position: int) -> None:
        """Append the token of `position` (index in the answer, from 0). Raises PositionFault, and then nothing has changed."""
        expected = len(self._generated)
        if expected >= self._max_tokens:
            raise PositionFault(f"position {position} of an answer of at most {self._max_tokens} tokens")
        if position != expected:
            kind = "a token the client has already" if position < expected else "a token beyond a missing one"
            raise PositionFault(f"position {position} where {expected} was due: {kind}")
        self._generated.append(token_id)
