"""What a codec report has judged so far, a line of JSON a window, so that one that was stopped can go on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RungOnWindow:
    """Means over the scored tokens of one window, and CPU seconds of the fastest block."""

    payload_bytes: int
    elements: int
    kl: float
    loss: float
    agreement: float
    first_divergence: int | None
    encode_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedWindow:
    text: str
    loss: float
    """Nats a scored token on unencoded KV."""
    prefill_s: float
    """CPU seconds a token of the prefix."""
    rungs: Mapping[str, RungOnWindow]


class Journal:
    """Judged windows by key, in `path` too where one is given. Keys tell what a judgement depends on: see `window_key`."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError for a file that can be neither read nor made. Lines that are no whole record are passed over."""
        self._path = path
        self._judged: dict[str, JudgedWindow] = {}
        if path is None:
            return
        try:
            with path.open("a+", encoding="utf-8") as file:
                file.seek(0)
                for line in file:
                    self._take(line)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"resume: cannot use {path}: {error}") from None

    def get(self, key: str) -> JudgedWindow | None:
        return self._judged.get(key)

    def add(self, key: str, window: JudgedWindow) -> None:
        self._judged[key] = window
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, **dataclasses.asdict(window)}) + "\n")

    def _take(self, line: str) -> None:
        try:
            record = json.loads(line)
            key = record.pop("key")
            rungs = {name: RungOnWindow(**rung) for name, rung in record.pop("rungs").items()}
            self._judged[key] = JudgedWindow(rungs=rungs, **record)
        except (ValueError, TypeError, KeyError, AttributeError):
            pass  # a line cut short by what stopped the report, or another version's: judged anew


def window_key(token_ids: Sequence[int], *parts: Any) -> str:
    """Equal exactly when tokens and parts (numbers, texts) are."""
    return hashlib.sha256(json.dumps([list(token_ids), *parts]).encode()).hexdigest()[:32]
