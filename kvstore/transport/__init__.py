"""The data plane: how payload bytes travel. No decisions; the client chooses, this moves."""

from kvstore.transport.grpc_transport import GrpcTransport
from kvstore.transport.payload_transport import PayloadRead, PayloadSlot, PayloadTransport, PayloadWrite, Peer, ReadOutcome

__all__ = ["GrpcTransport", "PayloadRead", "PayloadSlot", "PayloadTransport", "PayloadWrite", "Peer", "ReadOutcome"]
