"""The objects of the OpenAI API that go out: whole answers and the pieces of a stream. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode_node.gateway.answer import Delta
from decode_node.gateway.nodes import FinishReason, TokenOut

DONE = "[DONE]"
"""The last event of every stream."""

_LEAST_LOGPROB = -9999.0
"""OpenAI's way to write minus infinity, which JSON cannot."""


@dataclass(slots=True)
class WholeChoice:
    """One choice, put together from its deltas."""

    texts: list[str] = field(default_factory=list)
    tokens: list[TokenOut] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.offsets.extend([delta.text_offset] * len(delta.tokens))
        self.finish_reason = delta.finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """What completions and chat completions share. `created` is in seconds since the epoch."""

    id: str
    model: str
    created: int
    return_token_ids: bool
    token_bytes: Callable[[int], bytes]
    """What a token stands for, perhaps a part of a character."""
    echo: str = ""
    """Put before each answer: the prompt, when it was asked for."""

    whole_object = ""
    piece_object = ""

    def whole(self, choices: Sequence[WholeChoice], *, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._head(self.whole_object),
            "choices": [
                {
                    "index": index,
                    **self._content(self.echo + "".join(choice.texts)),
                    "logprobs": self._logprobs(choice.tokens, choice.offsets),
                    "finish_reason": None if choice.finish_reason is None else choice.finish_reason.value,
                    **self._token_ids(choice.tokens),
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """The piece before the first delta of a choice, where there is one."""
        return self._piece(index, self._content_delta(self.echo)) if self.echo else None

    def piece(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """None when there is nothing to show: the text of these tokens is not complete yet."""
        logprobs = self._logprobs(delta.tokens, [delta.text_offset] * len(delta.tokens))
        if not delta.text and delta.finish_reason is None and logprobs is None and not self.return_token_ids:
            return None
        reason = None if delta.finish_reason is None else delta.finish_reason.value
        return self._piece(index, self._content_delta(delta.text), logprobs, reason, self._token_ids(delta.tokens))

    def usage_piece(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(self.piece_object), "choices": [], "usage": usage}

    def _piece(
        self,
        index: int,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        token_ids: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason, **(token_ids or {})}
        return {**self._head(self.piece_object), "choices": [choice]}

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _content_delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _token_ids(self, tokens: Sequence[TokenOut]) -> dict[str, Any]:
        return {"token_ids": [token.token_id for token in tokens]} if self.return_token_ids else {}

    def _logprobs(self, tokens: Sequence[TokenOut], offsets: Sequence[int]) -> dict[str, Any] | None:
        """None when they were not asked for, or there is no token to have them."""
        raise AssertionError("each format has its own")


class CompletionFormat(ReplyFormat):
    whole_object = "text_completion"
    piece_object = "text_completion"

    def _logprobs(self, tokens: Sequence[TokenOut], offsets: Sequence[int]) -> dict[str, Any] | None:
        named = [(token, token.logprobs) for token in tokens if token.logprobs is not None]
        if not named:
            return None
        return {
            "tokens": [self._name(token.token_id) for token, _ in named],
            "token_logprobs": [_finite(found.logprob) for _, found in named],
            # The token itself is always among them, so there may be one more than was asked for.
            "top_logprobs": [
                {self._name(token_id): _finite(logprob) for token_id, logprob in (*found.top, (token.token_id, found.logprob))}
                for token, found in named
            ],
            "text_offset": list(offsets),
        }

    def _name(self, token_id: int) -> str:
        """The token's text; bytes that are no whole characters are written as OpenAI does, so that two such tokens differ."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatFormat(ReplyFormat):
    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        return self._piece(index, {"delta": {"role": "assistant", "content": ""}})

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _content_delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, tokens: Sequence[TokenOut], offsets: Sequence[int]) -> dict[str, Any] | None:
        named = [(token, token.logprobs) for token in tokens if token.logprobs is not None]
        if not named:
            return None
        content = [
            {**self._entry(token.token_id, found.logprob), "top_logprobs": [self._entry(*other) for other in found.top]}
            for token, found in named
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def event_data(piece: dict[str, Any]) -> str:
    """One line of JSON; characters of any script as they are."""
    return json.dumps(piece, ensure_ascii=False, separators=(",", ":"))
