"""What the journal keeps, what it forgives (a torn tail) and what it does not (anything else)."""

import os
import subprocess
import sys
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billing.errors import JournalCorrupted, JournalInUse
from billing.journal import Journal, Record, decode_segment, encode_record
from tests.unit.billing.builders import admission, final

ADMITTED = admission()
RECORDS = [Record(purpose="settled", event=final(uncached=index, output=index)) for index in range(5)]
LINES = [encode_record(record) for record in RECORDS]
SEGMENT = b"".join(LINES)


def segments(directory):
    return sorted(path.name for path in directory.glob("0*.log"))


def recovered_events(directory):
    journal = Journal(directory)
    try:
        return list(journal.recover().settled)
    finally:
        journal.close()


def test_a_whole_segment_gives_back_its_records():
    assert decode_segment(SEGMENT, name="s") == (RECORDS, 0)
    assert decode_segment(b"", name="s") == ([], 0)


@given(st.integers(0, len(SEGMENT)))
def test_a_segment_cut_anywhere_keeps_every_whole_record_before_the_cut(cut):
    records, torn = decode_segment(SEGMENT[:cut], name="s")
    ends = [sum(map(len, LINES[: count + 1])) for count in range(len(LINES))]
    assert records == [record for record, end in zip(RECORDS, ends, strict=True) if end <= cut]
    assert torn == (cut not in (0, *ends))


@given(st.integers(0, len(SEGMENT) - 1), st.integers(1, 255))
@settings(max_examples=300)
def test_a_changed_byte_is_never_read_as_a_record(position, change):
    damaged = bytearray(SEGMENT)
    damaged[position] ^= change
    last_begins = len(SEGMENT) - len(LINES[-1])
    try:
        records, torn = decode_segment(bytes(damaged), name="s")
    except JournalCorrupted:
        return
    # Damage that is forgiven is damage to the last record, which a crash may explain.
    assert position >= last_begins - 1
    assert torn == 1
    assert records in (RECORDS[:-1], RECORDS[:-2])


@pytest.mark.parametrize("index", range(len(LINES) - 1))
def test_damage_before_the_last_record_is_loud(index):
    lines = [*LINES]
    lines[index] = lines[index][:40] + b"X" + lines[index][41:]
    with pytest.raises(JournalCorrupted, match="byte"):
        decode_segment(b"".join(lines), name="s")


def test_a_wrong_length_cannot_hide_the_records_after_it():
    with pytest.raises(JournalCorrupted):
        decode_segment(b"ffffffff" + LINES[0][8:] + LINES[1], name="s")


def test_zeros_at_the_end_are_a_torn_tail():
    assert decode_segment(SEGMENT + bytes(4096), name="s") == (RECORDS, 1)
    assert decode_segment(SEGMENT[:-30] + bytes(4096), name="s") == (RECORDS[:-1], 1)


def test_text_that_is_no_record_is_loud():
    with pytest.raises(JournalCorrupted):
        decode_segment(SEGMENT + b"a note that somebody added to this file\n", name="s")


def test_a_sound_record_of_another_program_is_loud():
    payload = b'{"purpose":"surprise"}'
    line = b"%08x %08x %s\n" % (len(payload), zlib.crc32(payload), payload)
    with pytest.raises(JournalCorrupted, match="not understood"):
        decode_segment(line, name="s")


def test_records_outlive_the_process_that_wrote_them(tmp_path):
    journal = Journal(tmp_path)
    for record in RECORDS:
        journal.append(record)
    journal.close()
    assert recovered_events(tmp_path) == [record.event for record in RECORDS]
    assert recovered_events(tmp_path) == [record.event for record in RECORDS]  # reading finishes nothing


def test_finished_records_leave_no_file(tmp_path):
    journal = Journal(tmp_path)
    for record in RECORDS:
        journal.append(record)
    journal.close()
    journal = Journal(tmp_path)
    events = journal.recover().settled
    journal.finish(event.request_id for event in events)
    journal.close()
    assert segments(tmp_path) == []


