"""One node's part of a simulated client's put: what kvstore/client/put.py does in a task, step for step."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sim.messages import Failed, WriteBytes
from sim.timeline import Bell, Reply, Steps

from kvstore.client.batches import batches
from kvstore.client.put_progress import BlockProgress
from kvstore.core.events.puts import (
    AnswerCommit,
    AnswerReserve,
    CommitItem,
    CommitRequested,
    CommitStatus,
    ReserveItem,
    ReserveRequested,
    ReserveStatus,
)
from kvstore.ids import BlockHash, KeySpace, NodeId, RequestId, WriteToken
from kvstore.units import Bytes, Nanos

if TYPE_CHECKING:
    from sim.client import SimulatedClient

_NO_REQUEST = RequestId(0)


class NodePut:
    """One node's part of one put: batches of reserve, bytes, commit."""

    def __init__(
        self, client: SimulatedClient, node_id: NodeId, key_space: KeySpace, changed: Bell, holders: dict[BlockHash, set[NodeId]]
    ) -> None:
        self._client = client
        self._node_id = node_id
        self._key_space = key_space
        self._changed = changed
        self._holders = holders
        self._open: dict[BlockProgress, None] = {}

    def run(self, blocks: Sequence[BlockProgress]) -> Steps:
        """Settles every block, whatever happens."""
        self._open = dict.fromkeys(blocks)
        until = self._client.now + self._client.config.put_timeout
        reason = "cancelled"
        for batch in self._batches(blocks):
            broken = yield from self._put_batch(batch, until)
            if broken is not None:
                reason = broken
                break
        for block in list(self._open):
            self._fail(block, reason)
        self._changed.ring()

    def _batches(self, blocks: Sequence[BlockProgress]) -> Iterator[list[BlockProgress]]:
        sized = ((block, len(block.payload)) for block in blocks)
        return batches(sized, most_items=self._client.config.batch_blocks, most_bytes=Bytes(self._client.config.batch_bytes))

    def _put_batch(self, batch: Sequence[BlockProgress], until: int) -> Generator[Reply | int, Any, str | None]:
        """Why the put at this node ends here; None: it goes on."""
        todo = list(batch)
        commits = dict.fromkeys(batch, 0)
        for attempt in range(self._client.config.pending_attempts):
            if attempt:
                yield self._client.config.pending_wait
            if self._client.now >= until:
                return "timeout"
            items = tuple(ReserveItem(block.ref, len(block.payload)) for block in todo)
            reserved = yield from self._call(ReserveRequested(request_id=_NO_REQUEST, key_space=self._key_space, items=items))
            if isinstance(reserved, Failed):
                return reserved.reason
            assert isinstance(reserved, AnswerReserve)
            granted: dict[BlockProgress, WriteToken] = {}
            again: list[BlockProgress] = []
            for block, grant in zip(todo, reserved.grants, strict=True):
                match grant.status:
                    case ReserveStatus.GRANTED:
                        granted[block] = grant.write_token
                    case ReserveStatus.PENDING:
                        again.append(block)
                    case ReserveStatus.EXISTS:
                        self._hold(block, existed=True)
                    case _:
                        self._fail(block, grant.status.name.lower())
            statuses = yield from self._send(granted)
            if isinstance(statuses, Failed):
                return statuses.reason
            for block, status in statuses.items():
                commits[block] += 1
                if status.is_stored:
                    self._hold(block, existed=False)
                elif commits[block] < 2:
                    again.append(block)
                else:
                    self._fail(block, status.name.lower())
            self._changed.ring()
            todo = again
            if not todo:
                return None
        for block in todo:
            self._fail(block, "pending")
        return None

    def _send(self, granted: dict[BlockProgress, WriteToken]) -> Generator[Reply | int, Any, dict[BlockProgress, CommitStatus] | Failed]:
        if not granted:
            return {}
        writes = tuple((token, block.payload) for block, token in granted.items())
        refused = yield from self._call(WriteBytes(writes), timeout=self._client.config.write_timeout)
        if isinstance(refused, Failed):
            return refused
        statuses = {block: CommitStatus.EXPIRED for block, token in granted.items() if token in refused}
        taken = {block: token for block, token in granted.items() if token not in refused}
        if taken:
            items = tuple(CommitItem(token, block.checksum, 0) for block, token in taken.items())
            committed = yield from self._call(CommitRequested(request_id=_NO_REQUEST, items=items))
            if isinstance(committed, Failed):
                return committed
            assert isinstance(committed, AnswerCommit)
            statuses |= dict(zip(taken, committed.statuses, strict=True))
        return statuses

    def _call(self, message: Any, *, timeout: Nanos | None = None) -> Generator[Reply | int, Any, Any]:
        return self._client.call(self._node_id, message, timeout=self._client.config.rpc_timeout if timeout is None else timeout)

    def _hold(self, block: BlockProgress, *, existed: bool) -> None:
        del self._open[block]
        self._holders[block.ref.hash].add(self._node_id)
        block.outstanding -= 1
        if existed:
            block.existed += 1
        else:
            block.stored += 1

    def _fail(self, block: BlockProgress, reason: str) -> None:
        del self._open[block]
        block.outstanding -= 1
        block.reasons.append(reason)
