"""What a client is told when something is wrong: an HTTP status and OpenAI's error object."""

from __future__ import annotations

from typing import Any

from kvstore.errors import InvalidRequest, LarderError, NotFound, Overloaded, Unavailable

_TYPE_OF_STATUS = {401: "authentication_error", 429: "rate_limit_error"}
_STATUS_OF: dict[type[LarderError], int] = {InvalidRequest: 400, NotFound: 404, Overloaded: 429, Unavailable: 503}
_CODE_OF_STATUS = {429: "overloaded", 503: "unavailable", 500: "internal_error"}

RETRY_AFTER_S = 1
"""Sent with 429 and 503: both pass by themselves."""


class HttpFailure(Exception):
    """An answer that is no success. `message` says what was wrong and what would be right."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @classmethod
    def bad_request(cls, message: str, *, param: str | None = None, code: str | None = None) -> HttpFailure:
        return cls(400, message, param=param, code=code)

    @classmethod
    def of(cls, error: LarderError) -> HttpFailure:
        status = next((status for kind, status in _STATUS_OF.items() if isinstance(error, kind)), 500)
        return cls(status, str(error), code=_CODE_OF_STATUS.get(status))

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's shape."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPE_OF_STATUS.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}
        return {**headers, "www-authenticate": "Bearer"} if self.status == 401 else headers
