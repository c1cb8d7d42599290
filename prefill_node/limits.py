"""What a request may ask of an engine. Checked before anything is allocated for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidRequest

MAX_NAMESPACE_BYTES = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_positions: int
    """Prompt and answer together, as the model can."""
    pool_tokens: int
    """Prompt and answer together, as the pool can hold for one sequence."""
    vocabulary: int
    """Token ids are 0 to this, exclusive."""

    @property
    def max_tokens(self) -> int:
        return min(self.max_positions, self.pool_tokens)

    def check_prompt(self, token_ids: Sequence[int], *, room_for: int) -> None:
        """Raises InvalidRequest for an empty prompt, one that leaves no room for `room_for` more tokens, or an unknown id."""
        if not token_ids:
            raise InvalidRequest("the prompt is empty: give at least one token")
        if len(token_ids) + room_for > self.max_tokens:
            most = self.max_tokens - room_for
            why = "the model's context" if self.max_positions <= self.pool_tokens else "this node's pool"
            raise InvalidRequest(f"the prompt has {len(token_ids)} tokens; at most {most} fit into {why} of {self.max_tokens} tokens")
        self.check_ids(token_ids)

    def check_ids(self, token_ids: Sequence[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocabulary:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocabulary)
            raise InvalidRequest(f"token id {wrong} is unknown: the model's ids are 0 to {self.vocabulary - 1}")


def check_namespace(namespace: str) -> None:
    if not 0 < len(namespace.encode()) <= MAX_NAMESPACE_BYTES:
        raise InvalidRequest(f"namespace must have 1 to {MAX_NAMESPACE_BYTES} bytes, this one has {len(namespace.encode())}")
