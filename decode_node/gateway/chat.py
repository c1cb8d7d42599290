"""From the messages of a chat request to what a chat template takes."""

from __future__ import annotations

from collections.abc import Sequence

from decode_node.gateway.api import ChatMessage


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """One {role, content} each, content as plain text. "developer" is the newer name of "system", which templates know."""
    return [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.text,
            **({} if message.name is None else {"name": message.name}),
        }
        for message in messages
    ]
