"""Errors by remedy: what the caller does next decides the class, and each class maps to one gRPC code and one HTTP status.

A miss is no error: it is an answer, a return value. A broken assumption of ours is an `assert`.
"""

from __future__ import annotations


class LarderError(Exception):
    """Base of every operating error. The message says what was wrong and what would be right."""


class ConfigError(LarderError):
    """The operator's input (file, flag, environment) is wrong: fix it and start again. One line on stderr, exit 2."""


class InvalidRequest(LarderError):
    """The caller's request is wrong and will stay wrong: fix it. INVALID_ARGUMENT, 400."""


class NotFound(LarderError):
    """The named thing (a model, a lease) does not exist here: name another. NOT_FOUND, 404."""


class Overloaded(LarderError):
    """No room or no turn now: back off and try again. RESOURCE_EXHAUSTED, 429."""


class Unavailable(LarderError):
    """This peer cannot serve now: use another one, or recompute. UNAVAILABLE, 503."""


class StaleView(LarderError):
    """The caller's epoch or boot id is behind: refresh the view, then try again. FAILED_PRECONDITION, 409."""


class LeaseExpired(LarderError):
    """The lease or write token is gone: acquire or reserve again. ABORTED, 409."""


class CorruptPayload(LarderError):
    """These bytes are not what was stored: try another copy, or recompute. DATA_LOSS, 500."""


class UnsupportedFormat(LarderError):
    """A codec, version or layout this reader does not know: a miss to the caller, counted by reason. UNIMPLEMENTED, 501."""


class CodecFailure(LarderError):
    """The block could not be encoded: the put fails, nothing is stored under its key. INTERNAL, 500.

    `reason` is a short label for larder_codec_failures_total.
    """

    def __init__(self, message: str, *, reason: str = "failed") -> None:
        super().__init__(message)
        self.reason = reason
