"""What a client is told: times as the API writes them, never too short."""

import pytest

from gateway.limits import duration, retry_headers


@pytest.mark.parametrize(
    ("wait_us", "told"),
    [
        (0, "0ms"),
        (1, "1ms"),
        (120_000, "120ms"),
        (999_001, "1s"),
        (1_000_000, "1s"),
        (1_500_000, "1.5s"),
        (60_000_000, "1m0s"),
        (360_000_000, "6m0s"),
        (3_661_001_000, "1h1m1.001s"),
    ],
)
def test_durations_are_written_as_openai_does(wait_us, told):
    assert duration(wait_us) == told


def test_a_wait_is_rounded_up():
    assert retry_headers(1) == {"retry-after": "1", "retry-after-ms": "1"}
    assert retry_headers(1_000_001) == {"retry-after": "2", "retry-after-ms": "1001"}
