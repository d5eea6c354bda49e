"""Who is visiting, whose figures they may see, and what they ask for.

Knows sessions, roles, the tenant filter, zones and the proof of a form. Does not know what
any page shows. A tenant sees its own; an admin sees everybody's, or one tenant's by a
filter. Somebody else's tenant is answered as one that is not there.

The key itself is digested as soon as it arrives and kept nowhere. Each page asks anew whether the key
still works, so revoking it ends its sessions at once, at every gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from starlette.requests import Request
from starlette.responses import Response

from billing.accounts import (
    KeyDigest,
    KeyHasher,
    Principal,
    Role,
    Tenant,
    authenticate,
    find_tenant,
    list_tenants,
)
from billing.calendar import UTC_ZONE, zone_named
from billing.db import Database
from billing.errors import BillingError, DatabaseUnavailable, MeterUnavailable
from billing.ids import TenantId
from billing.instants import Clock, Microseconds
from billing.meter import Meter
from billing.names import names_of
from gateway.edge.errors import ApiError, InvalidRequest, NotFound, PermissionDenied
from gateway.queries import Query
from gateway.web import assets, forms, pages
from gateway.web.sessions import Session, SessionStore, SessionToken

HOME: Final = "/dashboard"
SIGN_IN: Final = "/dashboard/sign-in"
SESSION_COOKIE: Final = "headstart_session"
FLUSH_SECONDS: Final = 1
"""How long a page waits for the newest requests to reach the ledger."""

AWAY: Final = "The ledger cannot be read at the moment. Nothing is lost: please try again shortly."
NO_FORM: Final = "That was not a form of this page."
TENANT: Final = "tenant"
ZONE: Final = "zone"

T = TypeVar("T")


class SignedOut(Exception):
    """No open session, or one whose key works no more; `reason` is what the sign-in page tells."""

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A request inside an open session.

    `tenant` is whose figures are shown: None is everybody's, which only an admin can ask for. `tenants` are
    those that an admin can choose from. `zone` is how instants are written down.
    """

    request: Request
    session: Session
    principal: Principal
    query: Query
    tenant: Tenant | None
    tenants: Sequence[Tenant]
    zone: ZoneInfo
    now: Microseconds
    form: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_admin(self) -> bool:
        return self.principal.role is Role.ADMIN

    @property
    def tenant_ids(self) -> Sequence[TenantId] | None:
        """For a selection: None is no condition."""
        return None if self.tenant is None else [self.tenant.id]

    @property
    def whose(self) -> str:
        return "all tenants" if self.tenant is None else self.tenant.name

    @property
    def carried(self) -> Mapping[str, str]:
        """What a link to another page keeps: the tenant that an admin chose, and the zone."""
        kept = {TENANT: self.query.one(TENANT) if self.is_admin else None, ZONE: self.query.one(ZONE)}
        return {name: value for name, value in kept.items() if value}

    @property
    def own_or_chosen(self) -> TenantId:
        """For what only one tenant has at a time."""
        return self.principal.tenant_id if self.tenant is None else self.tenant.id


