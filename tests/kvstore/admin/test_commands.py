from __future__ import annotations

from kvstore.admin.commands import refused_by_all
from kvstore.errors import InvalidRequest, Unavailable


def test_what_every_node_refuses_is_said_once_and_what_one_of_them_refuses_is_not_hidden_in_it() -> None:
    wrong = "ttl_ms must be at least 1"
    assert str(refused_by_all([InvalidRequest(wrong), InvalidRequest(wrong)])) == wrong
    assert refused_by_all([InvalidRequest(wrong), InvalidRequest("another reason")]) is None
    assert refused_by_all([InvalidRequest(wrong), "an answer"]) is None
    assert refused_by_all([Unavailable("away"), Unavailable("away")]) is None
    assert refused_by_all([]) is None