def test_a_segment_stays_until_all_its_requests_are_finished(tmp_path):
    journal = Journal(tmp_path, segment_bytes=1)
    journal.append(RECORDS[0])
    journal.append(RECORDS[1])
    journal.sync()  # begins a new segment
    assert len(segments(tmp_path)) == 2
    journal.finish([RECORDS[0].event.request_id])
    assert len(segments(tmp_path)) == 2
    journal.finish([RECORDS[1].event.request_id])
    assert len(segments(tmp_path)) == 1
    journal.close()
    assert segments(tmp_path) == []


def test_the_last_evidence_of_a_request_is_kept_until_it_is_settled(tmp_path):
    journal = Journal(tmp_path)
    other = admission()
    journal.append(Record(purpose="evidence", event=final(ADMITTED, uncached=1)))
    journal.append(Record(purpose="evidence", event=final(ADMITTED, uncached=1, output=2)))
    journal.append(Record(purpose="evidence", event=final(other, uncached=5)))
    journal.append(Record(purpose="settled", event=final(other, uncached=5, output=9)))
    journal.close()
    journal = Journal(tmp_path)
    recovered = journal.recover()
    journal.close()
    assert recovered.evidence == {ADMITTED.request_id: final(ADMITTED, uncached=1, output=2)}
    assert [event.request_id for event in recovered.settled] == [other.request_id]


def test_a_directory_has_one_holder_and_keeps_its_name(tmp_path):
    journal = Journal(tmp_path)
    with pytest.raises(JournalInUse):
        Journal(tmp_path)
    journal.close()
    again = Journal(tmp_path)
    assert again.id == journal.id
    again.close()


def test_a_journal_with_a_damaged_name_is_refused_and_let_go(tmp_path):
    Journal(tmp_path).close()
    tmp_path.joinpath("journal-id").write_text("not an id\n")
    for _ in range(2):
        with pytest.raises(JournalCorrupted):
            Journal(tmp_path)


def test_closing_twice_is_closing_once(tmp_path):
    journal = Journal(tmp_path)
    journal.close()
    journal.close()


def test_a_torn_record_of_a_killed_process_is_dropped_and_counted(tmp_path):
    journal = Journal(tmp_path)
    journal.append(RECORDS[0])
    journal.append(RECORDS[1])
    journal.close()
    path = tmp_path.joinpath(segments(tmp_path)[0])
    os.truncate(path, path.stat().st_size - 7)
    journal = Journal(tmp_path)
    recovered = journal.recover()
    journal.close()
    assert recovered.settled == (RECORDS[0].event,)
    assert recovered.torn_records == 1


def test_a_rejected_event_is_kept_for_a_person(tmp_path):
    journal = Journal(tmp_path)
    journal.reject(RECORDS[0].event)
    journal.reject(RECORDS[1].event)
    journal.close()
    kept, torn = decode_segment(tmp_path.joinpath("rejected.log").read_bytes(), name="rejected.log")
    assert (kept, torn) == (RECORDS[:2], 0)
    assert recovered_events(tmp_path) == []


FILL_THE_DISK = """
import resource, signal, sys
from pathlib import Path
from billing.journal import Journal, Record
from tests.unit.billing.builders import final

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal(Path(sys.argv[1]))
limit = 1500  # bytes a file may have: the second or third record is cut short
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
written = refused = 0
while not refused:
    try:
        journal.append(Record(purpose="settled", event=final(uncached=written)))
        written += 1
    except OSError:
        refused += 1
journal.append(Record(purpose="settled", event=final(uncached=written)))  # in a new segment
print(written + 1)
journal.close()
"""


def test_a_short_write_is_refused_and_what_follows_is_still_readable(tmp_path):
    script = subprocess.run(
        [sys.executable, "-c", FILL_THE_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    events = recovered_events(tmp_path)
    assert [event.counts.uncached for event in events] == list(range(int(script.stdout)))
