"""A metering process for tests to kill. Obeys lines on stdin, answers each on stdout.

Arguments: database URL, journal directory. Lines: `admit JSON`, `observe JSON`,
`settle JSON`, `flush`; `fill` and `free` the disk, as seen by this process; or
`rush JSON`, which admits and settles copies of an admission until it is killed.
The answer is the verb, or the name of a refusal.
"""

import resource
import sys
from pathlib import Path

import msgspec

from billing.db import open_database
from billing.errors import MeterRefusal
from billing.ids import new_request_id
from billing.meter import Meter
from billing.usage import Admission, UsageEvent
from tests.unit.billing.builders import T0, final

PATIENCE_SECONDS = 30


def main() -> None:
    with open_database(sys.argv[1]) as db:
        meter = Meter(db, Path(sys.argv[2]), clock=lambda: T0)
        meter.start()
        answer("ready")
        for line in sys.stdin:
            verb, _, argument = line.strip().partition(" ")
            try:
                obey(meter, verb, argument)
                answer(verb)
            except MeterRefusal as refusal:
                answer(type(refusal).__name__)


def answer(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def obey(meter: Meter, verb: str, argument: str) -> None:
    match verb:
        case "admit":
            meter.admit(msgspec.json.decode(argument, type=Admission)).result(PATIENCE_SECONDS)
        case "observe":
            meter.observe(msgspec.json.decode(argument, type=UsageEvent))
        case "settle":
            meter.settle(msgspec.json.decode(argument, type=UsageEvent))
        case "flush":
            meter.flush(timeout_seconds=PATIENCE_SECONDS)
        case "fill":
            # No file may grow: what a full disk does to a write, short of filling one.
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        case "free":
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        case "rush":
            rush(meter, msgspec.json.decode(argument, type=Admission))


def rush(meter: Meter, model: Admission) -> None:
    while True:
        admitted = msgspec.structs.replace(model, request_id=new_request_id())
        meter.admit(admitted).result(PATIENCE_SECONDS)
        answer("admitted", admitted.request_id)
        meter.settle(final(admitted, uncached=7, read=5, output=3))
        answer("settled", admitted.request_id)


if __name__ == "__main__":
    main()
