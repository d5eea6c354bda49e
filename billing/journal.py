"""Local records that outlive the process, until the database has them.

Knows files, checksums and which records are done with. Does not know what an
event costs, nor databases.

A journal is a directory that one process holds at a time:

    lock              held (flock) by the live process
    journal-id        the directory's name for itself, made once
    NNNNNNNNNN.log    segments, appended to in order
    rejected.log      records that the database can never take, kept for a person

A record is one line, `length checksum payload`: eight hexadecimal digits of the
payload's length in bytes, eight of its CRC-32, and the payload, JSON without
newlines. A process appends to a segment of its own and never to an older one,
so a crash can tear nothing but the last line of a segment. A torn last line is
dropped and counted. Damage anywhere else is no crash's doing: JournalCorrupted.

A segment is deleted when it is no longer written to and every request that it
tells of is done.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from uuid import UUID

import msgspec

from billing.errors import JournalCorrupted, JournalInUse
from billing.ids import JournalId, RequestId, new_id
from billing.usage import UsageEvent

SEGMENT_BYTES: Final = 4 * 1024 * 1024

_SEGMENT_DIGITS: Final = 10
_SEGMENT_GLOB: Final = "[0-9]" * _SEGMENT_DIGITS + ".log"
_HEADER_BYTES: Final = 18  # eight digits, a space, eight digits, a space
_HEXADECIMAL: Final = frozenset(b"0123456789abcdef")

Purpose = Literal["evidence", "settled"]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`evidence`: what is known of a request that goes on. `settled`: what it came to."""

    purpose: Purpose
    event: UsageEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What former processes left: `settled` in order, the last `evidence` of each other request."""

    settled: tuple[UsageEvent, ...]
    evidence: dict[RequestId, UsageEvent]
    torn_records: int


_DECODER = msgspec.json.Decoder(Record)
_ENCODER = msgspec.json.Encoder()


def encode_record(record: Record) -> bytes:
    """One line, newline included."""
    payload = _ENCODER.encode(record)
    return b"%08x %08x %s\n" % (len(payload), zlib.crc32(payload), payload)


def decode_segment(content: bytes, *, name: str) -> tuple[list[Record], int]:
    """The records of a segment, and 1 if its last line was torn, or else 0.

    Raises JournalCorrupted for damage that a torn last line does not explain.
    """
    records: list[Record] = []
    offset = 0
    while offset < len(content):
        end = _record_end(content, offset)
        if end is None:
            _require_torn_tail(content, offset, name)
            return records, 1
        try:
            records.append(_DECODER.decode(content[offset + _HEADER_BYTES : end - 1]))
        except msgspec.MsgspecError as error:
            # The checksum holds, so this is no damage: other code wrote it.
            raise JournalCorrupted(
                f"{name}: the record at byte {offset} is not understood: {error}"
            ) from error
        offset = end
    return records, 0


@dataclass(slots=True, kw_only=True)
class _Segment:
    """The file that is appended to. `is_torn`: it ends in half a record, so nothing may follow."""

    path: Path
    fd: int
    size_bytes: int = 0
    is_torn: bool = False


class Journal:
    """The records of one directory. Thread-safe. Open until `close()`.

    An append makes a record safe from the death of the process; `sync()` makes
    all appended records safe from the death of the machine.
    """

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Takes the directory. Raises JournalInUse, or JournalCorrupted when its id cannot be read."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._mutex = threading.Lock()
        self._unfinished: dict[Path, set[RequestId]] = {}
        self._segments_of: defaultdict[RequestId, set[Path]] = defaultdict(set)
        self._lock_fd = _take_lock(directory)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._lock_fd)
            self.id = _journal_id(directory)
            self._former = self._segment_paths()
            self._numbers = itertools.count(1 + max((int(path.stem) for path in self._former), default=0))
            self._active = self._open_segment()
            self._unfinished[self._active.path] = set()
            undo.pop_all()
        self._is_closed = False

    def recover(self) -> Recovered:
        """Reads what former processes left. Raises JournalCorrupted. Call it once, before any append."""
        settled: list[UsageEvent] = []
        evidence: dict[RequestId, UsageEvent] = {}
        num_torn = 0
        for path in self._former:
            records, torn = decode_segment(path.read_bytes(), name=path.name)
            num_torn += torn
            self._unfinished[path] = set()
            for record in records:
                self._remember(path, record.event.request_id)
                if record.purpose == "settled":
                    settled.append(record.event)
                else:
                    evidence[record.event.request_id] = record.event
        for event in settled:
            evidence.pop(event.request_id, None)
        self._delete_finished_segments()
        return Recovered(settled=tuple(settled), evidence=evidence, torn_records=num_torn)

    def append(self, record: Record) -> None:
        """One write. Raises OSError when the record could not be written whole; then it is not there."""
        line = encode_record(record)
        with self._mutex:
            if self._active.is_torn:
                os.close(self._replace_active(self._open_segment()))
            self._write(line)
            self._remember(self._active.path, record.event.request_id)

    def sync(self) -> None:
        """Waits for the disk, and begins a new segment when this one is large. Raises OSError.

        For the one thread that may wait; appends by others go on meanwhile.
        """
        with self._mutex:
            is_large = self._active.size_bytes >= self._segment_bytes
            # A second descriptor of the same file, because an append may replace the first.
            fd = os.dup(self._active.fd)
        try:
            if is_large:
                opened = self._open_segment()
                with self._mutex:
                    os.close(self._replace_active(opened))
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def finish(self, request_ids: Iterable[RequestId]) -> None:
        """These requests need no record any more."""
        with self._mutex:
            for request_id in request_ids:
                for path in self._segments_of.pop(request_id, ()):
                    self._unfinished[path].discard(request_id)
            self._delete_finished_segments()

    def reject(self, event: UsageEvent) -> None:
        """Keeps the event in `rejected.log`, synced, for a person to look at. Raises OSError."""
        with self._directory.joinpath("rejected.log").open("ab") as file:
            file.write(encode_record(Record(purpose="settled", event=event)))
            file.flush()
            os.fdatasync(file.fileno())

    def num_bytes(self) -> int:
        """Of all segments, on disk now. For metrics."""
        with self._mutex:
            paths = list(self._unfinished)
        total = 0
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # deleted since
                total += path.stat().st_size
        return total

    def close(self) -> None:
        """Syncs and lets the directory go. Idempotent. Raises OSError when the disk refuses."""
        with self._mutex:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.ExitStack() as steps:  # last in, first out; each is taken even if one fails
                steps.callback(os.close, self._lock_fd)
                steps.callback(os.close, self._active.fd)
                steps.callback(os.fdatasync, self._active.fd)
                if not self._unfinished[self._active.path]:
                    self._active.path.unlink(missing_ok=True)

    def _segment_paths(self) -> list[Path]:
        return sorted(self._directory.glob(_SEGMENT_GLOB))

    def _open_segment(self) -> _Segment:
        """A new, empty file."""
        path = self._directory.joinpath(f"{next(self._numbers):0{_SEGMENT_DIGITS}d}.log")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, mode=0o600)
        _sync_directory(self._directory)
        return _Segment(path=path, fd=fd)

    def _replace_active(self, opened: _Segment) -> int:
        """Returns the descriptor of the former segment, for the caller to close."""
        former, self._active = self._active, opened
        self._unfinished[opened.path] = set()
        self._delete_finished_segments()
        return former.fd

    def _write(self, line: bytes) -> None:
        try:
            written = os.write(self._active.fd, line)
        except OSError:
            # Unknown how much arrived. Half a record is harmless at the end of a segment alone.
            self._active.is_torn = True
            raise
        self._active.size_bytes += written
        if written != len(line):
            self._active.is_torn = True
            raise OSError(f"wrote {written} of {len(line)} bytes to {self._active.path.name}")

    def _remember(self, path: Path, request_id: RequestId) -> None:
        self._unfinished[path].add(request_id)
        self._segments_of[request_id].add(path)

    def _delete_finished_segments(self) -> None:
        active = self._active.path
        for path in [path for path, left in self._unfinished.items() if not left and path != active]:
            path.unlink(missing_ok=True)
            del self._unfinished[path]


def _record_end(content: bytes, offset: int) -> int | None:
    """Offset after the whole, sound record that begins here; None if none does."""
    header = content[offset : offset + _HEADER_BYTES]
    length = _declared_length(header)
    if length is None:
        return None
    end = offset + _HEADER_BYTES + length + 1
    payload = content[offset + _HEADER_BYTES : end - 1]
    if end > len(content) or content[end - 1 : end] != b"\n" or header[9:17] != b"%08x" % zlib.crc32(payload):
        return None
    return end


def _declared_length(header: bytes) -> int | None:
    if len(header) < _HEADER_BYTES or header[8:9] != b" " or header[17:18] != b" ":
        return None
    if not _HEXADECIMAL.issuperset(header[:8]):
        return None
    return int(header[:8], 16)


def _require_torn_tail(content: bytes, offset: int, name: str) -> None:
    """A torn last line is shorter than it says. A power cut may leave zeros where bytes were due."""
    tail = content[offset:].rstrip(b"\0")
    length = _declared_length(tail[:_HEADER_BYTES])
    longest = _HEADER_BYTES - 1 if length is None else _HEADER_BYTES + length + 1
    if len(tail) > longest or _has_sound_record_after(content, offset):
        raise JournalCorrupted(f"{name}: damaged at byte {offset}, before the last record")


def _has_sound_record_after(content: bytes, offset: int) -> bool:
    while (newline := content.find(b"\n", offset)) >= 0:
        offset = newline + 1
        if _record_end(content, offset) is not None:
            return True
    return False


def _take_lock(directory: Path) -> int:
    fd = os.open(directory.joinpath("lock"), os.O_RDWR | os.O_CREAT, mode=0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise JournalInUse(f"{directory} is held by another process") from error
    return fd


def _journal_id(directory: Path) -> JournalId:
    """Reads the directory's own id, or makes it. The caller holds the lock."""
    path = directory.joinpath("journal-id")
    with contextlib.suppress(FileNotFoundError):
        try:
            return JournalId(UUID(path.read_text("ascii").strip()))
        except ValueError as error:
            raise JournalCorrupted(f"{path}: not an id") from error
    made = JournalId(new_id())
    partial = directory.joinpath("journal-id.partial")
    with partial.open("w", encoding="ascii") as file:
        file.write(f"{made}\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _sync_directory(directory)
    return made


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
