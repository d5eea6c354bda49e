"""Reserve, narrow, settle, crash and expire in any order: a budget is never overrun, on both databases."""

import time
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select

from billing import budgets, instants, ledger, limits, schema
from billing.budgets import Period, Scope, set_budget
from billing.errors import BudgetBelowPosted, BudgetExceeded
from billing.ids import JournalId, ProcessId, new_id
from billing.instants import Microseconds
from billing.ledger import Grant, Owner
from billing.limits import Limits, RateLimited, set_limits
from billing.prices import RecentBook
from billing.usage import Estimate, UsageKind
from tests.integration.billing.conftest import new_account
from tests.integration.billing.ledger_checks import rows
from tests.unit.billing.builders import T0, final

LEASE = timedelta(minutes=1)
LIMIT_PUSD = 600_000_000
TOKENS = st.integers(0, 8)


class BudgetMachine(RuleBasedStateMachine):
    """One tenant with a budget and limits; open requests are admissions with what they may use."""

    open_requests = Bundle("open_requests")
    db: object

    def __init__(self) -> None:
        super().__init__()
        self.account = new_account(self.db, f"tenant {new_id()}")
        self.now = T0
        self.owner = Owner(journal_id=JournalId(new_id()), process_id=ProcessId(new_id()))
        self.book = RecentBook(monotonic_ns=time.monotonic_ns)
        set_budget(self.db, self.scope, period=Period.MONTH, limit_pusd=LIMIT_PUSD, now=T0)
        concurrent = Limits(concurrent_requests=6, tokens_per_minute=200)
        set_limits(self.db, concurrent, tenant_id=self.account.tenant.id, api_key_id=None, now=T0)

    @property
    def scope(self) -> Scope:
        return Scope(tenant_id=self.account.tenant.id)

    @rule(target=open_requests, prompt=TOKENS, output=TOKENS)
    def reserve(self, prompt, output):
        admission = self.account.admission(admitted_at=self.now)
        estimate = Estimate(prompt=prompt, output=output)
        with self.db.write() as connection:
            (outcome,) = ledger.admit_priced(
                connection, [(admission, estimate)], book=self.book, owner=self.owner, lease=LEASE
            )
        assert isinstance(outcome, Grant | BudgetExceeded | RateLimited)
        return (admission, estimate) if isinstance(outcome, Grant) else None

    @rule(request=open_requests)
    def narrow(self, request):
        """The worker has told that all of the prompt is in its cache."""
        if request is not None:
            admission, estimate = request
            known = Estimate(prompt=estimate.prompt, read=estimate.prompt, output=estimate.output)
            with self.db.write() as connection:
                ledger.narrow_all(connection, {admission.request_id: (admission, known)})

    @rule(request=consumes(open_requests), part=st.integers(0, 100), times=st.integers(1, 2))
    def settle(self, request, part, times):
        """With a part of what was reserved, told once or twice. Nothing is a release."""
        if request is not None:
            admission, estimate = request
            read, output = (count * part // 100 for count in (estimate.prompt, estimate.output))
            for _ in range(times):
                self.post(final(admission, read=read, output=output))

    @rule(request=consumes(open_requests))
    def crash(self, request):
        """Another sweeps what a dead process left, and then the dead one's journal tells the same."""
        if request is not None:
            ended = final(request[0], kind=UsageKind.ABORTED).abandoned()
            self.post(ended)
            self.post(ended)

    @rule(seconds=st.integers(1, 90))
    def expire(self, seconds):
        self.now = instants.later(self.now, timedelta(seconds=seconds))
        with self.db.write() as connection:
            budgets.expire(connection, self.now)
            limits.expire(connection, self.now)

    @rule(limit_pusd=st.integers(0, LIMIT_PUSD))
    def change(self, limit_pusd):
        try:
            set_budget(self.db, self.scope, period=Period.MONTH, limit_pusd=limit_pusd, now=self.now)
        except BudgetBelowPosted:
            assert self.balance().posted_pusd > limit_pusd

    @invariant()
    def balances_are_sums(self):
        mine = select(schema.requests.c.id).where(schema.requests.c.tenant_id == self.account.tenant.id)
        with self.db.read() as connection:
            ids = set(connection.execute(mine).scalars())
        reservations = [row for row in rows(self.db, schema.reservations) if row.request_id in ids]
        held = [row for row in reservations if row.state == "held"]
        balance = self.balance()
        assert balance.reserved_pusd == sum(row.amount_pusd for row in held)
        for row in reservations:
            assert row.settled_pusd is None or row.settled_pusd <= row.amount_pusd
        events = {row.id for row in rows(self.db, schema.usage_events) if row.request_id in ids}
        lines = [row for row in rows(self.db, schema.ledger_lines) if row.event_id in events]
        assert balance.posted_pusd == sum(line.amount_pusd for line in lines)
        settled = sum(row.settled_pusd or 0 for row in reservations)
        if all(row.state != "expired" for row in reservations):
            assert balance.posted_pusd == settled
            assert balance.posted_pusd + balance.reserved_pusd <= LIMIT_PUSD

    @invariant()
    def open_requests_are_holds(self):
        (limit,) = [row for row in rows(self.db, schema.limits) if row.tenant_id == self.account.tenant.id]
        holds = [row for row in rows(self.db, schema.limit_holds) if row.limit_id == limit.id]
        assert limit.open_requests == sum(row.state == "held" for row in holds) <= 6

    def balance(self):
        (budget,) = [row for row in rows(self.db, schema.budgets) if row.tenant_id == self.account.tenant.id]
        (found,) = [row for row in rows(self.db, schema.budget_balances) if row.budget_id == budget.id]
        return found

    def post(self, event):
        with self.db.write() as connection:
            ledger.post_all(connection, [event], owner=self.owner, lease=LEASE, now=Microseconds(self.now))


@pytest.mark.slow
def test_no_order_of_events_overruns_a_budget(db, account):
    machine = type("Machine", (BudgetMachine,), {"db": db})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
