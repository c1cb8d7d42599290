from kvpb.v1 import store_pb2 as _store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockEventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_EVENT_UNSPECIFIED: _ClassVar[BlockEventKind]
    BLOCK_EVENT_HELD: _ClassVar[BlockEventKind]
    BLOCK_EVENT_SNAPSHOT: _ClassVar[BlockEventKind]
    BLOCK_EVENT_STORED: _ClassVar[BlockEventKind]
    BLOCK_EVENT_EVICTED: _ClassVar[BlockEventKind]
    BLOCK_EVENT_GAP: _ClassVar[BlockEventKind]
BLOCK_EVENT_UNSPECIFIED: BlockEventKind
BLOCK_EVENT_HELD: BlockEventKind
BLOCK_EVENT_SNAPSHOT: BlockEventKind
BLOCK_EVENT_STORED: BlockEventKind
BLOCK_EVENT_EVICTED: BlockEventKind
BLOCK_EVENT_GAP: BlockEventKind

class PinRequest(_message.Message):
    __slots__ = ("key_space", "hashes", "hard", "ttl_ms")
    KEY_SPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HARD_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    key_space: _store_pb2.KeySpace
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    hard: bool
    ttl_ms: int
    def __init__(self, key_space: _Optional[_Union[_store_pb2.KeySpace, _Mapping]] = ..., hashes: _Optional[_Iterable[bytes]] = ..., hard: _Optional[bool] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pinned_blocks", "absent_blocks", "refused_blocks", "lasts")
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LASTS_FIELD_NUMBER: _ClassVar[int]
    pinned_blocks: int
    absent_blocks: int
    refused_blocks: int
    lasts: bool
    def __init__(self, pinned_blocks: _Optional[int] = ..., absent_blocks: _Optional[int] = ..., refused_blocks: _Optional[int] = ..., lasts: _Optional[bool] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("key_space", "hashes")
    KEY_SPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    key_space: _store_pb2.KeySpace
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, key_space: _Optional[_Union[_store_pb2.KeySpace, _Mapping]] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("unpinned_blocks",)
    UNPINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    unpinned_blocks: int
    def __init__(self, unpinned_blocks: _Optional[int] = ...) -> None: ...

class QuotaRequest(_message.Message):
    __slots__ = ("namespace", "change", "limit_bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    change: bool
    limit_bytes: int
    def __init__(self, namespace: _Optional[str] = ..., change: _Optional[bool] = ..., limit_bytes: _Optional[int] = ...) -> None: ...

class QuotaResponse(_message.Message):
    __slots__ = ("used_bytes", "limit_bytes", "lasts")
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LASTS_FIELD_NUMBER: _ClassVar[int]
    used_bytes: int
    limit_bytes: int
    lasts: bool
    def __init__(self, used_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., lasts: _Optional[bool] = ...) -> None: ...

class Departure(_message.Message):
    __slots__ = ("reason", "ago_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGO_MS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    ago_ms: int
    def __init__(self, reason: _Optional[str] = ..., ago_ms: _Optional[int] = ...) -> None: ...

class RecallResponse(_message.Message):
    __slots__ = ("departures", "key_spaces", "forgotten")
    DEPARTURES_FIELD_NUMBER: _ClassVar[int]
    KEY_SPACES_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    departures: _containers.RepeatedCompositeFieldContainer[Departure]
    key_spaces: _containers.RepeatedCompositeFieldContainer[_store_pb2.KeySpace]
    forgotten: int
    def __init__(self, departures: _Optional[_Iterable[_Union[Departure, _Mapping]]] = ..., key_spaces: _Optional[_Iterable[_Union[_store_pb2.KeySpace, _Mapping]]] = ..., forgotten: _Optional[int] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("boot_id", "after")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    after: int
    def __init__(self, boot_id: _Optional[bytes] = ..., after: _Optional[int] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("kind", "node_id", "boot_id", "epoch", "sequence", "key_space", "block", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KEY_SPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: BlockEventKind
    node_id: str
    boot_id: bytes
    epoch: int
    sequence: int
    key_space: _store_pb2.KeySpace
    block: _store_pb2.BlockRef
    reason: str
    def __init__(self, kind: _Optional[_Union[BlockEventKind, str]] = ..., node_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., key_space: _Optional[_Union[_store_pb2.KeySpace, _Mapping]] = ..., block: _Optional[_Union[_store_pb2.BlockRef, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainStoreRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainStoreResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RebalanceRequest(_message.Message):
    __slots__ = ("dry_run",)
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    def __init__(self, dry_run: _Optional[bool] = ...) -> None: ...

class Moves(_message.Message):
    __slots__ = ("node_id", "stripes", "blocks", "bytes")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STRIPES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    stripes: int
    blocks: int
    bytes: int
    def __init__(self, node_id: _Optional[str] = ..., stripes: _Optional[int] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class RebalanceResponse(_message.Message):
    __slots__ = ("moves", "surplus_blocks", "surplus_bytes")
    MOVES_FIELD_NUMBER: _ClassVar[int]
    SURPLUS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SURPLUS_BYTES_FIELD_NUMBER: _ClassVar[int]
    moves: _containers.RepeatedCompositeFieldContainer[Moves]
    surplus_blocks: int
    surplus_bytes: int
    def __init__(self, moves: _Optional[_Iterable[_Union[Moves, _Mapping]]] = ..., surplus_blocks: _Optional[int] = ..., surplus_bytes: _Optional[int] = ...) -> None: ...

class RepairStatus(_message.Message):
    __slots__ = ("settled_epoch", "waiting_stripes", "endangered_stripes", "waiting_blocks", "waiting_bytes", "sent_blocks", "sent_bytes", "refused_blocks", "failed_blocks", "bytes_per_s", "eta_ms", "found_blocks", "dropped_blocks")
    SETTLED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WAITING_STRIPES_FIELD_NUMBER: _ClassVar[int]
    ENDANGERED_STRIPES_FIELD_NUMBER: _ClassVar[int]
    WAITING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ETA_MS_FIELD_NUMBER: _ClassVar[int]
    FOUND_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    settled_epoch: int
    waiting_stripes: int
    endangered_stripes: int
    waiting_blocks: int
    waiting_bytes: int
    sent_blocks: int
    sent_bytes: int
    refused_blocks: int
    failed_blocks: int
    bytes_per_s: int
    eta_ms: int
    found_blocks: int
    dropped_blocks: int
    def __init__(self, settled_epoch: _Optional[int] = ..., waiting_stripes: _Optional[int] = ..., endangered_stripes: _Optional[int] = ..., waiting_blocks: _Optional[int] = ..., waiting_bytes: _Optional[int] = ..., sent_blocks: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., refused_blocks: _Optional[int] = ..., failed_blocks: _Optional[int] = ..., bytes_per_s: _Optional[int] = ..., eta_ms: _Optional[int] = ..., found_blocks: _Optional[int] = ..., dropped_blocks: _Optional[int] = ...) -> None: ...

class DrainStatus(_message.Message):
    __slots__ = ("safe_to_stop", "blocks", "remaining_blocks", "remaining_bytes", "no_room_blocks")
    SAFE_TO_STOP_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_BYTES_FIELD_NUMBER: _ClassVar[int]
    NO_ROOM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    safe_to_stop: bool
    blocks: int
    remaining_blocks: int
    remaining_bytes: int
    no_room_blocks: int
    def __init__(self, safe_to_stop: _Optional[bool] = ..., blocks: _Optional[int] = ..., remaining_blocks: _Optional[int] = ..., remaining_bytes: _Optional[int] = ..., no_room_blocks: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "used_bytes", "copies")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    tier: _store_pb2.Tier
    capacity_bytes: int
    used_bytes: int
    copies: int
    def __init__(self, tier: _Optional[_Union[_store_pb2.Tier, str]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., copies: _Optional[int] = ...) -> None: ...

class StagingStatus(_message.Message):
    __slots__ = ("capacity_bytes", "used_bytes")
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    capacity_bytes: int
    used_bytes: int
    def __init__(self, capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("node_id", "boot_id", "epoch", "state", "uptime_ms", "tiers", "blocks", "leases", "reservations", "counters", "cpu_ns", "data_connections", "repair", "drain", "operations", "staging")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DataConnectionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    CPU_NS_FIELD_NUMBER: _ClassVar[int]
    DATA_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    boot_id: bytes
    epoch: int
    state: str
    uptime_ms: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    blocks: int
    leases: int
    reservations: int
    counters: _containers.ScalarMap[str, int]
    cpu_ns: int
    data_connections: _containers.ScalarMap[str, int]
    repair: RepairStatus
    drain: DrainStatus
    operations: int
    staging: StagingStatus
    def __init__(self, node_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., state: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., blocks: _Optional[int] = ..., leases: _Optional[int] = ..., reservations: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., cpu_ns: _Optional[int] = ..., data_connections: _Optional[_Mapping[str, int]] = ..., repair: _Optional[_Union[RepairStatus, _Mapping]] = ..., drain: _Optional[_Union[DrainStatus, _Mapping]] = ..., operations: _Optional[int] = ..., staging: _Optional[_Union[StagingStatus, _Mapping]] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("key_space", "blocks")
    KEY_SPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    key_space: _store_pb2.KeySpace
    blocks: _containers.RepeatedCompositeFieldContainer[_store_pb2.BlockRef]
    def __init__(self, key_space: _Optional[_Union[_store_pb2.KeySpace, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[_store_pb2.BlockRef, _Mapping]]] = ...) -> None: ...

class BlockLocation(_message.Message):
    __slots__ = ("tiers", "payload_bytes", "leases", "rungs", "copy_bytes")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RUNGS_FIELD_NUMBER: _ClassVar[int]
    COPY_BYTES_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedScalarFieldContainer[_store_pb2.Tier]
    payload_bytes: int
    leases: int
    rungs: _containers.RepeatedScalarFieldContainer[int]
    copy_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tiers: _Optional[_Iterable[_Union[_store_pb2.Tier, str]]] = ..., payload_bytes: _Optional[int] = ..., leases: _Optional[int] = ..., rungs: _Optional[_Iterable[int]] = ..., copy_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class LocateResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockLocation]
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockLocation, _Mapping]]] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("all", "namespace", "key_space", "hashes")
    ALL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_SPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    all: bool
    namespace: str
    key_space: _store_pb2.KeySpace
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, all: _Optional[bool] = ..., namespace: _Optional[str] = ..., key_space: _Optional[_Union[_store_pb2.KeySpace, _Mapping]] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("evicted_copies", "evicted_bytes", "leased_copies_kept")
    EVICTED_COPIES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_COPIES_KEPT_FIELD_NUMBER: _ClassVar[int]
    evicted_copies: int
    evicted_bytes: int
    leased_copies_kept: int
    def __init__(self, evicted_copies: _Optional[int] = ..., evicted_bytes: _Optional[int] = ..., leased_copies_kept: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyProgress(_message.Message):
    __slots__ = ("checked_copies", "total_copies", "bad_copies", "checked_bytes")
    CHECKED_COPIES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_COPIES_FIELD_NUMBER: _ClassVar[int]
    BAD_COPIES_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    checked_copies: int
    total_copies: int
    bad_copies: int
    checked_bytes: int
    def __init__(self, checked_copies: _Optional[int] = ..., total_copies: _Optional[int] = ..., bad_copies: _Optional[int] = ..., checked_bytes: _Optional[int] = ...) -> None: ...

class RepairRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RepairProgress(_message.Message):
    __slots__ = ("copied_blocks", "missing_blocks", "failed_blocks", "copied_bytes")
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISSING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    copied_blocks: int
    missing_blocks: int
    failed_blocks: int
    copied_bytes: int
    def __init__(self, copied_blocks: _Optional[int] = ..., missing_blocks: _Optional[int] = ..., failed_blocks: _Optional[int] = ..., copied_bytes: _Optional[int] = ...) -> None: ...
