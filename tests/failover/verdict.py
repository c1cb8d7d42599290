"""What a killed stream gave, held against the undisturbed one. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Counts over all streams of a run; `gaps_ms` are what a client waited for the next token when a node went, by kind of blow."""

    kills: int = 0
    streams: int = 0
    failovers: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    gaps_ms: dict[str, list[float]] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def judge(self, name: str, *, expected: Sequence[int], got: Sequence[int], broken: str | None = None) -> None:
        """One stream that has ended. `broken`: how it ended, when that was not in good order."""
        self.streams += 1
        same = next((at for at, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]), min(len(expected), len(got)))
        if same == len(expected) == len(got) and broken is None:
            return
        if len(got) > len(expected):
            self.doubled += len(got) - len(expected)
        elif same == len(got):
            self.lost += max(1, len(expected) - len(got))
        elif list(got[same : same + 4]) == list(expected[same - 1 : same + 3]):
            self.doubled += 1
        else:
            self.wrong += sum(a != b for a, b in zip(expected, got, strict=False))
        self.complaints.append(f"{name}: differs at token {same} of {len(expected)}, has {len(got)}; {broken or 'ended in good order'}")

    def gap(self, kind: str, milliseconds: float) -> None:
        self.gaps_ms.setdefault(kind, []).append(milliseconds)

    @property
    def clean(self) -> bool:
        return self.kills > 0 and not (self.lost or self.doubled or self.wrong)

    def line(self) -> str:
        """The last line of a run: one JSON object. The gaps are those of real processes where there were any."""
        real = [gap for kind, gaps in self.gaps_ms.items() if kind != IN_PROCESS for gap in gaps]
        gaps = sorted(real or self.gaps_ms.get(IN_PROCESS, []))
        record = {
            "kills": self.kills,
            "lost": self.lost,
            "doubled": self.doubled,
            "wrong": self.wrong,
            "gap_ms_p50": percentile(gaps, 50),
            "gap_ms_p99": percentile(gaps, 99),
        }
        return json.dumps(record)


IN_PROCESS = "in process"


def percentile(ordered: Sequence[float], share: int) -> float | None:
    """The nearest rank; None of nothing."""
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, -(-len(ordered) * share // 100) - 1)], 1)
