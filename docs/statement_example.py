"""Draws up the statement that docs/billing.md shows: a month of the demo's traffic, as text and as a picture.

    python -m docs.statement_example

The traffic is that of `make demo`, all month long: a handbook in the prompt, a first question that
computes it and a second one that reuses it, from two projects of one tenant in Berlin. It takes the
road of every request: meter, journal, ledger, statement.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final
from uuid import UUID
from zoneinfo import ZoneInfo

from sqlalchemy import insert, update

from billing import instants, schema
from billing.accounts import KeyHasher, create_key, create_tenant
from billing.db import Database, open_database
from billing.ids import ApiKeyId, ProjectId, TenantId, new_id, new_request_id
from billing.issuing import IssuedStatement, issue_statement
from billing.meter import Meter
from billing.usage import Admission, TokenCounts, UsageEvent, UsageKind
from gateway.bootstrap import prepare_database
from gateway.statements import as_text
from gateway.web.statements import as_html
from tests.browsers import running_chromium

DOCS: Final = Path(__file__).parent
PICTURE: Final = DOCS / "images" / "statement.png"
PAGE: Final = DOCS / "billing.md"
BEGIN: Final = "<!-- statement: python -m docs.statement_example -->"
END: Final = "<!-- end of statement -->"
ZONE: Final = ZoneInfo("Europe/Berlin")
PERIOD: Final = "2026-11"
MODEL: Final = "smollm2-135m-instruct"
# What `make demo` counts: prompt, reused part of the second prompt, and answers.
FIRST_PROMPT, SECOND_PROMPT, REUSED, ANSWER = 738, 789, 769, 32
PROJECTS: Final = {"reading room": 160, "lending desk": 90}
"""Conversations a day."""


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        url = f"sqlite:///{home}/headstart.db"
        with open_database(url) as database:
            prepare_database(url, database)
            issued = state_month(database, Path(home) / "journal")
    write_text(as_text(issued.statement, issued.digest))
    take_picture(as_html(issued.statement, issued.digest))


def state_month(database: Database, journal: Path) -> IssuedStatement:
    """A month of conversations, and its statement."""
    first = datetime(2026, 11, 1, tzinfo=ZONE)
    tenant_id = create_tenant(database, name="Library", now=instants.from_datetime(first)).id
    with database.write() as connection:
        connection.execute(update(schema.tenants).values(time_zone=ZONE.key))
    meter = Meter(database, journal)
    meter.start()
    try:
        for name, per_day in PROJECTS.items():
            project_id, key_id = add_project(database, tenant_id, name, first)
            for event in conversations(tenant_id, project_id, key_id, first, per_day):
                meter.settle(event)
        meter.flush(timeout_seconds=600)
    finally:
        meter.close()
    now = instants.from_datetime(datetime(2026, 12, 1, 9, tzinfo=ZONE))
    return issue_statement(database, tenant_id=tenant_id, period=PERIOD, now=now)


def add_project(database: Database, tenant_id: TenantId, name: str, at: datetime) -> tuple[UUID, ApiKeyId]:
    now = instants.from_datetime(at)
    project_id = new_id()
    with database.write() as connection:
        connection.execute(
            insert(schema.projects).values(id=project_id, tenant_id=tenant_id, name=name, created_at_us=now)
        )
    hasher = KeyHasher(bytes(32))
    key, _ = create_key(
        database, tenant_id=tenant_id, label=name.split(maxsplit=1)[0], hasher=hasher, now=now
    )
    with database.write() as connection:
        belongs = update(schema.api_keys).where(schema.api_keys.c.id == key.id)
        connection.execute(belongs.values(project_id=project_id))
    return project_id, key.id


def conversations(
    tenant_id: TenantId, project_id: UUID, key_id: ApiKeyId, first: datetime, per_day: int
) -> Iterator[UsageEvent]:
    """Two turns each, at random times of opening hours."""
    rng = random.Random(per_day)  # noqa: S311 — no secret, and the same every time
    for number in range(30 * per_day):
        opening = first + timedelta(days=number // per_day, hours=9)
        asked = opening + timedelta(seconds=rng.randrange(9 * 3_600))
        turns = (
            (asked, TokenCounts(uncached=FIRST_PROMPT, output=ANSWER)),
            (
                asked + timedelta(seconds=40),
                TokenCounts(uncached=SECOND_PROMPT - REUSED, read=REUSED, output=ANSWER),
            ),
        )
        for moment, counts in turns:
            admitted_at = instants.from_datetime(moment)
            admission = Admission(
                request_id=new_request_id(),
                tenant_id=tenant_id,
                api_key_id=key_id,
                project_id=ProjectId(project_id),
                model=MODEL,
                admitted_at=admitted_at,
            )
            yield UsageEvent(
                admission=admission,
                kind=UsageKind.FINAL,
                counts=counts,
                finished_at=instants.later(admitted_at, timedelta(seconds=2)),
                delivered=counts.output,
                finish_reason="stop",
            )


def write_text(text: str) -> None:
    """Between its marks in the page."""
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n```text\n{text}```\n\n{END}{after}", "utf-8")


def take_picture(page_text: str) -> None:
    with running_chromium() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 700}, device_scale_factor=1.5)
        page.set_content(page_text)
        page.screenshot(path=PICTURE, full_page=True)


if __name__ == "__main__":
    main()
