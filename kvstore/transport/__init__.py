"""The data plane: how payload bytes travel. The client chooses the node, this moves the bytes."""

from kvstore.transport.choice import ALL_KINDS, AutoTransport, Choice, TransportKind
from kvstore.transport.grpc_transport import GrpcTransport
from kvstore.transport.payload_transport import (
    Arrived,
    Ended,
    MappedArena,
    PayloadRead,
    PayloadSlot,
    PayloadTransport,
    PayloadWrite,
    Peer,
    ReadOutcome,
)
from kvstore.transport.ticket import NO_TICKET, Ticket

__all__ = [
    "ALL_KINDS",
    "NO_TICKET",
    "Arrived",
    "AutoTransport",
    "Choice",
    "Ended",
    "GrpcTransport",
    "MappedArena",
    "PayloadRead",
    "PayloadSlot",
    "PayloadTransport",
    "PayloadWrite",
    "Peer",
    "ReadOutcome",
    "Ticket",
    "TransportKind",
]
