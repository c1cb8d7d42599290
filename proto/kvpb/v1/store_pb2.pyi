from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReserveStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESERVE_STATUS_UNSPECIFIED: _ClassVar[ReserveStatus]
    RESERVE_STATUS_GRANTED: _ClassVar[ReserveStatus]
    RESERVE_STATUS_EXISTS: _ClassVar[ReserveStatus]
    RESERVE_STATUS_PENDING: _ClassVar[ReserveStatus]
    RESERVE_STATUS_NO_ROOM: _ClassVar[ReserveStatus]
    RESERVE_STATUS_QUOTA: _ClassVar[ReserveStatus]
    RESERVE_STATUS_TOO_LARGE: _ClassVar[ReserveStatus]

class CommitStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT_STATUS_UNSPECIFIED: _ClassVar[CommitStatus]
    COMMIT_STATUS_STORED: _ClassVar[CommitStatus]
    COMMIT_STATUS_EXPIRED: _ClassVar[CommitStatus]
    COMMIT_STATUS_BAD_CHECKSUM: _ClassVar[CommitStatus]
    COMMIT_STATUS_INCOMPLETE: _ClassVar[CommitStatus]
    COMMIT_STATUS_DURABLE: _ClassVar[CommitStatus]
    COMMIT_STATUS_NO_ROOM: _ClassVar[CommitStatus]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_GPU: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_SSD: _ClassVar[Tier]

class ReadStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    READ_STATUS_UNSPECIFIED: _ClassVar[ReadStatus]
    READ_STATUS_OK: _ClassVar[ReadStatus]
    READ_STATUS_NOT_LEASED: _ClassVar[ReadStatus]
    READ_STATUS_CORRUPT: _ClassVar[ReadStatus]
    READ_STATUS_IO_ERROR: _ClassVar[ReadStatus]
RESERVE_STATUS_UNSPECIFIED: ReserveStatus
RESERVE_STATUS_GRANTED: ReserveStatus
RESERVE_STATUS_EXISTS: ReserveStatus
RESERVE_STATUS_PENDING: ReserveStatus
RESERVE_STATUS_NO_ROOM: ReserveStatus
RESERVE_STATUS_QUOTA: ReserveStatus
RESERVE_STATUS_TOO_LARGE: ReserveStatus
COMMIT_STATUS_UNSPECIFIED: CommitStatus
COMMIT_STATUS_STORED: CommitStatus
COMMIT_STATUS_EXPIRED: CommitStatus
COMMIT_STATUS_BAD_CHECKSUM: CommitStatus
COMMIT_STATUS_INCOMPLETE: CommitStatus
COMMIT_STATUS_DURABLE: CommitStatus
COMMIT_STATUS_NO_ROOM: CommitStatus
TIER_UNSPECIFIED: Tier
TIER_GPU: Tier
TIER_HOST: Tier
TIER_SSD: Tier
READ_STATUS_UNSPECIFIED: ReadStatus
READ_STATUS_OK: ReadStatus
READ_STATUS_NOT_LEASED: ReadStatus
READ_STATUS_CORRUPT: ReadStatus
READ_STATUS_IO_ERROR: ReadStatus

class KeySpace(_message.Message):
    __slots__ = ("namespace", "layout_fingerprint")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    layout_fingerprint: bytes
    def __init__(self, namespace: _Optional[str] = ..., layout_fingerprint: _Optional[bytes] = ...) -> None: ...

