"""The first page: what the UTC day used so far, or what to do where nothing was used yet.

Knows the day's report and a first request to paste. Does not know how its figures are written.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from billing import calendar, instants
from billing.reports import UsageReport, usage_report
from gateway.web import usage
from gateway.web.figures import day_figure
from gateway.web.visits import HOME, Visit, Visits

_HOST: Final = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TodayPage:
    """`model_name` is a model that can be asked for now, if one is known."""

    visits: Visits
    model_name: Callable[[], str | None]

    def routes(self) -> Sequence[BaseRoute]:
        return (Route(HOME, self.visits.page(self.show), methods=["GET"]),)

    async def show(self, visit: Visit) -> Response:
        start, end = usage.day_of(visit.now)
        is_behind = not await self.visits.catch_up()
        report = await self.visits.run(
            lambda: usage_report(
                self.visits.database,
                tenant_id=visit.own_or_chosen,
                start=start,
                end=end,
                cutter=calendar.hours,
            )
        )
        return await self._page(visit, report, is_behind=is_behind)

    async def _page(self, visit: Visit, report: UsageReport, *, is_behind: bool) -> Response:
        hours = usage.hours_of(report)
        return await self.visits.render(
            "today.html",
            visit,
            active="today",
            has_chart=bool(hours),
            whose=visit.principal.tenant_name if visit.tenant is None else visit.tenant.name,
            day=instants.to_datetime(report.start),
            as_of=instants.to_datetime(visit.now),
            rows=usage.rows_of(report),
            hours=[(hour, usage.hit_share_row(hour.totals)) for hour in hours],
            figure_json=day_figure(hours, start=report.start, end=report.end),
            is_behind=is_behind,
            curl=_curl(visit.request, self.model_name()),
        )


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
