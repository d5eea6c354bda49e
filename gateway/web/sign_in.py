"""Signing in with a key, and out.

Knows cookies and the two forms. Does not know pages behind them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from billing.accounts import KeyDigest, Principal
from billing.errors import DatabaseUnavailable, MalformedKey
from gateway.web import assets, forms, pages
from gateway.web.visits import (
    AWAY,
    HOME,
    NO_FORM,
    SESSION_COOKIE,
    SIGN_IN,
    Visits,
    to_sign_in,
    token_of,
)

SIGN_OUT: Final = "/dashboard/sign-out"
FORM_COOKIE: Final = "headstart_form"
FORM_COOKIE_SECONDS: Final = 3_600

_ENDED: Final[Mapping[str, str]] = {
    "expired": "Your session has ended. Please sign in again.",
    "refused": "The key you signed in with no longer works. Sign in with another.",
}
_WRONG_KEY: Final = "This key does not work. It may be mistyped, revoked or expired."
_STALE_FORM: Final = "This form was open for too long. Please try again."
_NONCE: Final = re.compile(r"[A-Za-z0-9_-]{43}")

log = structlog.get_logger("gateway.web")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignInPages:
    visits: Visits
    form_key: bytes

    def routes(self) -> Sequence[BaseRoute]:
        return (
            Route(SIGN_IN, self.show, methods=["GET"]),
            Route(SIGN_IN, self.sign_in, methods=["POST"]),
            Route(SIGN_OUT, self.sign_out, methods=["POST"]),
        )

    async def show(self, request: Request) -> Response:
        try:
            if await self.visits.session(request) is not None:
                return pages.go_to(HOME)
        except DatabaseUnavailable:
            return await self._away()
        notice = _ENDED.get(request.query_params.get("ended", ""))
        return await self._page(request, notice=notice)

    async def sign_in(self, request: Request) -> Response:
        try:
            form = await forms.read_form(request, timeout_seconds=self.visits.form_timeout_seconds)
        except forms.BadForm:
            return await self.visits.notice("Not a form", NO_FORM, status=400)
        nonce = _nonce(request)
        if nonce is None or not forms.is_same(form.get("form_token"), forms.sign_nonce(nonce, self.form_key)):
            return await self._page(request, status=403, error=_STALE_FORM)
        try:
            digest = self.visits.hasher.digest(form.get("key", "").strip())
            principal = await self.visits.principal(digest)
            if principal is not None:
                return await self._open(request, digest, principal)
        except MalformedKey:
            pass
        except DatabaseUnavailable:
            return await self._away()
        log.info("dashboard_sign_in_refused")
        return await self._page(request, status=403, error=_WRONG_KEY)

    async def sign_out(self, request: Request) -> Response:
        try:
            session = await self.visits.session(request)
            if session is None:
                return to_sign_in(request, None)
            form = await self._form(request)
            if not forms.is_same(form.get("form_token"), session.form_token):
                return await self.visits.notice("Not a form", NO_FORM, status=403)
            await self.visits.run(lambda: self.visits.sessions.close(token_of(request)))
        except DatabaseUnavailable:
            return await self._away()
        return to_sign_in(request, None)

    async def _form(self, request: Request) -> Mapping[str, str]:
        try:
            return await forms.read_form(request, timeout_seconds=self.visits.form_timeout_seconds)
        except forms.BadForm:
            return {}

    async def _away(self) -> Response:
        return await self.visits.notice("Not available", AWAY, status=503)

    async def _open(self, request: Request, digest: KeyDigest, principal: Principal) -> Response:
        sessions, former = self.visits.sessions, token_of(request)

        def replace() -> str:
            sessions.close(former)
            return sessions.open(digest)

        token = await self.visits.run(replace)
        log.info(
            "dashboard_sign_in", tenant_id=str(principal.tenant_id), api_key_id=str(principal.api_key_id)
        )
        response = pages.go_to(HOME)
        response.set_cookie(
            SESSION_COOKIE,
            token,
            path=HOME,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return response

    async def _page(
        self, request: Request, *, status: int = 200, notice: str | None = None, error: str | None = None
    ) -> Response:
        nonce = _nonce(request) or forms.new_nonce()
        response = pages.render(
            "sign_in.html",
            await self.visits.run(assets.load_assets),
            status=status,
            form_token=forms.sign_nonce(nonce, self.form_key),
            notice=notice,
            error=error,
        )
        response.set_cookie(
            FORM_COOKIE,
            nonce,
            max_age=FORM_COOKIE_SECONDS,
            path=SIGN_IN,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return response


def _nonce(request: Request) -> str | None:
    nonce = request.cookies.get(FORM_COOKIE, "")
    return nonce if _NONCE.fullmatch(nonce) else None
