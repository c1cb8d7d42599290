"""The objects of the OpenAI API that go out: whole answers and the pieces of a stream. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decode_node.gateway.answer import Delta
from decode_node.gateway.nodes import FinishReason

DONE = "[DONE]"
"""The last event of every stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """What completions and chat completions share. `created` is in seconds since the epoch."""

    id: str
    model: str
    created: int
    return_token_ids: bool

    whole_object = ""
    piece_object = ""

    def whole(self, *, text: str, token_ids: Sequence[int], finish_reason: FinishReason, usage: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, **self._content(text), "logprobs": None, "finish_reason": finish_reason.value, **self._token_ids(token_ids)}
        return {**self._head(self.whole_object), "choices": [choice], "usage": usage}

    def opening(self) -> dict[str, Any] | None:
        """The piece before the first delta, where the format has one."""
        return None

    def piece(self, delta: Delta) -> dict[str, Any] | None:
        """None when there is nothing to show: the text of these tokens is not complete yet."""
        if not delta.text and delta.finish_reason is None and not self.return_token_ids:
            return None
        reason = None if delta.finish_reason is None else delta.finish_reason.value
        choice = {
            "index": 0,
            **self._content_delta(delta.text),
            "logprobs": None,
            "finish_reason": reason,
            **self._token_ids(delta.token_ids),
        }
        return {**self._head(self.piece_object), "choices": [choice]}

    def usage_piece(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(self.piece_object), "choices": [], "usage": usage}

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _content_delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _token_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(token_ids)} if self.return_token_ids else {}


class CompletionFormat(ReplyFormat):
    whole_object = "text_completion"
    piece_object = "text_completion"


class ChatFormat(ReplyFormat):
    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"

    def opening(self) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return {**self._head(self.piece_object), "choices": [choice]}

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _content_delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


def event_data(piece: dict[str, Any]) -> str:
    """One line of JSON; characters of any script as they are."""
    return json.dumps(piece, ensure_ascii=False, separators=(",", ":"))
