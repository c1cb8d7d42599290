"""Identities. Each is a type of its own, so that two of them cannot be swapped unnoticed.

What can be reused (a node id, an extent, a reservation) is told apart by a boot id, a generation or a write token.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

Namespace = NewType("Namespace", str)
"""Isolation domain of one tenant; part of the root hash, bound to the authenticated caller."""

LayoutFingerprint = NewType("LayoutFingerprint", bytes)
"""32 bytes: SHA-256 over everything that decides what the numbers of a block mean (see core/layout.py)."""

BlockHash = NewType("BlockHash", bytes)
"""32 bytes: the chain hash of one block. Equal hash means equal whole prefix."""

StripeId = NewType("StripeId", bytes)
"""32 bytes: the chain hash of the first block of a stripe; the unit of placement."""

NodeId = NewType("NodeId", str)
"""Name of a member, stable over restarts."""

BootId = NewType("BootId", bytes)
"""16 random bytes of one process start; tells a restarted node from the old one."""

Epoch = NewType("Epoch", int)
"""Number of a view; only grows."""

LeaseId = NewType("LeaseId", int)
"""A reader's right, until a time, that copies stay readable. Unique in one boot of one node."""

WriteToken = NewType("WriteToken", int)
"""Authorizes the bytes and the commit of one reservation. Never handed out twice in one boot."""

Generation = NewType("Generation", int)
"""Tells a reused extent from the old one; only grows in one arena."""

RungCode = NewType("RungCode", int)
"""How good the numbers of a copy are: AS_SEALED, or by which rung they were re-coded (codec/step_down.py), below 65,536. The store compares
them and does not interpret them."""

AS_SEALED = RungCode(0)
"""The numbers that the block's layout names: what a sequence that computed the block attends to."""

BEHIND_RECODED = RungCode(1)
"""Of the layout's precision, but computed behind blocks that were read re-coded: other numbers than those of a sequence that had them as
sealed."""

RequestId = NewType("RequestId", int)
"""Pairs an event with its answer inside one node."""

OperationId = NewType("OperationId", int)
"""Pairs an I/O instruction with its outcome inside one node. Never handed out twice in one boot."""

HASH_BYTES = 32
BOOT_ID_BYTES = 16


class KeySpace(NamedTuple):
    """The part of a block key that all blocks of a request share."""

    namespace: Namespace
    layout: LayoutFingerprint


class BlockRef(NamedTuple):
    """One block of a chain as the store needs to know it: its hash and where it stands in the chain."""

    hash: BlockHash
    parent: BlockHash
    """Chain hash of the block before it; the root hash for block 0."""
    stripe: StripeId
    index: int  # type: ignore[assignment]  # a field; nobody searches a BlockRef with tuple.index
    """Position in the chain, from 0."""