Show = Callable[[Visit], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """The door to every page."""

    database: Database
    hasher: KeyHasher
    meter: Meter
    executor: Executor
    clock: Clock
    sessions: SessionStore
    form_timeout_seconds: float

    def page(self, show: Show, *, known: Collection[str] = (), role: Role = Role.TENANT) -> Endpoint:
        """An address that reads. Its query may have the names `known`, the tenant filter and a zone."""

        async def answer(request: Request) -> Response:
            return await show(await self._visit(request, known, role))

        return self._guarded(answer)

    def form(self, act: Show, *, role: Role = Role.TENANT, max_bytes: int = forms.MAX_FORM_BYTES) -> Endpoint:
        """An address that changes something: the form must have been served in the same session."""

        async def answer(request: Request) -> Response:
            visit = await self._visit(request, (), role)
            try:
                fields = await forms.read_form(
                    request, timeout_seconds=self.form_timeout_seconds, max_bytes=max_bytes
                )
            except forms.BadForm as error:
                raise InvalidRequest(f"{NO_FORM} {str(error).capitalize()}.") from error
            if not forms.is_same(fields.get("form_token"), visit.session.form_token):
                raise PermissionDenied(NO_FORM)
            return await act(_with_form(visit, fields))

        return self._guarded(answer)

    def _guarded(self, answer: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            try:
                return await answer(request)
            except SignedOut as ended:
                return to_sign_in(request, ended.reason)
            except DatabaseUnavailable:
                return await self.notice("Not available", AWAY, status=503)
            except ApiError as refusal:
                return await self.notice("Not shown", refusal.message, status=refusal.status)

        return guarded

    async def render(
        self, template: str, visit: Visit, *, active: str, status: int = 200, **values: Any
    ) -> Response:
        """A page with its navigation, in which `active` is marked."""
        return pages.render(
            template,
            await self.run(assets.load_assets),
            status=status,
            tenant_name=visit.principal.tenant_name,
            form_token=visit.session.form_token,
            is_admin=visit.is_admin,
            active=active,
            carried=visit.carried,
            **({"secret": None, "choices": (), "action": "", "tiles": (), "is_behind": False} | values),
        )

    async def notice(self, title: str, text: str, *, status: int) -> Response:
        return pages.render(
            "notice.html", await self.run(assets.load_assets), status=status, title=title, text=text
        )

    async def run(self, work: Callable[[], T]) -> T:
        """Whatever blocks runs on a thread of the executor."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)

    async def catch_up(self) -> bool:
        """Whether all requests settled by now are in the ledger."""

        def flush() -> bool:
            try:
                self.meter.flush(timeout_seconds=FLUSH_SECONDS)
            except MeterUnavailable:
                return False
            return True

        return await self.run(flush)

    async def principal(self, digest: KeyDigest) -> Principal | None:
        now = self.clock()
        return await self.run(lambda: authenticate(self.database, digest, now=now))

    async def session(self, request: Request) -> Session | None:
        token = token_of(request)
        return await self.run(lambda: self.sessions.use(token)) if token else None

    async def _visit(self, request: Request, known: Collection[str], role: Role) -> Visit:
        """Raises `SignedOut`, `PermissionDenied`, `NotFound` or `InvalidRequest`."""
        session = await self.session(request)
        if session is None:
            raise SignedOut("expired" if SESSION_COOKIE in request.cookies else None)
        principal = await self.principal(session.key_digest)
        if principal is None:
            await self.run(lambda: self.sessions.close(token_of(request)))
            raise SignedOut("refused")
        if role is Role.ADMIN and principal.role is not Role.ADMIN:
            raise PermissionDenied("This page needs an admin key.")
        query = Query(request.query_params.multi_items(), known={*known, TENANT, ZONE})
        return await self.run(lambda: self._seen_by(request, session, principal, query))

    def _seen_by(self, request: Request, session: Session, principal: Principal, query: Query) -> Visit:
        is_admin = principal.role is Role.ADMIN
        visible = list_tenants(self.database) if is_admin else [self._own(principal)]
        asked = query.one(TENANT) if is_admin else query.one(TENANT) or str(principal.tenant_id)
        tenant = _chosen(visible, asked) if asked else None
        return Visit(
            request=request,
            session=session,
            principal=principal,
            query=query,
            tenant=tenant,
            tenants=visible,
            zone=query.zone(ZONE, default=self._zone_of(tenant).key),
            now=self.clock(),
        )

    def _own(self, principal: Principal) -> Tenant:
        return find_tenant(self.database, name=principal.tenant_name)

    def _zone_of(self, tenant: Tenant | None) -> ZoneInfo:
        if tenant is None:
            return UTC_ZONE
        with self.database.read() as connection:
            return zone_named(names_of(connection, tenant.id).time_zone)


def refused(error: BillingError, param: str | None = None) -> InvalidRequest:
    """What billing says no to, as the page tells it."""
    text = str(error)
    return InvalidRequest(f"{text[:1].upper()}{text[1:]}.", param=param)


def to_sign_in(request: Request, reason: str | None) -> Response:
    response = pages.go_to(SIGN_IN if reason is None else f"{SIGN_IN}?ended={reason}")
    # What another site makes a browser send comes without the cookie, and must not be what deletes it.
    if SESSION_COOKIE in request.cookies:
        response.delete_cookie(SESSION_COOKIE, path=HOME, httponly=True, samesite="strict")
    return response


def token_of(request: Request) -> SessionToken:
    return SessionToken(request.cookies.get(SESSION_COOKIE, ""))


def _chosen(visible: Sequence[Tenant], asked: str) -> Tenant:
    try:
        wanted = UUID(asked)
    except ValueError as error:
        raise InvalidRequest("'tenant' must be a tenant's id.", param=TENANT) from error
    found = next((one for one in visible if one.id == wanted), None)
    if found is None:
        raise NotFound("There is no such tenant.", param=TENANT)
    return found


def _with_form(visit: Visit, fields: Mapping[str, str]) -> Visit:
    return Visit(
        request=visit.request,
        session=visit.session,
        principal=visit.principal,
        query=visit.query,
        tenant=visit.tenant,
        tenants=visit.tenants,
        zone=visit.zone,
        now=visit.now,
        form=fields,
    )
