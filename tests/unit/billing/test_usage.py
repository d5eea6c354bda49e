import msgspec
import pytest

from billing.errors import InvalidUsage
from billing.ids import new_request_id
from billing.usage import MAX_TOKENS, TokenCounts, UsageEvent, UsageKind
from tests.unit.billing.builders import admission, final


@pytest.mark.parametrize("name", ["uncached", "read", "write_auto", "write_5m", "write_1h", "output"])
@pytest.mark.parametrize("quantity", [-1, MAX_TOKENS + 1, -(2**70), 2**70])
def test_a_count_that_cannot_be_is_refused_by_name(name, quantity):
    token_class = "input" if name == "uncached" else name
    with pytest.raises(InvalidUsage, match=token_class):
        TokenCounts(**{name: quantity})


def test_more_cached_tokens_than_prompt_tokens_cannot_be_said():
    with pytest.raises(InvalidUsage):
        TokenCounts(uncached=126 - 128, read=128)


@pytest.mark.parametrize("model", ["", "a\0b", "line\nbreak", "\ud800", "m" * 257])
def test_a_model_name_that_cannot_be_stored_is_refused(model):
    with pytest.raises(InvalidUsage, match="model"):
        admission(model=model)


@pytest.mark.parametrize("instant", [-1, 2**63])
def test_an_instant_that_does_not_fit_its_column_is_refused(instant):
    with pytest.raises(InvalidUsage, match="admitted_at"):
        admission(admitted_at=instant)


def test_an_event_survives_its_journal_form():
    event = final(uncached=3, read=5, output=7)
    assert msgspec.json.decode(msgspec.json.encode(event), type=UsageEvent) == event


def test_evidence_becomes_an_aborted_end_with_the_same_counts():
    evidence = final(uncached=3, read=5)
    end = evidence.abandoned()
    assert (end.kind, end.finish_reason, end.counts) == (UsageKind.ABORTED, "abandoned", evidence.counts)


def test_request_ids_are_version_seven_and_never_the_same():
    ids = [new_request_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert {request_id.version for request_id in ids} == {7}
