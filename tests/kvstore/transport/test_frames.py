"""The framing: what is packed is unpacked, and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.core.events.gets import AcquiredBlock
from kvstore.core.events.puts import CommitStatus, ReserveGrant, ReserveItem, ReserveStatus
from kvstore.core.extent import Extent, Tier
from kvstore.ids import BlockHash, BlockRef, Generation, KeySpace, LayoutFingerprint, LeaseId, Namespace, RungCode, StripeId, WriteToken
from kvstore.rpc.store_stub import Acquired, FoundCopy, Grant
from kvstore.transport.control_frames import (
    AcquireBody,
    ReleaseBody,
    ReserveBody,
    pack_acquired,
    pack_commit,
    pack_committed,
    pack_grants,
    unpack_acquired,
    unpack_commit,
    unpack_committed,
    unpack_grants,
)
from kvstore.transport.frames import (
    HEADER_BYTES,
    BadFrame,
    FrameKind,
    Header,
    ReadBody,
    WriteItem,
    pack_tokens,
    pack_write_body,
    unpack_tokens,
    unpack_write_body,
)
from kvstore.transport.ticket import NO_TICKET, TICKET_BYTES, Ticket, TicketOffice, proof_of, same_proof
from kvstore.units import Bytes, Nanos, milliseconds, seconds

SPACE = KeySpace(Namespace("acme/ünïcode"), LayoutFingerprint(b"L" * 32))
HASHES = tuple(BlockHash(bytes([number]) * 32) for number in range(3))
REFS = tuple(BlockRef(digest, BlockHash(b"p" * 32), StripeId(HASHES[0]), number) for number, digest in enumerate(HASHES))
TICKET = Ticket(seconds(5), b"s" * 32)
PLACE = Extent(Tier.HOST, 0, 4096, (1 << 32) - 1, Generation(1))
ACQUIRED = (AcquiredBlock((1 << 32) - 1, 1 << 63, Tier.HOST, PLACE), None, AcquiredBlock(9, 5, Tier.SSD, None))
COPIES = (FoundCopy(Bytes((1 << 32) - 1), 1 << 63, Tier.HOST, 4096), None, FoundCopy(Bytes(9), 5, Tier.SSD, None))
INT4 = RungCode(4)
GRANTS = (ReserveGrant(ReserveStatus.GRANTED, WriteToken(1 << 63), PLACE), ReserveGrant(ReserveStatus.NO_ROOM))

BODIES: list[tuple[bytes, Callable[[bytes], Any], Any]] = [
    (body.pack(), type(body).unpack, body)
    for body in (
        ReadBody(LeaseId(1 << 63), seconds(9), SPACE, HASHES),
        AcquireBody(SPACE, milliseconds(1500), REFS),
        AcquireBody(SPACE, None, (), as_sealed=True),
        ReleaseBody(LeaseId(7), SPACE, ()),
        ReleaseBody(LeaseId(7), SPACE, HASHES),
        ReserveBody(SPACE, tuple(ReserveItem(ref, 1 << 40, ttl) for ref in REFS for ttl in (None, Nanos(0), Nanos(5)))),
        ReserveBody(SPACE, (ReserveItem(REFS[0], 1, rung=RungCode((1 << 16) - 1)),)),
    )
] + [(pack_write_body(items), unpack_write_body, items) for items in ([WriteItem(WriteToken(1 << 63), 1 << 40, seconds(3))] * 2,)]
BODIES += [
    (pack_commit([(WriteToken(3), 1 << 63)]), unpack_commit, [(WriteToken(3), 1 << 63)]),
    (
        pack_acquired(LeaseId(7), seconds(10), TICKET.to_bytes(), ACQUIRED, {}),
        unpack_acquired,
        Acquired(LeaseId(7), seconds(10), COPIES, TICKET.to_bytes()),
    ),
    (
        pack_acquired(LeaseId(7), seconds(10), TICKET.to_bytes(), ACQUIRED, {2: INT4}),
        unpack_acquired,
        Acquired(LeaseId(7), seconds(10), (*COPIES[:2], COPIES[2]._replace(rung=INT4)), TICKET.to_bytes()),
    ),
    (
        pack_grants(GRANTS, ttl=seconds(30), tickets=(TICKET.to_bytes(), b"")),
        unpack_grants,
        [
            Grant(ReserveStatus.GRANTED, WriteToken(1 << 63), 4096, TICKET.to_bytes(), seconds(30)),
            Grant(ReserveStatus.NO_ROOM, WriteToken(0), 0, bytes(TICKET_BYTES), seconds(30)),
        ],
    ),
    (
        pack_grants(GRANTS[:1], ttl=seconds(30), tickets=()),
        unpack_grants,
        [Grant(ReserveStatus.GRANTED, WriteToken(1 << 63), 4096, b"", seconds(30))],
    ),
    (pack_committed([CommitStatus.STORED, CommitStatus.EXPIRED]), unpack_committed, [CommitStatus.STORED, CommitStatus.EXPIRED]),
    (pack_tokens([WriteToken(3), WriteToken(4)]), unpack_tokens, {WriteToken(3), WriteToken(4)}),
]


@pytest.mark.parametrize(("packed", "unpack", "meant"), BODIES)
def test_a_body_is_unpacked_as_it_was_packed(packed: bytes, unpack: Callable[[bytes], Any], meant: Any) -> None:
    assert unpack(packed) == meant


@pytest.mark.parametrize(("packed", "unpack", "meant"), BODIES)
def test_a_body_cut_short_or_with_more_behind_it_is_refused(packed: bytes, unpack: Callable[[bytes], Any], meant: Any) -> None:
    for end in range(len(packed)):
        try:
            unpack(packed[:end])
        except BadFrame:
            continue
        assert unpack in (unpack_tokens, unpack_committed), f"{end} of {len(packed)} bytes were taken for a whole body"
    with pytest.raises(BadFrame):
        unpack(packed + b"\0")


def test_random_bytes_are_refused_and_nothing_worse(seed: int) -> None:
    rng = random.Random(seed)
    unpackers = {unpack for _, unpack, _ in BODIES}
    for _ in range(3000):
        source = rng.choice(BODIES)[0]
        data = bytearray(source if rng.random() < 0.7 else rng.randbytes(rng.randrange(300)))
        for _ in range(rng.randrange(1, 4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        for unpack in unpackers:
            try:
                unpack(bytes(data))
            except BadFrame:
                pass


def test_a_header_with_any_flipped_bit_is_refused() -> None:
    header = Header(FrameKind.PAYLOAD, 7, 1 << 40, 3, 9)
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert Header.unpack(packed) == header
    for bit in range(HEADER_BYTES * 8):
        flipped = bytearray(packed)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadFrame):
            Header.unpack(flipped)


def test_a_ticket_survives_its_way_and_what_is_none_becomes_none() -> None:
    assert Ticket.from_bytes(TICKET.to_bytes()) == TICKET
    assert len(TICKET.to_bytes()) == TICKET_BYTES
    assert Ticket.from_bytes(b"") is NO_TICKET
    assert Ticket.from_bytes(b"x" * (TICKET_BYTES - 1)) is NO_TICKET


def test_a_proof_holds_for_its_tickets_nonce_and_words_alone() -> None:
    office, stranger = TicketOffice(secret=b"a" * 32), TicketOffice(secret=b"b" * 32)
    until = seconds(10)
    first = office.for_write(WriteToken(1), length=100, expires_at=until)
    second = office.for_write(WriteToken(2), length=100, expires_at=until)
    proof = proof_of([first, second], nonce=b"n", message=b"m")
    again = [office.for_write(WriteToken(number), length=100, expires_at=until) for number in (1, 2)]
    assert same_proof(proof, proof_of(again, nonce=b"n", message=b"m"))
    others = [
        proof_of([second, first], nonce=b"n", message=b"m"),
        proof_of([first], nonce=b"n", message=b"m"),
        proof_of([first, second], nonce=b"o", message=b"m"),
        proof_of([first, second], nonce=b"n", message=b"w"),
        proof_of([first, office.for_write(WriteToken(2), length=101, expires_at=until)], nonce=b"n", message=b"m"),
        proof_of([first, office.for_write(WriteToken(2), length=100, expires_at=Nanos(until + 1))], nonce=b"n", message=b"m"),
        proof_of([first, stranger.for_write(WriteToken(2), length=100, expires_at=until)], nonce=b"n", message=b"m"),
        proof_of([office.for_lease(LeaseId(1), expires_at=until)], nonce=b"n", message=b"m"),
        proof_of([NO_TICKET], nonce=b"n", message=b"m"),
    ]
    assert not any(same_proof(proof, other) for other in others)
