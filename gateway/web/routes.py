"""The dashboard put together: every page's module, behind one door.

Knows which pages there are. Does not know what any of them shows: a new page is a module with
`routes`, and one more line here and in the navigation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from billing.accounts import KeyHasher
from billing.db import Database
from billing.instants import Clock
from billing.meter import Meter
from billing.sealer import Sealer
from gateway.roster import Roster
from gateway.secrets import DeploymentSecret
from gateway.web import assets
from gateway.web.cache import CachePage
from gateway.web.prefixes import PrefixPage
from gateway.web.price_pages import PricePages
from gateway.web.receipts import ReceiptDesk
from gateway.web.requests import RequestPages
from gateway.web.sessions import SessionStore
from gateway.web.sign_in import SignInPages
from gateway.web.spending import SpendingPage
from gateway.web.statement_pages import StatementPages
from gateway.web.tenants import TenantPages
from gateway.web.today import TodayPage
from gateway.web.visits import Visits
from gateway.web.workers import WorkerPage

FORM_PURPOSE = "dashboard-form"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """What the pages are made of."""

    database: Database
    secret: DeploymentSecret
    hasher: KeyHasher
    meter: Meter
    sealer: Sealer
    roster: Roster
    executor: Executor
    clock: Clock
    form_timeout_seconds: float

    def routes(self) -> Sequence[BaseRoute]:
        form_key = self.secret.subkey(FORM_PURPOSE)
        visits = Visits(
            database=self.database,
            hasher=self.hasher,
            meter=self.meter,
            executor=self.executor,
            clock=self.clock,
            sessions=SessionStore(self.database, form_key, self.clock),
            form_timeout_seconds=self.form_timeout_seconds,
        )
        parts = (
            SignInPages(visits=visits, form_key=form_key),
            TodayPage(visits=visits, model_name=self._model_name),
            CachePage(visits=visits, roster=self.roster, secret=self.secret),
            SpendingPage(visits=visits),
            RequestPages(visits=visits, desk=ReceiptDesk(database=self.database, sealer=self.sealer)),
            StatementPages(visits=visits),
            PrefixPage(visits=visits, roster=self.roster, secret=self.secret),
            TenantPages(visits=visits),
            PricePages(visits=visits),
            WorkerPage(visits=visits, roster=self.roster),
        )
        served = (route for part in parts for route in part.routes())
        return (*served, Route(assets.PREFIX + "/{name}", self.show_asset, methods=["GET"]))

    async def show_asset(self, request: Request) -> Response:
        # The first time it reads and compresses some megabytes.
        loop = asyncio.get_running_loop()
        found = (await loop.run_in_executor(self.executor, assets.load_assets)).get(
            request.path_params["name"]
        )
        return assets.serve(found, request) if found is not None else Response(status_code=404)

    def _model_name(self) -> str | None:
        return next((worker.card.model for worker in self.roster.workers if worker.card), None)
