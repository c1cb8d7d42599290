"""What a run of chaos has shown. Pure."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Counts of one run."""

    seed: int
    minutes: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    """By kind."""
    puts: int = 0
    acknowledged: int = 0
    """Blocks put at quorum or all of which the client said that so many replicas hold them."""
    reads: int = 0
    blocks_read: int = 0
    failed_reads: int = 0
    """Reads that did not get an acknowledged block at once, though a store that has it could be reached."""
    excused_reads: int = 0
    """Such ones while every store that has the block was away, or had lost what it had."""
    excused_blocks: int = 0
    """Acknowledged ones of which every store was struck so that it lost what it had."""
    wrong_bytes: int = 0
    """Blocks with other bytes than were put."""
    acknowledged_lost: int = 0
    """Beside those that are excused."""
    leaks: int = 0
    complaints: list[str] = field(default_factory=list)
    """What else must not be: a node that ended with a bug, a cluster that did not become whole."""

    @property
    def clean(self) -> bool:
        bad = (self.failed_reads, self.wrong_bytes, self.acknowledged_lost, self.leaks)
        return self.reads > 0 and not any(bad) and not self.complaints

    def line(self) -> str:
        """The last line of a run: one JSON object."""
        record = {
            "minutes": round(self.minutes, 2),
            "seed": self.seed,
            "faults": self.faults.total(),
            "reads": self.reads,
            "failed_reads": self.failed_reads,
            "wrong_bytes": self.wrong_bytes,
            "acknowledged_lost": self.acknowledged_lost,
            "leaks": self.leaks,
        }
        return json.dumps(record)
