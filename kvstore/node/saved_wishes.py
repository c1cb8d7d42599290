"""What an operator set at run time, quotas and pins, kept in the SSD folder over restarts. A node without one forgets them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvstore.core.events.wishes import PinKind
from kvstore.core.pins import PinnedBlock
from kvstore.errors import ConfigError
from kvstore.ids import BlockHash, KeySpace, LayoutFingerprint, Namespace
from kvstore.units import Bytes, Nanos

_FILE = "WISHES.json"


class SavedWishes:
    """`quotas`: those changed at run time, None for no limit; they go before the configured ones."""

    def __init__(self, folder: Path | None) -> None:
        """Raises ConfigError when what is there cannot be read: an empty table instead would let quotas evict what they should not."""
        self._file = None if folder is None else folder / _FILE
        self.quotas: dict[Namespace, Bytes | None] = {}
        self.pins: list[PinnedBlock] = []
        if self._file is None or not self._file.exists():
            return
        try:
            record = json.loads(self._file.read_text())
            self.quotas = {Namespace(name): None if limit is None else Bytes(int(limit)) for name, limit in record["quotas"].items()}
            self.pins = [_pin(pin) for pin in record["pins"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self._file} (quotas and pins set at run time) cannot be read: {error!r}; "
                "mend it, or delete it to start with those of the config"
            ) from None

    @property
    def lasts(self) -> bool:
        """Whether what is set now is there after a restart."""
        return self._file is not None

    def over(self, configured: Mapping[Namespace, Bytes]) -> dict[Namespace, Bytes]:
        """The quotas that hold."""
        changed = {**configured, **self.quotas}
        return {namespace: limit for namespace, limit in changed.items() if limit is not None}

    def save(self, pins: Iterable[PinnedBlock]) -> None:
        """Blocks; for a thread. Whole and synced, or the old one stays. Raises OSError."""
        if self._file is None:
            return
        record = {
            "quotas": self.quotas,
            "pins": [
                {
                    "namespace": pin.key_space.namespace,
                    "layout": pin.key_space.layout.hex(),
                    "hash": pin.hash.hex(),
                    "kind": pin.kind.name.lower(),
                    "expires_at": pin.expires_at,
                }
                for pin in pins
            ],
        }
        new = self._file.with_suffix(".new")
        with open(new, "w", encoding="utf-8") as file:
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._file)


def _pin(record: Mapping[str, str]) -> PinnedBlock:
    return PinnedBlock(
        key_space=KeySpace(Namespace(record["namespace"]), LayoutFingerprint(bytes.fromhex(record["layout"]))),
        hash=BlockHash(bytes.fromhex(record["hash"])),
        kind=PinKind[record["kind"].upper()],
        expires_at=Nanos(int(record["expires_at"])),
    )
