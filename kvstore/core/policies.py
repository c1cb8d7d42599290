"""The eviction policies by their names."""

from __future__ import annotations

from enum import StrEnum

from kvstore.core.eviction import EvictionPolicy, LruPolicy
from kvstore.core.s3fifo import S3FifoPolicy
from kvstore.core.two_hit import TwoHitPolicy


class PolicyName(StrEnum):
    LRU = "lru"
    S3FIFO = "s3fifo"
    ADAPTIVE = "adaptive"


_POLICIES: dict[PolicyName, type[LruPolicy] | type[S3FifoPolicy] | type[TwoHitPolicy]] = {
    PolicyName.LRU: LruPolicy,
    PolicyName.S3FIFO: S3FifoPolicy,
    PolicyName.ADAPTIVE: TwoHitPolicy,
}


def make_policy(name: PolicyName) -> EvictionPolicy:
    return _POLICIES[name]()
