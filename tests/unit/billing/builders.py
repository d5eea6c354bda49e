"""Values that billing tests are made of."""

from uuid import UUID

from billing.ids import ApiKeyId, PriceVersionId, RequestId, TenantId, new_id, new_request_id
from billing.instants import Microseconds
from billing.prices import ModelPrice, PriceVersion
from billing.usage import Admission, TokenClass, TokenCounts, UsageEvent, UsageKind

MODEL = "test-model"
T0 = Microseconds(1_772_323_200_000_000)  # 2026-03-01T00:00:00Z


def admission(
    *,
    tenant_id: UUID | None = None,
    api_key_id: UUID | None = None,
    request_id: UUID | None = None,
    model: str = MODEL,
    admitted_at: int = T0,
) -> Admission:
    return Admission(
        request_id=RequestId(request_id or new_request_id()),
        tenant_id=TenantId(tenant_id or new_id()),
        api_key_id=ApiKeyId(api_key_id or new_id()),
        model=model,
        admitted_at=Microseconds(admitted_at),
    )


def final(
    admitted: Admission | None = None, *, kind: UsageKind = UsageKind.FINAL, **counts: int
) -> UsageEvent:
    admitted = admitted or admission()
    return UsageEvent(
        admission=admitted,
        kind=kind,
        counts=TokenCounts(**counts),
        finished_at=Microseconds(admitted.admitted_at + 1_000_000),
        delivered=counts.get("output", 0),
        finish_reason="stop",
        first_token_ns=12_345_678,
    )


def model_price(**units: int) -> ModelPrice:
    """`units` by token class; a class that is left out has no price."""
    return ModelPrice(
        model=MODEL,
        versions={
            TokenClass(name): PriceVersion(
                id=PriceVersionId(new_id()),
                model=MODEL,
                token_class=TokenClass(name),
                unit_pusd=unit,
                effective_from=Microseconds(0),
            )
            for name, unit in units.items()
        },
    )
