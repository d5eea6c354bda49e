"""The list of a tenant's statements, and each of them.

Knows addresses. Does not know what a statement says: `statements` has the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from billing.calendar import month_of, zone_named
from billing.issuing import list_statements
from billing.money import format_cents
from billing.names import names_of
from gateway import statement_answers
from gateway.web.visits import TENANT, ZONE, Visit, Visits

STATEMENTS: Final = "/dashboard/statements"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementPages:
    visits: Visits

    def routes(self) -> Sequence[BaseRoute]:
        visits = self.visits
        return (
            Route(STATEMENTS, visits.page(self.show_list), methods=["GET"]),
            Route(
                STATEMENTS + "/{period}",
                visits.page(self.show_one, known=("format", "preview")),
                methods=["GET"],
            ),
        )

    async def show_list(self, visit: Visit) -> Response:
        tenant_id = visit.own_or_chosen

        def read() -> tuple[object, str]:
            issued = list_statements(self.visits.database, tenant_id=tenant_id)
            with self.visits.database.read() as connection:
                zone = zone_named(names_of(connection, tenant_id).time_zone)
            shown = [(one.statement, format_cents(one.statement.due_cents)) for one in issued]
            return shown, month_of(visit.now, zone)

        statements, this_month = await self.visits.run(read)
        return await self.visits.render(
            "statements.html",
            visit,
            active="statements",
            home=STATEMENTS,
            whose=f"tenant={tenant_id}" if visit.is_admin else "",
            this_month=this_month,
            statements=statements,
        )

    async def show_one(self, visit: Visit) -> Response:
        """Of an open month a preview, which says that it is one."""
        items = [
            (name, value)
            for name, value in visit.request.query_params.multi_items()
            if name not in {TENANT, ZONE}
        ]
        asked = statement_answers.parse(visit.request.path_params["period"], items, default_format="html")
        return await self.visits.run(
            lambda: statement_answers.answer(self.visits.database, visit.own_or_chosen, asked, now=visit.now)
        )
