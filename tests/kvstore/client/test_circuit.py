from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.circuit import TRANSITIONS, Circuit, CircuitState
from kvstore.client.config import CircuitConfig
from kvstore.errors import ConfigError
from kvstore.ids import BootId
from kvstore.units import Nanos, milliseconds

CONFIG = CircuitConfig(failures_to_open=3, first_probe_after=milliseconds(100), longest_probe_after=milliseconds(400))
BOOT = BootId(b"a" * 16)


def circuit() -> Circuit:
    return Circuit(CONFIG, BOOT)


def opened(at: Nanos = Nanos(0)) -> Circuit:
    one = circuit()
    assert one.failed(at, deadline_passed=True, jitter=0.5)
    return one


def test_a_passed_deadline_opens_at_once_and_cheap_failures_at_the_limit() -> None:
    assert not opened().usable
    one = circuit()
    assert [one.failed(Nanos(0), deadline_passed=False, jitter=0) for _ in range(3)] == [False, False, True]
    assert not one.usable


def test_a_success_in_between_starts_the_count_again() -> None:
    one = circuit()
    for _ in range(10):
        one.failed(Nanos(0), deadline_passed=False, jitter=0)
        one.failed(Nanos(0), deadline_passed=False, jitter=0)
        one.succeeded()
    assert one.usable


def test_the_pause_doubles_up_to_its_bound_with_jitter_around_it() -> None:
    one = opened()
    pauses = []
    now = Nanos(0)
    for _ in range(5):
        pauses.append(one.probe_at - now)
        now = one.probe_at
        one.start_probe()
        one.probe_failed(now, jitter=0.5)
    assert pauses == [milliseconds(value) for value in (100, 200, 400, 400, 400)]
    early, late = circuit(), circuit()
    early.failed(Nanos(0), deadline_passed=True, jitter=0.0)
    late.failed(Nanos(0), deadline_passed=True, jitter=1.0)
    assert (early.probe_at, late.probe_at) == (milliseconds(75), milliseconds(125))


def test_a_good_probe_closes_it_and_the_next_opening_starts_with_the_first_pause() -> None:
    one = opened()
    one.start_probe()
    one.probe_failed(one.probe_at, jitter=0.5)
    one.start_probe()
    one.probe_succeeded()
    assert one.usable
    one.failed(Nanos(0), deadline_passed=True, jitter=0.5)
    assert one.probe_at == milliseconds(100)


def test_another_boot_id_closes_it_and_the_same_one_does_not() -> None:
    one = opened()
    one.seen(BOOT)
    assert not one.usable
    one.seen(BootId(b"b" * 16))
    assert one.usable


def test_a_late_answer_to_a_call_from_before_does_not_close_it() -> None:
    one = opened()
    one.succeeded()
    assert not one.usable
    one.start_probe()
    one.succeeded()
    assert not one.usable


def test_failures_of_calls_that_were_on_their_way_do_not_push_the_probe_back() -> None:
    one = opened()
    at = one.probe_at
    assert not one.failed(at, deadline_passed=True, jitter=0.9)
    assert one.probe_at == at


@given(st.lists(st.sampled_from(["ok", "error", "timeout", "probe", "probe_succeeded", "probe_failed", "restart"]), max_size=40))
def test_no_order_of_events_leaves_the_table_or_loses_the_probe(events: list[str]) -> None:
    one, now, boots = circuit(), Nanos(0), 0
    for event in events:
        now = Nanos(now + 1)
        match event:
            case "ok":
                before = one.state
                one.succeeded()
                assert one.state is before
            case "error" | "timeout":
                one.failed(now, deadline_passed=event == "timeout", jitter=0.5)
            case "probe" if one.state is CircuitState.OPEN:
                one.start_probe()
            case "probe_succeeded":
                one.probe_succeeded()
                assert one.usable
            case "probe_failed":
                one.probe_failed(now, jitter=0.5)
            case "restart":
                boots += 1
                one.seen(BootId(boots.to_bytes(16, "little")))
        if one.state is CircuitState.OPEN:
            assert one.probe_at > 0


def test_every_state_can_be_reached_and_left() -> None:
    assert {state for state, _ in TRANSITIONS} == set(TRANSITIONS.values()) == set(CircuitState)


def test_a_configuration_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError):
        CircuitConfig(failures_to_open=0)
    with pytest.raises(ConfigError):
        CircuitConfig(first_probe_after=milliseconds(10), longest_probe_after=milliseconds(5))
