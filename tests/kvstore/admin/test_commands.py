from __future__ import annotations

import asyncio

import pytest

from kvstore.admin.cluster_access import ClusterAccess
from kvstore.admin.commands import evict_namespace, refused_by_all
from kvstore.errors import InvalidRequest, Unavailable


def test_what_every_node_refuses_is_said_once_and_what_one_of_them_refuses_is_not_hidden_in_it() -> None:
    wrong = "ttl_ms must be at least 1"
    assert str(refused_by_all([InvalidRequest(wrong), InvalidRequest(wrong)])) == wrong
    assert refused_by_all([InvalidRequest(wrong), InvalidRequest("another reason")]) is None
    assert refused_by_all([InvalidRequest(wrong), "an answer"]) is None
    assert refused_by_all([Unavailable("away"), Unavailable("away")]) is None
    assert refused_by_all([]) is None


def test_an_empty_namespace_is_refused_in_the_words_of_the_command() -> None:
    nowhere = ClusterAccess(redis_url="redis://127.0.0.1:1/0", gateway_url=None)
    with pytest.raises(InvalidRequest, match="--namespace is empty"):
        asyncio.run(evict_namespace(nowhere, ""))
