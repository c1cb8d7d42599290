from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class DrainCallsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainCallsProgress(_message.Message):
    __slots__ = ("live_calls",)
    LIVE_CALLS_FIELD_NUMBER: _ClassVar[int]
    live_calls: int
    def __init__(self, live_calls: _Optional[int] = ...) -> None: ...
