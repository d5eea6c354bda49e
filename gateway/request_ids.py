"""Every exchange has an id: in its answer's `x-request-id`, and in every log line that is written for it.

Knows ASGI and ids. Does not know routes: a line says which one was taken, never the path that a
client wrote.
"""

from __future__ import annotations

import time
from typing import Final

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from billing.ids import RequestId, new_request_id

HEADER: Final = b"x-request-id"
QUIET_ROUTES: Final = frozenset({"/metrics", "/health/liveness", "/health/readiness"})
"""Asked by machines, all day long."""
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_ID: Final = "request_id"
_HAS_LINE: Final = "has_log_line"
log = structlog.get_logger("gateway.http")


def request_id_of(scope: Scope) -> RequestId:
    """The exchange's own. One that came another way than through `RequestIds` gets it now."""
    state = scope.setdefault("state", {})
    if _ID not in state:
        state[_ID] = new_request_id()
    known: RequestId = state[_ID]
    return known


def route_of(scope: Scope) -> str | None:
    """The route's pattern; None where no route has the path."""
    path: str | None = getattr(scope.get("route"), "path", None)
    return path


def keep_own_line(scope: Scope) -> None:
    """Whoever calls this writes a line about the exchange that says more."""
    scope["state"][_HAS_LINE] = True


class RequestIds:
    """ASGI middleware around every route."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = str(request_id_of(scope))
        began_ns = time.monotonic_ns()
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message.setdefault("headers", [])
                if all(name.lower() != HEADER for name, _ in headers):
                    message["headers"] = [*headers, (HEADER, request_id.encode())]
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                _tell(scope, status, (time.monotonic_ns() - began_ns) / 1e6)


def _tell(scope: Scope, status: int | None, elapsed_ms: float) -> None:
    route = route_of(scope)
    if scope["state"].get(_HAS_LINE):
        return
    write = log.debug if route in QUIET_ROUTES else log.info
    method = scope["method"] if scope["method"] in _METHODS else "other"
    write("http_request", method=method, route=route, status=status, elapsed_ms=round(elapsed_ms, 3))
