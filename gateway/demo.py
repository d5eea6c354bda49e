"""`make demo`: a two-turn conversation through the official client, and what each turn cost.

Knows the public API alone: it is a client like any other. Figures come from the
answers and from `GET /v1/usage`.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageParam
from rich import box
from rich.console import Console
from rich.table import Table

from billing.money import format_dollars
from gateway.settings import Settings

HANDBOOK = Path(__file__).with_name("demo_handbook.txt")
QUESTIONS = ("How long may I keep a borrowed book?", "And what if I return it late?")
MAX_TOKENS = 32
TABLE_WIDTH = 96


class DemoRefused(Exception):
    """The demo cannot run; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn as the client saw it."""

    answer: str
    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float
    amount_pusd: int
    without_cache_pusd: int

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def verdict(self) -> str:
        return "HIT" if self.cached_tokens else "MISS"


def main() -> int:
    """Runs the demo against a running gateway; 1 with a hint when there is none."""
    try:
        base_url, key = _address_and_key()
        with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            _show(run(client))
    except (DemoRefused, openai.APIConnectionError) as error:
        hint = str(error) if isinstance(error, DemoRefused) else "nothing answers: start `make serve` first"
        sys.stderr.write(f"demo: {hint}\n")
        return 1
    except openai.APIStatusError as error:
        sys.stderr.write(f"demo: the gateway refused: {error.message}\n")
        return 1
    return 0


def run(client: openai.OpenAI) -> list[Turn]:
    """Two turns about a handbook, in a corner of the cache that no earlier run has used."""
    model = client.models.list().data[0].id
    salt = secrets.token_hex(8)
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": HANDBOOK.read_text()}]
    turns: list[Turn] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        turns.append(_ask(client, model, messages, salt))
        messages.append({"role": "assistant", "content": turns[-1].answer})
    return turns


def _ask(client: openai.OpenAI, model: str, messages: list[ChatCompletionMessageParam], salt: str) -> Turn:
    before = _usage(client)
    started = time.perf_counter()
    first_token_seconds = 0.0
    parts: list[str] = []
    usage = None
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_salt": salt},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        text = "".join(choice.delta.content or "" for choice in chunk.choices)
        if text and not first_token_seconds:
            first_token_seconds = time.perf_counter() - started
        parts.append(text)
    after = _usage(client)
    if usage is None or usage.prompt_tokens_details is None:
        raise DemoRefused("the stream ended without usage")
    return Turn(
        answer="".join(parts),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens or 0,
        first_token_seconds=first_token_seconds,
        amount_pusd=after["amount_pusd"] - before["amount_pusd"],
        without_cache_pusd=after["amount_without_cache_pusd"] - before["amount_without_cache_pusd"],
    )


def _usage(client: openai.OpenAI) -> dict[str, Any]:
    answer = client.get("/usage", cast_to=object)
    assert isinstance(answer, dict), "an answer of our own gateway"
    return answer


def _address_and_key() -> tuple[str, str]:
    """From the client's own variables, or those of a `make serve` on this machine."""
    settings = Settings()
    base_url = os.environ.get("OPENAI_BASE_URL") or f"http://{settings.host}:{settings.port}/v1"
    key = os.environ.get("OPENAI_API_KEY")
    if key:
        return base_url, key
    if not settings.first_key_file.is_file():
        raise DemoRefused("no key: start `make serve` first, or set OPENAI_API_KEY")
    return base_url, settings.first_key_file.read_text().strip()


def _show(turns: list[Turn]) -> None:
    table = Table(title="Two turns of one conversation", box=box.SIMPLE)
    for heading in ("turn", "cache"):
        table.add_column(heading)
    for heading in ("prompt", "cached", "computed", "first token", "amount", "without cache"):
        table.add_column(heading, justify="right")
    for number, turn in enumerate(turns, start=1):
        table.add_row(
            str(number),
            turn.verdict,
            f"{turn.prompt_tokens:,}",
            f"{turn.cached_tokens:,}",
            f"{turn.computed_tokens:,}",
            f"{turn.first_token_seconds * 1000:,.0f} ms",
            f"${format_dollars(turn.amount_pusd)}",
            f"${format_dollars(turn.without_cache_pusd)}",
        )
    # Money is exact or not shown: never let a narrow terminal cut it.
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
