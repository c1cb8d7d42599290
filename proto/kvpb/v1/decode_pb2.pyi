from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "seed", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class GenerateInput(_message.Message):
    __slots__ = ("request", "published")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    published: PublishedPrefix
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ..., published: _Optional[_Union[PublishedPrefix, _Mapping]] = ...) -> None: ...

class PublishedPrefix(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("namespace", "token_ids", "recoded")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RECODED_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    recoded: bool
    def __init__(self, namespace: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., recoded: _Optional[bool] = ...) -> None: ...

class PrepareResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "namespace", "prompt_token_ids", "generated_token_ids", "sampling", "max_tokens", "stop_token_ids", "ignore_eos", "priority", "top_logprobs", "recoded")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RECODED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    namespace: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    generated_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    priority: int
    top_logprobs: int
    recoded: bool
    def __init__(self, request_id: _Optional[str] = ..., namespace: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., generated_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., priority: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., recoded: _Optional[bool] = ...) -> None: ...

class PrefixLoaded(_message.Message):
    __slots__ = ("prompt_blocks", "local_blocks", "store_blocks", "recomputed_tokens", "load_ms", "recoded")
    PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    RECODED_FIELD_NUMBER: _ClassVar[int]
    prompt_blocks: int
    local_blocks: int
    store_blocks: int
    recomputed_tokens: int
    load_ms: float
    recoded: bool
    def __init__(self, prompt_blocks: _Optional[int] = ..., local_blocks: _Optional[int] = ..., store_blocks: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., load_ms: _Optional[float] = ..., recoded: _Optional[bool] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("token_id", "position", "logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    position: int
    logprobs: Logprobs
    def __init__(self, token_id: _Optional[int] = ..., position: _Optional[int] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("prefix_loaded", "token", "finished", "heartbeat")
    PREFIX_LOADED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    prefix_loaded: PrefixLoaded
    token: Token
    finished: Finished
    heartbeat: Heartbeat
    def __init__(self, prefix_loaded: _Optional[_Union[PrefixLoaded, _Mapping]] = ..., token: _Optional[_Union[Token, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class DecodeLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeLoadResponse(_message.Message):
    __slots__ = ("node_id", "model", "layout_fingerprint", "running", "queued", "free_pool_blocks", "total_pool_blocks", "tokens_per_s", "itl_ms", "model_digest", "block_tokens", "max_positions")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    FREE_POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ITL_MS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    model: str
    layout_fingerprint: bytes
    running: int
    queued: int
    free_pool_blocks: int
    total_pool_blocks: int
    tokens_per_s: float
    itl_ms: float
    model_digest: bytes
    block_tokens: int
    max_positions: int
    def __init__(self, node_id: _Optional[str] = ..., model: _Optional[str] = ..., layout_fingerprint: _Optional[bytes] = ..., running: _Optional[int] = ..., queued: _Optional[int] = ..., free_pool_blocks: _Optional[int] = ..., total_pool_blocks: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., itl_ms: _Optional[float] = ..., model_digest: _Optional[bytes] = ..., block_tokens: _Optional[int] = ..., max_positions: _Optional[int] = ...) -> None: ...
