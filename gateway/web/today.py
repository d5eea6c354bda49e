"""The first page: what the day used so far, in the zone, or what to do where nothing was used yet.

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

from billing import instants
from billing.reports import GroupUsage, Selection, grouped_usage
from gateway.web import usage
from gateway.web.figures import day_figure
from gateway.web.filters import tenant_choice, zone_choice
from gateway.web.panels import link
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
        is_behind = not await self.visits.catch_up()
        used = await self.visits.run(lambda: self._used(visit))
        day = usage.day_of(visit.now, visit.zone, used)
        return await self.visits.render(
            "today.html",
            visit,
            active="today",
            has_chart=bool(day.used_hours),
            whose=visit.whose[:1].upper() + visit.whose[1:],
            day=day.date,
            zone=visit.zone.key,
            as_of=instants.to_datetime(visit.now).astimezone(visit.zone),
            again=link(HOME, visit.carried),
            action=HOME,
            choices=(*tenant_choice(visit), zone_choice(visit)),
            rows=usage.rows_of(day.totals),
            hours=[(hour, usage.hit_share_row(hour.totals)) for hour in day.used_hours],
            figure_json=day_figure(day),
            is_behind=is_behind,
            curl=_curl(visit.request, self.model_name()),
        )

    def _used(self, visit: Visit) -> Sequence[GroupUsage]:
        hours = usage.hours_of(visit.now, visit.zone)
        return grouped_usage(self.visits.database, Selection(tenant_ids=visit.tenant_ids), hours)


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
