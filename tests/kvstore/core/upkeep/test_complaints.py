from __future__ import annotations

import dataclasses
import logging

import pytest

from kvstore.core.upkeep.complaints import Complaints
from kvstore.core.view import Member, MemberState, Role
from kvstore.errors import Unavailable
from kvstore.ids import BootId, NodeId
from kvstore.units import Nanos, seconds


def test_a_peer_that_is_away_is_complained_of_once_for_each_state_and_then_every_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [Nanos(0)]
    complaints = Complaints(logging.getLogger("complaints"), lambda: now[0])
    member = Member(node_id=NodeId("n1"), boot_id=BootId(bytes(16)), role=Role.STORE, address="h:1")

    def complain(about: Member, times: int) -> list[str]:
        caplog.clear()
        for _ in range(times):
            complaints.about(about, "does not say what it holds", Unavailable("no answer"))
        return [record.getMessage() for record in caplog.records]

    assert complain(member, 100) == ["n1 does not say what it holds: no answer"]
    now[0] = seconds(59)
    assert complain(member, 100) == []
    (again,) = complain(dataclasses.replace(member, state=MemberState.SUSPECT), 100)
    assert "199 more" in again
    now[0] = seconds(120)
    assert len(complain(dataclasses.replace(member, state=MemberState.SUSPECT), 100)) == 1
    assert len(complain(dataclasses.replace(member, node_id=NodeId("n2")), 100)) == 1
