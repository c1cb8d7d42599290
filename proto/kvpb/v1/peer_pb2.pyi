from kvpb.v1 import store_pb2 as _store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListOwnedRequest(_message.Message):
    __slots__ = ("node_id", "epoch")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class OwnedBlock(_message.Message):
    __slots__ = ("block", "payload_bytes", "checksum_xxh3", "ttl_ms")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_XXH3_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    block: _store_pb2.BlockRef
    payload_bytes: int
    checksum_xxh3: int
    ttl_ms: int
    def __init__(self, block: _Optional[_Union[_store_pb2.BlockRef, _Mapping]] = ..., payload_bytes: _Optional[int] = ..., checksum_xxh3: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class OwnedBlocks(_message.Message):
    __slots__ = ("key_space", "blocks")
    KEY_SPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    key_space: _store_pb2.KeySpace
    blocks: _containers.RepeatedCompositeFieldContainer[OwnedBlock]
    def __init__(self, key_space: _Optional[_Union[_store_pb2.KeySpace, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[OwnedBlock, _Mapping]]] = ...) -> None: ...
