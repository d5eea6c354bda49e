"""The dashboard's addresses: sign in with a key, see the day's usage and statements, sign out.

Knows who may see what, and in which order a page comes to be. Does not know
HTML, SQL or how a figure is drawn. A page shows the tenant of the key that its session
was opened with and no other: nothing that a browser sends names a tenant.

The key itself is digested as soon as it arrives and kept nowhere. Each page asks
anew whether the key still works, so revoking it ends its sessions at once.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, TypeVar
from zoneinfo import ZoneInfo

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from billing import calendar, instants
from billing.accounts import KeyDigest, KeyHasher, Principal, authenticate
from billing.calendar import month_of, zone_named
from billing.db import Database
from billing.errors import DatabaseUnavailable, MalformedKey, MeterUnavailable
from billing.ids import TenantId
from billing.instants import Clock
from billing.issuing import list_statements
from billing.meter import Meter
from billing.money import format_cents
from billing.names import names_of
from billing.reports import UsageReport, usage_report
from gateway import statement_answers
from gateway.edge.errors import ApiError
from gateway.web import assets, forms, pages, usage
from gateway.web.figures import day_figure
from gateway.web.sessions import Session, SessionStore, SessionToken

HOME: Final = "/dashboard"
SIGN_IN: Final = "/dashboard/sign-in"
STATEMENTS: Final = "/dashboard/statements"
SIGN_OUT: Final = "/dashboard/sign-out"
SESSION_COOKIE: Final = "headstart_session"
FORM_COOKIE: Final = "headstart_form"
FORM_COOKIE_SECONDS: Final = 3_600
FLUSH_SECONDS: Final = 1
"""How long a page waits for the newest requests to reach the ledger."""

_ENDED: Final[Mapping[str, str]] = {
    "expired": "Your session has ended. Please sign in again.",
    "refused": "The key you signed in with no longer works. Sign in with another.",
}
_WRONG_KEY: Final = "This key does not work. It may be mistyped, revoked or expired."
_STALE_FORM: Final = "This form was open for too long. Please try again."
_NO_FORM: Final = "That was not a form of this page."
_AWAY: Final = "The ledger cannot be read at the moment. Nothing is lost: please try again shortly."
_HOST: Final = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_NONCE: Final = re.compile(r"[A-Za-z0-9_-]{43}")

T = TypeVar("T")
log = structlog.get_logger("gateway.web")


class _SignedOut(Exception):
    """No open session, or one whose key works no more; `reason` is what the sign-in page tells."""

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class _Visit:
    """A request inside an open session."""

    session: Session
    principal: Principal


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """Every page's handler. `model_name` is a model that can be asked for now, if one is known."""

    database: Database
    hasher: KeyHasher
    meter: Meter
    form_key: bytes
    form_timeout_seconds: float
    executor: Executor
    model_name: Callable[[], str | None]
    clock: Clock
    sessions: SessionStore

    def routes(self) -> Sequence[BaseRoute]:
        return (
            Route(HOME, self.show_today, methods=["GET"]),
            Route(STATEMENTS, self.list_statements, methods=["GET"]),
            Route(STATEMENTS + "/{period}", self.show_statement, methods=["GET"]),
            Route(SIGN_IN, self.show_sign_in, methods=["GET"]),
            Route(SIGN_IN, self.sign_in, methods=["POST"]),
            Route(SIGN_OUT, self.sign_out, methods=["POST"]),
            Route(assets.PREFIX + "/{name}", self.show_asset, methods=["GET"]),
        )

    async def show_today(self, request: Request) -> Response:
        try:
            visit = await self._visit(request)
            start, end = usage.day_of(self.clock())
            is_behind = not await self._run(self._catch_up)
            report = await self._run(
                lambda: usage_report(
                    self.database,
                    tenant_id=visit.principal.tenant_id,
                    start=start,
                    end=end,
                    cutter=calendar.hours,
                )
            )
        except _SignedOut as ended:
            return _to_sign_in(request, ended.reason)
        except DatabaseUnavailable:
            return await self._notice("Not available", _AWAY, status=503)
        return await self._today(request, visit, report, is_behind=is_behind)

    async def list_statements(self, request: Request) -> Response:
        try:
            visit = await self._visit(request)
            tenant_id = visit.principal.tenant_id
            issued = await self._run(lambda: list_statements(self.database, tenant_id=tenant_id))
            zone = await self._run(lambda: self._zone(tenant_id))
        except _SignedOut as ended:
            return _to_sign_in(request, ended.reason)
        except DatabaseUnavailable:
            return await self._notice("Not available", _AWAY, status=503)
        return pages.render(
            "statements.html",
            await self._run(assets.load_assets),
            tenant_name=visit.principal.tenant_name,
            form_token=visit.session.form_token,
            home=STATEMENTS,
            this_month=month_of(self.clock(), zone),
            statements=[(one.statement, format_cents(one.statement.due_cents)) for one in issued],
        )

    async def show_statement(self, request: Request) -> Response:
        """Of an open month a preview, which says that it is one."""
        try:
            visit = await self._visit(request)
            asked = statement_answers.parse(
                request.path_params["period"], request.query_params.multi_items(), default_format="html"
            )
            tenant_id, now = visit.principal.tenant_id, self.clock()
            return await self._run(lambda: statement_answers.answer(self.database, tenant_id, asked, now=now))
        except _SignedOut as ended:
            return _to_sign_in(request, ended.reason)
        except DatabaseUnavailable:
            return await self._notice("Not available", _AWAY, status=503)
        except ApiError as refusal:
            return await self._notice("No statement", refusal.message, status=refusal.status)

    def _zone(self, tenant_id: TenantId) -> ZoneInfo:
        with self.database.read() as connection:
            return zone_named(names_of(connection, tenant_id).time_zone)

    async def show_sign_in(self, request: Request) -> Response:
        if self._session(request) is not None:
            return pages.go_to(HOME)
        notice = _ENDED.get(request.query_params.get("ended", ""))
        return await self._sign_in_page(request, notice=notice)

    async def sign_in(self, request: Request) -> Response:
        try:
            form = await forms.read_form(request, timeout_seconds=self.form_timeout_seconds)
        except forms.BadForm:
            return await self._notice("Not a form", _NO_FORM, status=400)
        nonce = _nonce(request)
        if nonce is None or not forms.is_same(form.get("form_token"), forms.sign_nonce(nonce, self.form_key)):
            return await self._sign_in_page(request, status=403, error=_STALE_FORM)
        try:
            digest = self.hasher.digest(form.get("key", "").strip())
            principal = await self._principal(digest)
        except MalformedKey:
            principal = None
        except DatabaseUnavailable:
            return await self._notice("Not available", _AWAY, status=503)
        if principal is None:
            log.info("dashboard_sign_in_refused")
            return await self._sign_in_page(request, status=403, error=_WRONG_KEY)
        return self._open_session(request, digest, principal)

    async def sign_out(self, request: Request) -> Response:
        session = self._session(request)
        if session is None:
            return _to_sign_in(request, None)
        try:
            form = await forms.read_form(request, timeout_seconds=self.form_timeout_seconds)
        except forms.BadForm:
            form = {}
        if not forms.is_same(form.get("form_token"), session.form_token):
            return await self._notice("Not a form", _NO_FORM, status=403)
        self.sessions.close(_token(request))
        return _to_sign_in(request, None)

    async def show_asset(self, request: Request) -> Response:
        found = (await self._run(assets.load_assets)).get(request.path_params["name"])
        return assets.serve(found, request) if found is not None else Response(status_code=404)

    async def _run(self, work: Callable[[], T]) -> T:
        """Whatever blocks runs on a thread of the executor."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)

    async def _principal(self, digest: KeyDigest) -> Principal | None:
        now = self.clock()
        return await self._run(lambda: authenticate(self.database, digest, now=now))

    def _catch_up(self) -> bool:
        """Whether all requests settled by now are in the ledger."""
        try:
            self.meter.flush(timeout_seconds=FLUSH_SECONDS)
        except MeterUnavailable:
            return False
        return True

    def _session(self, request: Request) -> Session | None:
        return self.sessions.use(_token(request))

    async def _visit(self, request: Request) -> _Visit:
        """Raises `_SignedOut`."""
        session = self._session(request)
        if session is None:
            raise _SignedOut("expired" if SESSION_COOKIE in request.cookies else None)
        principal = await self._principal(session.key_digest)
        if principal is None:
            self.sessions.close(_token(request))
            raise _SignedOut("refused")
        return _Visit(session=session, principal=principal)

    def _open_session(self, request: Request, digest: KeyDigest, principal: Principal) -> Response:
        self.sessions.close(_token(request))
        log.info(
            "dashboard_sign_in",
            tenant_id=str(principal.tenant_id),
            api_key_id=str(principal.api_key_id),
        )
        response = pages.go_to(HOME)
        response.set_cookie(
            SESSION_COOKIE,
            self.sessions.open(digest),
            path=HOME,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return response

    async def _today(
        self, request: Request, visit: _Visit, report: UsageReport, *, is_behind: bool
    ) -> Response:
        hours = usage.hours_of(report)
        return pages.render(
            "today.html",
            await self._run(assets.load_assets),
            has_chart=bool(hours),
            tenant_name=visit.principal.tenant_name,
            form_token=visit.session.form_token,
            day=instants.to_datetime(report.start),
            as_of=instants.to_datetime(self.clock()),
            rows=usage.rows_of(report),
            hours=[(hour, usage.hit_share_row(hour.totals)) for hour in hours],
            figure_json=day_figure(hours, start=report.start, end=report.end),
            is_behind=is_behind,
            curl=_curl(request, self.model_name()),
        )

    async def _sign_in_page(
        self, request: Request, *, status: int = 200, notice: str | None = None, error: str | None = None
    ) -> Response:
        nonce = _nonce(request) or forms.new_nonce()
        response = pages.render(
            "sign_in.html",
            await self._run(assets.load_assets),
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

    async def _notice(self, title: str, text: str, *, status: int) -> Response:
        return pages.render(
            "notice.html", await self._run(assets.load_assets), status=status, title=title, text=text
        )


def _to_sign_in(request: Request, reason: str | None) -> Response:
    response = pages.go_to(SIGN_IN if reason is None else f"{SIGN_IN}?ended={reason}")
    # What another site makes a browser send comes without the cookie, and must not be what deletes it.
    if SESSION_COOKIE in request.cookies:
        response.delete_cookie(SESSION_COOKIE, path=HOME, httponly=True, samesite="strict")
    return response


def _token(request: Request) -> SessionToken:
    return SessionToken(request.cookies.get(SESSION_COOKIE, ""))


def _nonce(request: Request) -> str | None:
    nonce = request.cookies.get(FORM_COOKIE, "")
    return nonce if _NONCE.fullmatch(nonce) else None


def _curl(request: Request, model: str | None) -> str:
    """A first request to paste into a shell. The key stays a variable: pages never show one."""
    host = request.headers.get("host", "")
    base = f"{request.url.scheme}://{host if _HOST.fullmatch(host) else '127.0.0.1'}"
    messages = json.dumps([{"role": "user", "content": "What is a prompt cache?"}])
    body = f'{{"model": {json.dumps(model or "YOUR_MODEL")},\n       "messages": {messages}}}'
    return "\n".join(
        (
            f"curl {base}/v1/chat/completions \\",
            '  -H "Authorization: Bearer $OPENAI_API_KEY" \\',
            '  -H "Content-Type: application/json" \\',
            f"  -d {shlex.quote(body)}",
        )
    )
