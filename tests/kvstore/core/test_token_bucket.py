from __future__ import annotations

from kvstore.core.token_bucket import TokenBucket
from kvstore.units import Bytes, Nanos, seconds, to_seconds


def test_over_any_stretch_no_more_goes_than_rate_and_burst_allow() -> None:
    now = Nanos(0)
    bucket = TokenBucket(rate=Bytes(1000), burst=Bytes(500), now=now)
    sent = 0
    while now < seconds(10):
        now = Nanos(now + bucket.wait(now))
        bucket.spend(300, now)
        sent += 300
    assert 10_000 - 300 <= sent <= 10_000 + 500 + 300
    assert 0 < to_seconds(bucket.wait(now)) <= 0.31
    assert bucket.wait(Nanos(now + seconds(60))) == 0
