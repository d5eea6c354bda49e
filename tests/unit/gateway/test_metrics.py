"""What is counted, and that it stays bounded, however many tenants there are."""

from __future__ import annotations

import re
from uuid import UUID

from prometheus_client.parser import text_string_to_metric_families

from billing.accounts import Principal, Role
from billing.ids import ApiKeyId, TenantId
from gateway.edge.canonical import UsageCounts
from gateway.metrics import OTHER, OUTCOMES, Generated, Metrics, Outcome, RequestFacts, TenantLabels
from gateway.phases import PHASES, Timing

NUM_TENANTS = 10_000
MODEL = "tiny-chat"


def principal(number: int, name: str | None = None) -> Principal:
    return Principal(
        tenant_id=TenantId(UUID(int=number)),
        tenant_name=f"tenant {number}" if name is None else name,
        api_key_id=ApiKeyId(UUID(int=number)),
        role=Role.TENANT,
        expires_at=None,
    )


def facts(who: Principal | None, outcome: Outcome = "answered") -> RequestFacts:
    return RequestFacts(
        endpoint="chat_completions",
        status=200,
        outcome=outcome,
        seconds=0.2,
        timings=[Timing(phase, 0, 1_000_000) for phase in PHASES],
        principal=who,
        refusal=None if outcome == "answered" else "invalid_request_error",
        generated=Generated(
            model=MODEL,
            counts=UsageCounts(uncached=10, read=5, output=3),
            cache_status="partial",
            cached_by_tier={"device": 5},
            miss_reason="diverged",
            first_token_seconds=0.05,
        ),
    )


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample but those of this process, which come and go by themselves."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
        if not sample.name.startswith("process_")
    }


def of_tenant(metrics: Metrics, tenant: str, outcome: str = "answered") -> float | None:
    return metrics.registry.get_sample_value(
        "headstart_tenant_requests_total", {"tenant": tenant, "outcome": outcome}
    )


def test_ten_thousand_tenants_are_a_bounded_number_of_series_and_bytes() -> None:
    limit = 100
    metrics = Metrics(max_tenants=limit)
    for number in range(limit):
        for outcome in OUTCOMES:
            metrics.count_request(facts(principal(number), outcome))
    at_limit, bytes_at_limit = samples(metrics), len(metrics.exposition())
    for number in range(NUM_TENANTS):
        for outcome in OUTCOMES:
            metrics.count_request(facts(principal(number), outcome))
    after = samples(metrics)
    assert after.keys() == at_limit.keys()
    assert len(after) < 1_000
    # The same lines: only the digits of their values have grown.
    assert len(metrics.exposition()) < 1.1 * bytes_at_limit < 100_000
    assert of_tenant(metrics, OTHER) == NUM_TENANTS - limit
    tenants = {label for (_, labels) in after for name, label in labels if name == "tenant"}
    assert len(tenants) == limit + 1


def test_no_counter_ever_goes_down_or_away_and_the_tenants_add_up() -> None:
    metrics = Metrics(max_tenants=3)
    before = samples(metrics)
    for turn in range(40):
        metrics.count_request(facts(principal(turn % 9)))
        now = samples(metrics)
        assert before.keys() <= now.keys()
        assert all(now[key] >= value for key, value in before.items())
        before = now
    by_tenant = [value for (name, _), value in before.items() if name == "headstart_tenant_requests_total"]
    assert sum(by_tenant) == 40


def test_a_tenant_stays_where_it_was_counted_first() -> None:
    labels = TenantLabels(2)
    assert [labels.label(principal(number)) for number in (1, 2, 3)] == ["tenant 1", "tenant 2", OTHER]
    assert [labels.label(principal(number)) for number in (3, 2, 1)] == [OTHER, "tenant 2", "tenant 1"]


def test_a_tenant_called_other_is_not_mistaken_for_all_others() -> None:
    labels = TenantLabels(1)
    assert labels.label(principal(7, OTHER)) == str(UUID(int=7))
    assert labels.label(principal(8)) == OTHER


def test_no_tenant_at_all_can_be_told_apart() -> None:
    metrics = Metrics(max_tenants=0)
    metrics.count_request(facts(principal(1)))
    assert of_tenant(metrics, OTHER) == 1


def test_a_request_without_a_key_is_nobodys() -> None:
    metrics = Metrics(max_tenants=3)
    metrics.count_request(facts(None, "refused"))
    assert [of_tenant(metrics, OTHER, outcome) for outcome in OUTCOMES] == [0, 0, 0, 0]


def test_names_that_need_escaping_stay_one_label() -> None:
    metrics = Metrics(max_tenants=3)
    name = 'a "quoted" \\ name'
    metrics.count_request(facts(principal(1, name)))
    assert of_tenant(metrics, name) == 1
    assert re.search(r'tenant="a \\"quoted\\" \\\\ name"', metrics.exposition().decode())
    assert any(("tenant", name) in labels for _, labels in samples(metrics))


def test_credits_are_counted_as_what_they_are_worth() -> None:
    metrics = Metrics(max_tenants=0)
    metrics.count_credit(-1_250_000_000_000)
    assert metrics.registry.get_sample_value("headstart_credits_total") == 1
    assert metrics.registry.get_sample_value("headstart_credited_dollars_total") == 1.25
