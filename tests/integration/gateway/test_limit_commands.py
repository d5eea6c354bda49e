"""`headstart budgets` and `headstart limits`, on a ledger with usage."""

import pytest
from typer.testing import CliRunner

from billing import instants
from billing.accounts import KeyHasher, create_key, create_tenant
from billing.db import open_database
from billing.errors import (
    BillingError,
    BudgetBelowPosted,
    InvalidAmount,
    InvalidBudget,
    InvalidLimit,
    UnknownBudget,
    UnknownTenant,
)
from billing.ids import new_id, new_request_id
from billing.meter import Meter
from billing.usage import Admission, TokenCounts, UsageEvent, UsageKind
from gateway.bootstrap import prepare_database
from gateway.cli import app


@pytest.fixture
def key(tmp_path, monkeypatch):
    """A key of `acme`, whose ledger has a million uncached tokens of this month."""
    monkeypatch.setenv("HEADSTART_HOME", str(tmp_path))
    url = f"sqlite:///{tmp_path / 'headstart.db'}"
    with open_database(url) as database:
        prepare_database(url, database)
        now = instants.now()
        tenant = create_tenant(database, name="acme", now=now)
        made, _ = create_key(database, tenant_id=tenant.id, label="ci", hasher=KeyHasher(bytes(32)), now=now)
        admission = Admission(
            request_id=new_request_id(),
            tenant_id=tenant.id,
            api_key_id=made.id,
            model="any",
            admitted_at=now,
        )
        counts = TokenCounts(uncached=1_000_000)
        meter = Meter(database, tmp_path / "journal")
        meter.start()
        meter.settle(UsageEvent(admission=admission, kind=UsageKind.FINAL, counts=counts, finished_at=now))
        meter.close()
    return made


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_budgets_are_set_listed_changed_and_removed(key):
    made = run("budgets", "set", "--tenant", "acme", "--limit", "250.50").strip()
    run("budgets", "set", "--tenant", "acme", "--limit", "9", "--key", key.id, "--period", "total")
    listed = run("budgets", "list", "--tenant", "acme")
    assert "250.50" in listed
    assert f"ci ({key.prefix}…)" in listed
    assert run("budgets", "set", "--tenant", "acme", "--limit", "300").strip() == made
    run("budgets", "remove", made)
    assert made not in run("budgets", "list", "--tenant", "acme")


def test_limits_are_set_and_shown(key):
    run("limits", "set", "--tenant", "acme", "--requests-per-minute", 600, "--cached-weight", 1_000)
    run("limits", "set", "--tenant", "acme", "--key", key.id, "--concurrent-requests", 4)
    shown = run("limits", "show", "--tenant", "acme")
    assert "600" in shown
    assert "10.00 %" in shown
    assert key.prefix in shown


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (("budgets", "set", "--tenant", "acme", "--limit", "0.01"), BudgetBelowPosted),
        (("budgets", "set", "--tenant", "acme", "--limit", "-5"), InvalidAmount),
        (("budgets", "set", "--tenant", "acme", "--limit", "99999999"), InvalidBudget),
        (("budgets", "set", "--tenant", "acme", "--limit", "5", "--key", new_id()), InvalidBudget),
        (("budgets", "set", "--tenant", "nobody", "--limit", "5"), UnknownTenant),
        (("budgets", "remove", new_id()), UnknownBudget),
        (("limits", "set", "--tenant", "acme", "--cached-weight", "10001"), InvalidLimit),
        (("limits", "set", "--tenant", "acme", "--key", new_id()), InvalidLimit),
    ],
)
def test_what_cannot_be_is_refused(key, arguments, refusal):
    with pytest.raises(BillingError) as refused:
        run(*arguments)
    assert type(refused.value) is refusal
