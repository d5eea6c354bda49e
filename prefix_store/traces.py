"""Recorded requests as blocks: which format a file is in, and what it says.

Knows the formats of public traces. Does not know caches or policies.

Three formats, told apart by their first line, gzip'd or not:

- Mooncake: `timestamp` (ms) and `hash_ids`, one id per 512-token block. An id names a whole prefix.
- Coding-agent sessions: a conversation a line; `requests` with `t` (s) and `hash_ids` of
  `block_size` tokens, local to the conversation.
- Agent text: `timestamp` (µs) and `input`, the prompt as text, which a tokenizer turns into tokens.

Whatever is wrong with a file is a `TraceError` that says where.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from prefix_store.blocks import TokenIds, token_bytes

MOONCAKE_BLOCK_SIZE = 512
TEXT_BLOCK_SIZE = 16
MAX_LINE_BYTES = 64 * 2**20
MAX_BLOCKS = 50_000_000
SESSION_SPACING_SECONDS = 60.0
"""Conversations that are recorded each on a clock of its own start so far apart."""

_GZIP_MAGIC = b"\x1f\x8b"
_NO_BLOCK = -1

Encode: TypeAlias = Callable[[str], TokenIds]


class TraceError(ValueError):
    """A trace that cannot be replayed: where, and why."""

    def __init__(self, path: Path, line_number: int | None, reason: str) -> None:
        self.path, self.line_number, self.reason = path, line_number, reason
        place = str(path) if line_number is None else f"{path}, line {line_number}"
        super().__init__(f"{place}: {reason}")


class TraceFormat(Enum):
    MOONCAKE = "Mooncake"
    CODING_SESSIONS = "coding-agent sessions"
    AGENT_TEXT = "agent text"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """`blocks` are ids that stand for whole prefixes: equal ids, equal prefixes. `seconds` from the start."""

    seconds: float
    blocks: tuple[int, ...]
    tokens: TokenIds | None = None
    """Where the trace has text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in the order of the file, time never going back. A block always follows the same one."""

    name: str
    format: TraceFormat
    block_size: int
    requests: tuple[TracedRequest, ...]

    @property
    def num_references(self) -> int:
        return sum(len(request.blocks) for request in self.requests)


def read_trace(path: Path, *, encode: Encode | None = None, text_block_size: int = TEXT_BLOCK_SIZE) -> Trace:
    """Reads a trace of any format. `encode` turns the text of one into tokens.

    Raises `TraceError`.
    """
    try:
        with path.open("rb") as file:
            records = _records(path, file)
            first = next(records, None)
            if first is None:
                raise TraceError(path, None, "the file is empty")
            return _read(path, chain([first], records), first[1], encode, text_block_size)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(path, None, str(error)) from error


def _read(
    path: Path,
    records: Iterable[tuple[int, dict[str, Any]]],
    first: dict[str, Any],
    encode: Encode | None,
    text_block_size: int,
) -> Trace:
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    blocks = _Blocks(path)
    if "hash_ids" in first:
        format_, block_size = TraceFormat.MOONCAKE, MOONCAKE_BLOCK_SIZE
        requests = [_mooncake_request(blocks, number, record) for number, record in records]
    elif "requests" in first:
        format_, block_size = TraceFormat.CODING_SESSIONS, _count(path, 1, first, "block_size")
        requests = list(_session_requests(blocks, records, block_size))
        requests.sort(key=lambda request: request.seconds)
    elif "input" in first:
        if encode is None:
            raise TraceError(path, None, "prompts are text: a tokenizer is needed to replay it")
        format_, block_size = TraceFormat.AGENT_TEXT, text_block_size
        requests = [_text_request(blocks, number, record, encode, block_size) for number, record in records]
    else:
        raise TraceError(path, 1, "no known format: neither 'hash_ids', 'requests' nor 'input' is there")
    return Trace(name=name, format=format_, block_size=block_size, requests=_from_zero(requests))


def mix_in_scan(trace: Trace, *, blocks_per_request: int, seed: int) -> tuple[Trace, tuple[bool, ...]]:
    """The trace with about as many blocks again of requests that come once and share nothing.

    They come at random times. Also says of each request whether it is an original one.
    """
    rng = random.Random(seed)  # noqa: S311 - a reproducible mix, not a secret
    fresh = 1 + max(max(request.blocks, default=0) for request in trace.requests)
    last = trace.requests[-1].seconds
    mixed = [(request.seconds, True, request) for request in trace.requests]
    for _ in range(trace.num_references // blocks_per_request):
        blocks = tuple(range(fresh, fresh + blocks_per_request))
        scan = TracedRequest(seconds=rng.uniform(0.0, last), blocks=blocks)
        mixed.append((scan.seconds, False, scan))
        fresh += blocks_per_request
    mixed.sort(key=lambda entry: entry[0])
    scanned = Trace(
        name=f"{trace.name} with scan",
        format=trace.format,
        block_size=trace.block_size,
        requests=tuple(request for _, _, request in mixed),
    )
    return scanned, tuple(is_original for _, is_original, _ in mixed)


class _Blocks:
    """Ids as they are given out and checked: each stands for one prefix in the whole trace."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: dict[int, int] = {}
        self._ids: dict[tuple[int, bytes | int], int] = {}
        self._num_references = 0

    def named(self, line_number: int, hash_ids: object, base: int | None = None) -> tuple[int, ...]:
        """Ids from a file. With a `base`, they are local to what that stands for."""
        if not isinstance(hash_ids, list) or not all(type(one) is int and one >= 0 for one in hash_ids):
            raise TraceError(self._path, line_number, "hash_ids must be a list of whole numbers, 0 or more")
        blocks = (
            hash_ids
            if base is None
            else [self._ids.setdefault((base, one), len(self._ids)) for one in hash_ids]
        )
        self._count(line_number, len(blocks))
        before = _NO_BLOCK
        for block in blocks:
            if self._before.setdefault(block, before) != before:
                raise TraceError(
                    self._path, line_number, f"block {block} follows two different blocks: it names no prefix"
                )
            before = block
        return tuple(blocks)

    def chained(self, line_number: int, tokens: TokenIds, block_size: int) -> tuple[int, ...]:
        """Ids of the whole blocks of a prompt."""
        data = token_bytes(tokens)
        step = block_size * tokens.itemsize
        self._count(line_number, len(data) // step)
        before, blocks = _NO_BLOCK, []
        for start in range(0, len(data) - step + 1, step):
            before = self._ids.setdefault((before, data[start : start + step]), len(self._ids))
            blocks.append(before)
        return tuple(blocks)

    def _count(self, line_number: int, num_blocks: int) -> None:
        self._num_references += num_blocks
        if self._num_references > MAX_BLOCKS:
            raise TraceError(self._path, line_number, f"more than {MAX_BLOCKS} blocks")


def _mooncake_request(blocks: _Blocks, line_number: int, record: dict[str, Any]) -> TracedRequest:
    return TracedRequest(
        seconds=_time(blocks, line_number, record, "timestamp") / 1e3,
        blocks=blocks.named(line_number, record.get("hash_ids")),
    )


def _session_requests(
    blocks: _Blocks, records: Iterable[tuple[int, dict[str, Any]]], block_size: int
) -> Iterator[TracedRequest]:
    for session, (line_number, record) in enumerate(records):
        path = blocks._path
        if _count(path, line_number, record, "block_size") != block_size:
            raise TraceError(
                path, line_number, f"block_size differs from {block_size}, that of the first line"
            )
        requests = record.get("requests")
        if not isinstance(requests, list):
            raise TraceError(path, line_number, "requests must be a list")
        for request in requests:
            if not isinstance(request, dict):
                raise TraceError(path, line_number, "a request must be an object")
            yield TracedRequest(
                seconds=session * SESSION_SPACING_SECONDS + _time(blocks, line_number, request, "t"),
                blocks=blocks.named(line_number, request.get("hash_ids"), session),
            )


def _text_request(
    blocks: _Blocks, line_number: int, record: dict[str, Any], encode: Encode, block_size: int
) -> TracedRequest:
    text = record.get("input")
    if not isinstance(text, str):
        raise TraceError(blocks._path, line_number, "input must be text")
    tokens = encode(text)
    return TracedRequest(
        seconds=_time(blocks, line_number, record, "timestamp") / 1e6,
        blocks=blocks.chained(line_number, tokens, block_size),
        tokens=tokens,
    )


def _records(path: Path, file: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not blank."""
    magic = file.read(len(_GZIP_MAGIC))
    file.seek(0)
    lines = gzip.GzipFile(fileobj=file) if magic == _GZIP_MAGIC else file
    number = 0
    while line := lines.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(path, number, f"a line of more than {MAX_LINE_BYTES} bytes")
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(path, number, f"not JSON: {error}") from error
        if not isinstance(record, dict):
            raise TraceError(path, number, "not a JSON object")
        yield number, record


def _time(blocks: _Blocks, line_number: int, record: dict[str, Any], field: str) -> float:
    value = record.get(field)
    # Not finite, negative or absurd alike fail the comparison.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**62:
        raise TraceError(blocks._path, line_number, f"{field} must be a time, 0 or more")
    return float(value)


def _count(path: Path, line_number: int, record: dict[str, Any], field: str) -> int:
    value = record.get(field)
    if type(value) is not int or value < 1:
        raise TraceError(path, line_number, f"{field} must be a whole number, 1 or more")
    return value


def _from_zero(requests: list[TracedRequest]) -> tuple[TracedRequest, ...]:
    """On a clock that starts with the first; time stands still where the file would step back."""
    start = requests[0].seconds if requests else 0.0
    latest, on_clock = 0.0, []
    for one in requests:
        latest = max(latest, one.seconds - start)
        on_clock.append(TracedRequest(seconds=latest, blocks=one.blocks, tokens=one.tokens))
    return tuple(on_clock)
