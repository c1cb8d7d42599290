"""The table between our errors and gRPC status codes: one code a class, so that a code leads back to its class.

The remedy travels with the code; the message travels as the status detail.
"""

from __future__ import annotations

import grpc

from kvstore.errors import (
    CodecFailure,
    CorruptPayload,
    InvalidRequest,
    LarderError,
    LeaseExpired,
    NotFound,
    Overloaded,
    StaleView,
    Unavailable,
    UnsupportedFormat,
)

CODE_OF: dict[type[LarderError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    StaleView: grpc.StatusCode.FAILED_PRECONDITION,
    LeaseExpired: grpc.StatusCode.ABORTED,
    CorruptPayload: grpc.StatusCode.DATA_LOSS,
    UnsupportedFormat: grpc.StatusCode.UNIMPLEMENTED,
    CodecFailure: grpc.StatusCode.INTERNAL,
}

_CLASS_OF: dict[grpc.StatusCode, type[LarderError]] = {code: error for error, code in CODE_OF.items()}


def status_code_of(error: LarderError) -> grpc.StatusCode:
    """The code of the error's class, or of the nearest class above it that has one; INTERNAL for the rest."""
    for ancestor in type(error).__mro__:
        if ancestor in CODE_OF:
            return CODE_OF[ancestor]
    return grpc.StatusCode.INTERNAL


def error_of(error: grpc.RpcError) -> LarderError:
    """What a failed call means to its caller. A code without a row (a deadline, a cut connection, a bug over there) is
    Unavailable: that peer could not serve, another one may."""
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = error.details() if hasattr(error, "details") else str(error)
    return _CLASS_OF.get(code, Unavailable)(f"{details or code} ({code.name})")