class BlockRef(_message.Message):
    __slots__ = ("hash", "parent", "stripe", "index")
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    STRIPE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    parent: bytes
    stripe: bytes
    index: int
    def __init__(self, hash: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., stripe: _Optional[bytes] = ..., index: _Optional[int] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("node_id", "boot_id", "epoch", "state", "data_port", "local_door", "machine", "ucx")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_DOOR_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    UCX_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    boot_id: bytes
    epoch: int
    state: str
    data_port: int
    local_door: str
    machine: str
    ucx: bool
    def __init__(self, node_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., state: _Optional[str] = ..., data_port: _Optional[int] = ..., local_door: _Optional[str] = ..., machine: _Optional[str] = ..., ucx: _Optional[bool] = ...) -> None: ...

class ReserveItem(_message.Message):
    __slots__ = ("block", "payload_bytes", "ttl_ms", "rung")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    RUNG_FIELD_NUMBER: _ClassVar[int]
    block: BlockRef
    payload_bytes: int
    ttl_ms: int
    rung: int
    def __init__(self, block: _Optional[_Union[BlockRef, _Mapping]] = ..., payload_bytes: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., rung: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("key_space", "items", "spare_room_only")
    KEY_SPACE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SPARE_ROOM_ONLY_FIELD_NUMBER: _ClassVar[int]
    key_space: KeySpace
    items: _containers.RepeatedCompositeFieldContainer[ReserveItem]
    spare_room_only: bool
    def __init__(self, key_space: _Optional[_Union[KeySpace, _Mapping]] = ..., items: _Optional[_Iterable[_Union[ReserveItem, _Mapping]]] = ..., spare_room_only: _Optional[bool] = ...) -> None: ...

class ReserveGrant(_message.Message):
    __slots__ = ("status", "write_token", "arena_offset", "ticket")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    WRITE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ARENA_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    status: ReserveStatus
    write_token: int
    arena_offset: int
    ticket: bytes
    def __init__(self, status: _Optional[_Union[ReserveStatus, str]] = ..., write_token: _Optional[int] = ..., arena_offset: _Optional[int] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("grants", "reservation_ttl_ms")
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    grants: _containers.RepeatedCompositeFieldContainer[ReserveGrant]
    reservation_ttl_ms: int
    def __init__(self, grants: _Optional[_Iterable[_Union[ReserveGrant, _Mapping]]] = ..., reservation_ttl_ms: _Optional[int] = ...) -> None: ...

class WriteChunk(_message.Message):
    __slots__ = ("write_token", "offset_bytes", "data")
    WRITE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    write_token: int
    offset_bytes: int
    data: bytes
    def __init__(self, write_token: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("refused_write_tokens",)
    REFUSED_WRITE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    refused_write_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, refused_write_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitItem(_message.Message):
    __slots__ = ("write_token", "checksum_xxh3")
    WRITE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_XXH3_FIELD_NUMBER: _ClassVar[int]
    write_token: int
    checksum_xxh3: int
    def __init__(self, write_token: _Optional[int] = ..., checksum_xxh3: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[CommitItem]
    def __init__(self, items: _Optional[_Iterable[_Union[CommitItem, _Mapping]]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedScalarFieldContainer[CommitStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[CommitStatus, str]]] = ...) -> None: ...

class ProbePrefixRequest(_message.Message):
    __slots__ = ("key_space", "blocks")
    KEY_SPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    key_space: KeySpace
    blocks: _containers.RepeatedCompositeFieldContainer[BlockRef]
    def __init__(self, key_space: _Optional[_Union[KeySpace, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockRef, _Mapping]]] = ...) -> None: ...

class ProbePrefixResponse(_message.Message):
    __slots__ = ("present",)
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    present: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, present: _Optional[_Iterable[bool]] = ...) -> None: ...

class AcquiredBlock(_message.Message):
    __slots__ = ("found", "payload_bytes", "checksum_xxh3", "tier", "arena_offset", "rung")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_XXH3_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    ARENA_OFFSET_FIELD_NUMBER: _ClassVar[int]
    RUNG_FIELD_NUMBER: _ClassVar[int]
    found: bool
    payload_bytes: int
    checksum_xxh3: int
    tier: Tier
    arena_offset: int
    rung: int
    def __init__(self, found: _Optional[bool] = ..., payload_bytes: _Optional[int] = ..., checksum_xxh3: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., arena_offset: _Optional[int] = ..., rung: _Optional[int] = ...) -> None: ...

class AcquirePrefixRequest(_message.Message):
    __slots__ = ("key_space", "blocks", "lease_ttl_ms", "as_sealed")
    KEY_SPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    AS_SEALED_FIELD_NUMBER: _ClassVar[int]
    key_space: KeySpace
    blocks: _containers.RepeatedCompositeFieldContainer[BlockRef]
    lease_ttl_ms: int
    as_sealed: bool
    def __init__(self, key_space: _Optional[_Union[KeySpace, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockRef, _Mapping]]] = ..., lease_ttl_ms: _Optional[int] = ..., as_sealed: _Optional[bool] = ...) -> None: ...

class AcquirePrefixResponse(_message.Message):
    __slots__ = ("lease_id", "lease_ttl_ms", "blocks", "ticket")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    lease_ttl_ms: int
    blocks: _containers.RepeatedCompositeFieldContainer[AcquiredBlock]
    ticket: bytes
    def __init__(self, lease_id: _Optional[int] = ..., lease_ttl_ms: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[AcquiredBlock, _Mapping]]] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("lease_id", "key_space", "hashes")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_SPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    key_space: KeySpace
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, lease_id: _Optional[int] = ..., key_space: _Optional[_Union[KeySpace, _Mapping]] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReadChunk(_message.Message):
    __slots__ = ("item", "status", "offset_bytes", "data", "last")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    item: int
    status: ReadStatus
    offset_bytes: int
    data: bytes
    last: bool
    def __init__(self, item: _Optional[int] = ..., status: _Optional[_Union[ReadStatus, str]] = ..., offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_id", "lease_ttl_ms")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    lease_ttl_ms: int
    def __init__(self, lease_id: _Optional[int] = ..., lease_ttl_ms: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("lease_ttl_ms", "ticket")
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    lease_ttl_ms: int
    ticket: bytes
    def __init__(self, lease_ttl_ms: _Optional[int] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id", "hashes", "corrupt_hashes", "key_space")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_HASHES_FIELD_NUMBER: _ClassVar[int]
    KEY_SPACE_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    corrupt_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    key_space: KeySpace
    def __init__(self, lease_id: _Optional[int] = ..., hashes: _Optional[_Iterable[bytes]] = ..., corrupt_hashes: _Optional[_Iterable[bytes]] = ..., key_space: _Optional[_Union[KeySpace, _Mapping]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("key_space", "blocks")
    KEY_SPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    key_space: KeySpace
    blocks: _containers.RepeatedCompositeFieldContainer[BlockRef]
    def __init__(self, key_space: _Optional[_Union[KeySpace, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockRef, _Mapping]]] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, deleted: _Optional[_Iterable[bool]] = ...) -> None: ...
