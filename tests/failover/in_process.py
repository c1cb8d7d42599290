"""Kills at every token index, all in one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from session_kitchen import GREEDY, SAMPLED, opened_kitchen
from verdict import IN_PROCESS, Tally

ANSWER = 24
PROMPTS = (11, 27, 61)
"""Tokens: less than two blocks with the answer's first ones, a few, many."""
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}
DTYPES = ("float32", "bfloat16")


async def run_in_process(tally: Tally, model: Path, *, kills: int, seed: int, tell: Callable[[int], None]) -> None:
    """At least `kills` kills. Each index of each answer alone, every kill in a namespace of its own so that nothing of an earlier one
    helps; then all indices of one answer, one failover after the other."""
    draw = random.Random(seed)
    rounds = 0
    while tally.kills < kills:
        async with opened_kitchen(model, dtype=DTYPES[rounds % len(DTYPES)]) as kitchen:
            rounds += 1
            for tokens in PROMPTS:
                prompt = [draw.randrange(3, 500) for _ in range(tokens)]
                for name, sampling in SAMPLINGS.items():
                    title = f"{name}, prompt of {tokens}, round {rounds}"
                    whole = await kitchen.stream(prompt, sampling, f"{title} whole", tokens=ANSWER)
                    for cut in [*({position} for position in range(ANSWER)), set(range(ANSWER))]:
                        where = f"{title}, killed at {min(cut)}" if len(cut) == 1 else f"{title}, killed at every token"
                        before = kitchen.killer.kills
                        got = await kitchen.stream(prompt, sampling, where, tokens=ANSWER, kill_at=cut)
                        tally.kills += kitchen.killer.kills - before
                        tally.failovers += kitchen.killer.kills - before
                        tally.judge(where, expected=whole.tokens, got=got.tokens)
                        tally.gap(IN_PROCESS, got.longest_gap_ms)
                        tell(tally.kills)
                        if tally.kills >= kills:
                            return
