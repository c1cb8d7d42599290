from kvpb.v1 import store_pb2 as _store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProgressRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProgressResponse(_message.Message):
    __slots__ = ("settled_epoch", "blocks")
    SETTLED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    settled_epoch: int
    blocks: int
    def __init__(self, settled_epoch: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class HoldsRequest(_message.Message):
    __slots__ = ("key_space", "hashes", "verify", "epoch")
    KEY_SPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    key_space: _store_pb2.KeySpace
    hashes: bytes
    verify: bool
    epoch: int
    def __init__(self, key_space: _Optional[_Union[_store_pb2.KeySpace, _Mapping]] = ..., hashes: _Optional[bytes] = ..., verify: _Optional[bool] = ..., epoch: _Optional[int] = ...) -> None: ...

class HoldsResponse(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: bytes
    def __init__(self, held: _Optional[bytes] = ...) -> None: ...

class CompareRequest(_message.Message):
    __slots__ = ("node_id", "epoch", "first_bucket", "digests")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_BUCKET_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    first_bucket: int
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., first_bucket: _Optional[int] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class CompareResponse(_message.Message):
    __slots__ = ("buckets", "digests")
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, buckets: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class StripesRequest(_message.Message):
    __slots__ = ("node_id", "epoch", "bucket")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    bucket: int
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., bucket: _Optional[int] = ...) -> None: ...

class StripeDigests(_message.Message):
    __slots__ = ("stripes", "digests")
    STRIPES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    stripes: bytes
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stripes: _Optional[bytes] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class ListOwnedRequest(_message.Message):
    __slots__ = ("node_id", "epoch")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class OwnedBlock(_message.Message):
    __slots__ = ("block", "payload_bytes", "checksum_xxh3", "ttl_ms", "rung")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_XXH3_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    RUNG_FIELD_NUMBER: _ClassVar[int]
    block: _store_pb2.BlockRef
    payload_bytes: int
    checksum_xxh3: int
    ttl_ms: int
    rung: int
    def __init__(self, block: _Optional[_Union[_store_pb2.BlockRef, _Mapping]] = ..., payload_bytes: _Optional[int] = ..., checksum_xxh3: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., rung: _Optional[int] = ...) -> None: ...

class OwnedBlocks(_message.Message):
    __slots__ = ("key_space", "blocks")
    KEY_SPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    key_space: _store_pb2.KeySpace
    blocks: _containers.RepeatedCompositeFieldContainer[OwnedBlock]
    def __init__(self, key_space: _Optional[_Union[_store_pb2.KeySpace, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[OwnedBlock, _Mapping]]] = ...) -> None: ...
