"""From token ids to text that may be shown: whole characters only, and nothing that may turn out to be a stop string. Pure.

Both classes live as long as the answer, not as long as a decode node's stream, so a character or a stop string that spans a
failover is treated like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_MAX_HELD_BYTES = 3
"""An unfinished UTF-8 character has at most 3 bytes. A decoder shows them as 1 (byte-level) to 3 (byte fallback) replacement characters."""

_CONTEXT_TOKENS = 8
"""Tokens kept as context when the window is cut, and as many of what stands before a text: enough that an unfinished character (3 tokens at
most) lies wholly inside."""

_WINDOW_TOKENS = 64


class Detokenizer:
    """Turns tokens into text, one by one.

    `decode` is the tokenizer's: token ids to text, special tokens left out, malformed UTF-8 as U+FFFD. The concatenation of all
    that `push` and `flush` return equals `decode` of all tokens, for every decoder that only appends.

    `context`: the text that this one continues, if it does; its last tokens are enough. Decoders of SentencePiece vocabularies leave out
    the space before the first word of a text, and here that is not the first one.

    Cost: one `decode` of at most _WINDOW_TOKENS tokens a token.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, context: Sequence[int] = ()) -> None:
        self._decode = decode
        context = context[-_CONTEXT_TOKENS:]
        before = decode(context) if context else ""
        whole = not before.endswith(_REPLACEMENT)  # else how long it is depends on what follows
        self._window = list(context) if whole else []
        self._shown = len(before) if whole else 0
        """Characters of decode(window) that were returned already, or stand before the text."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = _stable_length(text)
        new = text[self._shown : stable]
        self._shown = max(self._shown, stable)
        if len(self._window) >= _WINDOW_TOKENS:
            self._cut()
        return new

    def flush(self) -> str:
        """What is held back at the end of the answer: an unfinished character, as U+FFFD."""
        text = self._decode(self._window)
        new = text[self._shown :]
        self._shown = len(text)
        return new

    def _cut(self) -> None:
        self._window = self._window[-_CONTEXT_TOKENS:]
        self._shown = _stable_length(self._decode(self._window))


class StopScanner:
    """Cuts the text before the first stop string, however the text arrives.

    The stop string that ends first wins (the longest of those that end at the same place), so the result does not depend on where
    the text was cut into pieces. An answer without stop strings passes through at no cost.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop before the first character"
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may be shown now. After a stop string was found: its part before the stop, then nothing ever again."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return buffer[: min(found)[1]]
        held = self._longest_beginning_of_a_stop(buffer)
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held]

    def flush(self) -> str:
        """The answer ended otherwise: what looked like the beginning of a stop string was none."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning_of_a_stop(self, buffer: str) -> int:
        longest = min(len(buffer), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            ending = buffer[-length:]
            if any(stop.startswith(ending) for stop in self._stops):
                return length
        return 0


def _stable_length(text: str) -> int:
    """Characters of `text` that no later token can change."""
    end = len(text)
    while end > 0 and len(text) - end < _MAX_HELD_BYTES and text[end - 1] == _REPLACEMENT:
        end -= 1
    return end
