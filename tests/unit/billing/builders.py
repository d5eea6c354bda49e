"""Values that billing tests are made of."""

from uuid import UUID

from billing.ids import ApiKeyId, PriceVersionId, RequestId, TenantId, new_id, new_request_id
from billing.instants import Microseconds
from billing.money import format_dollars
from billing.prices import ModelPrice, PriceVersion
from billing.receipt_keys import SigningKey
from billing.receipts import Receipt, ReceiptLine, SignedReceipt, sign, written_instant
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


def receipt_after(
    before: SignedReceipt | None, *, key: SigningKey, tenant: int = 1, output: int = 5
) -> Receipt:
    """Of 10 uncached, 20 read and some output tokens, at a tenth off; the next in its chain."""
    units = {TokenClass.INPUT: 3_000_000, TokenClass.READ: 300_000, TokenClass.OUTPUT: 15_000_000}
    quantities = {TokenClass.INPUT: 10, TokenClass.READ: 20, TokenClass.OUTPUT: output}
    without_cache = units | {TokenClass.READ: units[TokenClass.INPUT]}
    lines = tuple(
        ReceiptLine(
            token_class=one,
            quantity=quantities[one],
            price_version_id=UUID(int=9),
            list_unit_pusd=unit,
            discount_basis_points=1_000,
            unit_pusd=unit * 9 // 10,
            list_amount_pusd=quantities[one] * unit,
            amount_pusd=quantities[one] * unit * 9 // 10,
            amount_without_cache_pusd=quantities[one] * without_cache[one] * 9 // 10,
        )
        for one, unit in units.items()
    )
    amount = sum(line.amount_pusd for line in lines)
    full = sum(line.amount_without_cache_pusd for line in lines)
    listed = sum(line.list_amount_pusd for line in lines)
    sequence = 1 if before is None else before.receipt.sequence + 1
    return Receipt(
        tenant_id=UUID(int=tenant),
        sequence=sequence,
        previous=bytes(32).hex() if before is None else before.digest.hex(),
        event_id=UUID(int=1_000 + sequence),
        request_id=UUID(int=2_000 + sequence),
        original_id=None,
        kind="final",
        api_key_id=UUID(int=3),
        project_id=None,
        model="modèle “é”",
        usage_state="reported",
        finish_reason="stop",
        worker="worker-0",
        tier="device",
        deepest_block=None,
        miss_reason="diverged",
        tokens=dict.fromkeys(TokenClass, 0) | quantities,
        prompt_tokens=30,
        cached_tokens=20,
        written_tokens=0,
        delivered_tokens=output,
        lines=lines,
        list_amount=format_dollars(listed),
        list_amount_pusd=listed,
        amount=format_dollars(amount),
        amount_pusd=amount,
        amount_without_cache=format_dollars(full),
        amount_without_cache_pusd=full,
        saved=format_dollars(full - amount),
        saved_pusd=full - amount,
        admitted_at=written_instant(T0),
        accounted_at=written_instant(T0),
        finished_at=written_instant(T0),
        issued_at=written_instant(T0),
        key_id=key.public.id,
    )


def signed_chain(key: SigningKey, length: int, *, tenant: int = 1, output: int = 5) -> list[SignedReceipt]:
    chain: list[SignedReceipt] = []
    for _ in range(length):
        before = chain[-1] if chain else None
        chain.append(sign(receipt_after(before, key=key, tenant=tenant, output=output), key))
    return chain
