"""What is left of exactness when everything is killed: clients, events, ledger, roll-ups, statements.

    python benchmarks/billing_chaos.py                 200 kills, about ten minutes
    python benchmarks/billing_chaos.py --kills 20      fewer, no file written

Twelve clients ask two gateways without end, streaming and not, and hang up now and then. A worker answers
from a script over real HTTP; a process of its own does nothing but admit and settle. All meter into one
PostgreSQL. At random moments one of them is killed with -9 and started again: a gateway, the poster, the
database; or no file of a gateway may grow for a while, as on a full disk, which ends in a kill or in room.
Then everything is started once more and left to settle, and these must be equal: what clients were told they
used and what was billed for it, token by token; events and requests; events rated again and the ledger; the
ledger, the roll-ups and the statements, to the picodollar. An answer that broke off must be billed, by at
least what came less the 32 tokens that a killed gateway may not have noted yet.
Exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.metadata import version

from peers.record import REPOSITORY, write_result
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(REPOSITORY))

from tests.chaos import load, world

KILLS = 200
CLIENTS = 12

console = Console(width=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=2026)
    options = parser.parse_args()
    begin = time.monotonic()
    with world(options.seed) as made:
        with load(made, CLIENTS, options.seed):
            while made.kills < options.kills:
                made.strike()
                if made.kills % 20 == 0:
                    console.print(f"{made.kills} kills, {len(made.received):,} requests")
        made.settle()
        balance = made.balance()
    table = Table(title=f"{made.kills} kills in {time.monotonic() - begin:.0f} s")
    table.add_column("what")
    table.add_column("count", justify="right")
    for what, count in {**made.faults, **balance.figures, "differences": len(balance.differences)}.items():
        table.add_row(what, f"{count:,}")
    console.print(table)
    for difference in balance.differences:
        console.print(f"[red]difference[/red] {difference}")
    if options.kills >= KILLS:
        write_result(
            "billing_chaos",
            {
                "versions": {name: version(name) for name in ("sqlalchemy", "psycopg")},
                "seed": options.seed,
                "kills": made.kills,
                "faults": dict(made.faults),
                "figures": balance.figures,
                "differences": balance.differences,
            },
        )
    return 1 if balance.differences else 0


if __name__ == "__main__":
    sys.exit(main())
