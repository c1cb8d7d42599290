"""Whose silence it is: decided on a fed clock."""

from __future__ import annotations

import random

import pytest

from decode_node.gateway.silence import LOOK_EVERY, Pace, Silence
from kvstore.units import Nanos, milliseconds

LIMIT = milliseconds(900)


def looked(silence: Silence, *, until: Nanos, lateness: Nanos = milliseconds(1)) -> Nanos | None:
    """When a node that sends nothing is given up by one who looks when it is due; None: not before `until`."""
    now = Nanos(0)
    while now < until:
        now = Nanos(now + silence.next_look + lateness)
        if silence.look(now):
            return now
    return None


def test_a_frozen_node_is_given_up_as_soon_as_the_limit_is_over() -> None:
    at = looked(Silence(LIMIT, now=Nanos(0)), until=milliseconds(5_000))
    assert at is not None
    assert LIMIT <= at <= LIMIT + milliseconds(10)


def test_a_limit_below_the_period_is_kept_too() -> None:
    at = looked(Silence(milliseconds(30), now=Nanos(0)), until=milliseconds(5_000))
    assert at == milliseconds(31)


@pytest.mark.parametrize("asleep_ms", [250, 700, 5_000, 60_000])
@pytest.mark.parametrize("from_ms", [0, 450, 800])
def test_time_in_which_this_process_did_not_run_is_not_the_nodes_silence(asleep_ms: int, from_ms: int) -> None:
    silence, now = Silence(LIMIT, now=Nanos(0)), Nanos(0)
    while now < milliseconds(from_ms):
        now = Nanos(now + silence.next_look)
        assert not silence.look(now)
    now = Nanos(now + milliseconds(asleep_ms))
    assert not silence.look(now), "what the node sent meanwhile has not been read yet"
    # From here on it is awake, and the node sends nothing: it is given up after what is left of the limit.
    while not silence.look(now := Nanos(now + max(silence.next_look, 1))):
        pass
    assert now - milliseconds(asleep_ms) >= LIMIT - LOOK_EVERY


def test_one_who_is_always_late_gives_up_in_the_end() -> None:
    at = looked(Silence(LIMIT, now=Nanos(0)), until=milliseconds(60_000), lateness=milliseconds(500))
    assert at is not None
    assert at > 2 * LIMIT


def test_however_the_looks_come_at_most_the_limit_of_waking_time_passes(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        silence, now, awake = Silence(LIMIT, now=Nanos(0)), Nanos(0), 0
        while True:
            late = milliseconds(draw.choice((0, 0, 0, 5, 30, 99, 400, 3_000)))
            step = Nanos(silence.next_look + late)
            now = Nanos(now + step)
            if silence.look(now):
                break
            awake += step if step <= 2 * LOOK_EVERY else LOOK_EVERY
            assert awake < 2 * LIMIT, f"seed {seed}"
        assert now >= LIMIT


def test_a_node_is_held_against_its_own_pace() -> None:
    pace = Pace()
    assert pace.limit(LIMIT) == LIMIT
    for _ in range(50):
        pace.note(milliseconds(200))  # as a healthy one does
    assert pace.limit(LIMIT) == LIMIT
    pace.note(milliseconds(700))
    assert pace.limit(LIMIT) == milliseconds(2_100)
    pace.note(milliseconds(8_000))
    assert pace.limit(LIMIT) == 5 * LIMIT, "and no longer"
    for _ in range(20):
        pace.note(milliseconds(20))
    assert pace.limit(LIMIT) == LIMIT, "tokens at their usual pace: forgotten"
