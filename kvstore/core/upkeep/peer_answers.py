"""What a store answers to the upkeep of the others: how far it is, what it holds, how its copies compare."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.catalog import BUCKETS
from kvstore.core.events.gets import AnswerProbe, ProbeRequested
from kvstore.core.events.questions import AnswerDescribe, DescribeRequested
from kvstore.core.events.verification import AnswerVerify, CopyVerdict, VerifyRequested
from kvstore.core.upkeep.anti_entropy import bucket_digests, shared_stripes
from kvstore.core.upkeep.repairer import Repairer
from kvstore.core.upkeep.surroundings import PeerProgress
from kvstore.core.view import View
from kvstore.errors import InvalidRequest, StaleView
from kvstore.ids import BlockHash, Epoch, KeySpace, NodeId, StripeId
from kvstore.units import Nanos


class PeerAnswers:
    def __init__(self, repairer: Repairer) -> None:
        self._repairer = repairer
        self._surroundings = repairer.surroundings

    def progress(self) -> PeerProgress:
        return PeerProgress(self._repairer.settled_epoch, self._repairer.catalog.blocks)

    async def holds(self, key_space: KeySpace, hashes: Sequence[BlockHash], *, verify: bool, epoch: Epoch) -> list[bool]:
        """In the order asked. `verify`: its fastest copy was read just now, and is what was stored. Raises StaleView when the asker is
        ahead: by an older view this node may own none of it, and give up what it has said to hold."""
        if self._repairer.view.epoch < epoch:
            raise self._other_view(epoch)
        if verify:
            return [await self._reads_back(key_space, digest) for digest in hashes]
        probe = ProbeRequested(request_id=self._surroundings.next_request_id(), key_space=key_space, hashes=tuple(hashes))
        return list((await self._surroundings.ask(probe, AnswerProbe)).present)

    async def compare_buckets(self, node_id: NodeId, epoch: Epoch, first_bucket: int, digests: Sequence[int]) -> dict[int, int]:
        """Buckets that differ -> the digest here. Raises StaleView, InvalidRequest."""
        view = self._same_view(epoch)
        if first_bucket + len(digests) > BUCKETS:
            raise InvalidRequest(f"there are {BUCKETS} buckets: {first_bucket} + {len(digests)}")
        mine = await bucket_digests(self._repairer, view, node_id, first_bucket, len(digests))
        return {first_bucket + number: here for number, (here, there) in enumerate(zip(mine, digests, strict=True)) if here != there}

    async def list_stripes(self, node_id: NodeId, epoch: Epoch, bucket: int) -> dict[StripeId, int]:
        """The stripes of a bucket that both own -> which of their blocks are here. Raises StaleView, InvalidRequest."""
        view = self._same_view(epoch)
        if bucket >= BUCKETS:
            raise InvalidRequest(f"there are {BUCKETS} buckets: {bucket}")
        return {stripe.stripe: stripe.digest for stripe in await shared_stripes(self._repairer, view, node_id, bucket)}

    def _same_view(self, epoch: Epoch) -> View:
        view = self._repairer.view
        if view.epoch != epoch:
            raise self._other_view(epoch)
        return view

    def _other_view(self, epoch: Epoch) -> StaleView:
        return StaleView(f"this node knows epoch {self._repairer.view.epoch}, the question is about {epoch}; ask again in a moment")

    async def _reads_back(self, key_space: KeySpace, digest: BlockHash) -> bool:
        own = self._surroundings
        describe = DescribeRequested(request_id=own.next_request_id(), key_space=key_space, hashes=(digest,))
        owned = (await own.ask(describe, AnswerDescribe)).blocks[0]
        if owned is None or not owned.tiers:
            return False
        verify = VerifyRequested(request_id=own.next_request_id(), key_space=key_space, hash=digest, tier=owned.tiers[0])
        good = (await own.ask(verify, AnswerVerify)).verdict is CopyVerdict.GOOD
        await own.pause(Nanos(0))
        return good
