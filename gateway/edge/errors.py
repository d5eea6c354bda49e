"""Every refusal a client can meet, as one exception tree.

Knows status codes, the field at fault and a stable code. Does not know any
dialect's JSON: each edge module turns an `ApiError` into its own shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

NO_RETRY: Final[Mapping[str, str]] = {"x-should-retry": "false"}
"""What both official clients obey."""


class ApiError(Exception):
    """Something the client is told. `param` names the field at fault, as a path when it is nested.

    Messages are written by us and are safe to show: no stack traces, no text of other tenants.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        self.headers: Mapping[str, str] = headers or {}


class InvalidRequest(ApiError):
    """The body or a field of it is wrong; sending it again will not help."""

    status = 400
    type = "invalid_request_error"


class UnknownParameter(InvalidRequest):
    code = "unknown_parameter"


class UnsupportedParameter(InvalidRequest):
    """A field that exists, with a value that this engine cannot honour."""

    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """`prompt_tokens` is how long the prompt is, as it is told: it may be "at least 9000"; None where the
    client's own limit is at fault.
    """

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, param: str, prompt_tokens: str | None = None, window: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.prompt_tokens = prompt_tokens
        self.window = window


class Unauthenticated(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class PermissionDenied(ApiError):
    """The key works, but not for this."""

    status = 403
    type = "invalid_request_error"
    code = "insufficient_permissions"


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class BodyTooSlow(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class BodyTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMediaType(ApiError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class InsufficientQuota(ApiError):
    """A budget has no room for the request. Waiting does not help, and official clients are told so."""

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers=NO_RETRY)


class RateLimitExceeded(ApiError):
    """A limit has no room for the request now. `headers` tell when it has."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class InternalError(ApiError):
    code = "internal_error"


class UpstreamBroke(ApiError):
    """The worker answered, and then stopped making sense or stopped altogether."""

    status = 502
    code = "worker_failed"


class ServiceUnavailable(ApiError):
    """Nothing was computed; the same request may be sent again later."""

    status = 503
    code = "service_unavailable"


class UpstreamTimeout(ApiError):
    status = 504
    code = "worker_timeout"
