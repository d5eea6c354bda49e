"""A site with days of traffic of two tenants, an operator, and the worker that served them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from billing.accounts import Role
from tests.browser.site import Customer, Site, running_site
from tests.browser.traffic import Traffic, running_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Town:
    site: Site
    traffic: Traffic
    acme: Customer
    beta: Customer
    operator: Customer
    worker_url: str

    def ask(self, customer: Customer, path: str, **query: Any) -> dict[str, Any]:
        """What the API says to a key."""
        answer = httpx.get(
            f"{self.site.url}{path}",
            params=query,
            headers={"authorization": f"Bearer {customer.secret}"},
            timeout=30,
        )
        answer.raise_for_status()
        told: dict[str, Any] = answer.json()
        return told

    def usage(self, customer: Customer, start: datetime, end: datetime, **query: Any) -> dict[str, Any]:
        """`GET /v1/usage` of `[start, end)`."""
        span = {"start_time": int(start.timestamp()), "end_time": int(end.timestamp())}
        return self.ask(customer, "/v1/usage", **span, **query)


@contextmanager
def running_town(home: Path) -> Iterator[Town]:
    with running_site(home) as site:
        traffic = Traffic(site)
        acme, beta = site.add_customer("Acme Chat"), site.add_customer("Beta Research")
        operator = site.add_customer("Operations", role=Role.ADMIN)
        traffic.fill([acme, beta])
        site.gateway.meter.flush()
        with running_worker(traffic.statistics) as worker_url:
            site.point_to(worker_url)
            yield Town(
                site=site,
                traffic=traffic,
                acme=acme,
                beta=beta,
                operator=operator,
                worker_url=worker_url,
            )
