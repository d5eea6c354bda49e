"""The addresses at which usage and money are read: a tenant's own, and everybody's.

Knows who may read what. Does not know how anything is added up or shown: each answer
has one owner, and whatever blocks runs on a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from billing import instants
from billing.accounts import Principal, Role
from billing.db import Database
from billing.errors import DatabaseUnavailable, MeterUnavailable
from billing.meter import Meter
from billing.sealer import Sealer
from gateway import organization, promises, receipt_answers, statement_answers, usage
from gateway.asgi import ClientGone, read_json_body
from gateway.auth import Authenticator, bearer_key
from gateway.edge import openai
from gateway.edge.errors import PermissionDenied, ServiceUnavailable
from gateway.queries import Query

POSTING_SECONDS: Final = 2
"""How long a report waits for what was just settled to be posted."""

REPORT_SECONDS: Final = 10
"""How long the body of a report may take to arrive."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """Every handler."""

    authenticator: Authenticator
    database: Database
    meter: Meter
    sealer: Sealer
    executor: Executor
    count_credit: Callable[[int], None]
    """Told the amount, in picodollars, of each that is new."""

    def routes(self) -> Sequence[BaseRoute]:
        return (
            Route("/v1/usage", self.show_usage, methods=["GET"]),
            Route("/v1/organization/usage/completions", self.show_completions, methods=["GET"]),
            Route("/v1/organization/costs", self.show_costs, methods=["GET"]),
            Route("/v1/organization/broken_promises", self.credit_promise, methods=["POST"]),
            Route("/v1/statements", self.list_statements, methods=["GET"]),
            Route("/v1/statements/{period}", self.show_statement, methods=["GET"]),
            Route("/v1/receipts/keys", self.show_receipt_keys, methods=["GET"]),
            Route("/v1/receipts/{request_id}", self.show_receipts, methods=["GET"]),
        )

    async def show_usage(self, request: Request) -> Response:
        principal = await self._principal(request)
        items, now = request.query_params.multi_items(), instants.now()
        return await self._json(lambda: usage.read_usage(self.database, principal.tenant_id, items, now=now))

    async def show_completions(self, request: Request) -> Response:
        await self._admin(request)
        query = organization.parse_usage_query(request.query_params.multi_items(), now=instants.now())
        return await self._json(lambda: organization.read_usage_page(self.database, query))

    async def show_costs(self, request: Request) -> Response:
        await self._admin(request)
        query = organization.parse_costs_query(request.query_params.multi_items(), now=instants.now())
        return await self._json(lambda: organization.read_costs_page(self.database, query))

    async def credit_promise(self, request: Request) -> Response:
        """For admin keys: the request may be any tenant's."""
        await self._admin(request)
        Query(request.query_params.multi_items(), known=())
        try:
            body = await read_json_body(
                request.receive,
                request.headers,
                max_bytes=promises.MAX_REPORT_BYTES,
                timeout_seconds=REPORT_SECONDS,
            )
        except ClientGone:
            return Response()  # nobody reads it
        broken = promises.parse(body)
        return await self._json(lambda: promises.answer(self.database, broken, count=self.count_credit))

    async def list_statements(self, request: Request) -> Response:
        principal = await self._principal(request)
        Query(request.query_params.multi_items(), known=())
        return await self._json(lambda: statement_answers.as_list(self.database, principal.tenant_id))

    async def show_statement(self, request: Request) -> Response:
        """The caller's own. Final ones are kept; a preview is drawn up now, when it is asked for."""
        principal = await self._principal(request)
        asked = statement_answers.parse(
            request.path_params["period"], request.query_params.multi_items(), default_format="json"
        )
        return await self._posted(
            lambda: statement_answers.answer(self.database, principal.tenant_id, asked, now=instants.now())
        )

    async def show_receipt_keys(self, request: Request) -> Response:
        """For everybody: a receipt is checked by whoever it is shown to."""
        Query(request.query_params.multi_items(), known=())
        body = await self._read(lambda: receipt_answers.key_set(self.database, self.sealer.public_key))
        return Response(body, media_type=openai.JSON_TYPE)

    async def show_receipts(self, request: Request) -> Response:
        """The caller's own; what is posted by now is sealed before it is looked for."""
        principal = await self._principal(request)
        Query(request.query_params.multi_items(), known=())
        asked = receipt_answers.parse(request.path_params["request_id"])
        return await self._json(
            lambda: receipt_answers.answer(self.database, self.sealer, principal.tenant_id, asked)
        )

    async def _principal(self, request: Request) -> Principal:
        return await self.authenticator.authenticate(bearer_key(request.headers.get("authorization")))

    async def _admin(self, request: Request) -> None:
        """Raises `PermissionDenied` for a key that is its tenant's alone."""
        if (await self._principal(request)).role is not Role.ADMIN:
            raise PermissionDenied("This needs an admin key: headstart keys create --admin.")

    async def _json(self, read: Callable[[], bytes]) -> Response:
        return Response(await self._posted(read), media_type=openai.JSON_TYPE)

    async def _posted(self, read: Callable[[], T]) -> T:
        """What is read once that which was settled by now is posted. Raises `ServiceUnavailable`."""

        def read_posted() -> T:
            self.meter.flush(timeout_seconds=POSTING_SECONDS)
            return read()

        return await self._read(read_posted)

    async def _read(self, read: Callable[[], T]) -> T:
        """Raises `ServiceUnavailable`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.executor, read)
        except (DatabaseUnavailable, MeterUnavailable) as error:
            raise ServiceUnavailable("Usage cannot be read at the moment.") from error
