"""The client of the store: what engines use. No torch in here."""

from kvstore.client.answers import Acknowledge, BlockPut, PayloadMaker, PutOutcome, PutReport, ReadBlock
from kvstore.client.config import CircuitConfig, ClientConfig, HedgeConfig
from kvstore.client.prefix_lease import PrefixLease
from kvstore.client.store_client import StoreClient
from kvstore.ids import KeySpace

__all__ = [
    "Acknowledge",
    "BlockPut",
    "CircuitConfig",
    "ClientConfig",
    "HedgeConfig",
    "KeySpace",
    "PayloadMaker",
    "PrefixLease",
    "PutOutcome",
    "PutReport",
    "ReadBlock",
    "StoreClient",
]
