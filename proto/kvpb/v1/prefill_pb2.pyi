from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "namespace", "token_ids", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    namespace: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., namespace: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ...) -> None: ...

class PrefillProgress(_message.Message):
    __slots__ = ("cached_blocks", "published_blocks", "prompt_blocks", "done", "degraded")
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    cached_blocks: int
    published_blocks: int
    prompt_blocks: int
    done: bool
    degraded: bool
    def __init__(self, cached_blocks: _Optional[int] = ..., published_blocks: _Optional[int] = ..., prompt_blocks: _Optional[int] = ..., done: _Optional[bool] = ..., degraded: _Optional[bool] = ...) -> None: ...

class PrefillLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillLoadResponse(_message.Message):
    __slots__ = ("node_id", "model", "layout_fingerprint", "running", "queued", "queued_tokens", "tokens_per_s", "model_digest")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    model: str
    layout_fingerprint: bytes
    running: int
    queued: int
    queued_tokens: int
    tokens_per_s: float
    model_digest: bytes
    def __init__(self, node_id: _Optional[str] = ..., model: _Optional[str] = ..., layout_fingerprint: _Optional[bytes] = ..., running: _Optional[int] = ..., queued: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., model_digest: _Optional[bytes] = ...) -> None: ...
