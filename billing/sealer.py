"""The thread that issues receipts a moment after events are posted.

Knows when to look and when to rest. Does not know what a receipt is. Posting never waits for a
signature: it only notes that a receipt is due. While many events wait to be posted, sealing
waits, for a while: whoever asks for a receipt has it sealed at once all the same.

States of a sealer: `new → running → closed`. Whatever a dead process left due is sealed by the
next look of any sealer on the same database.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from sqlalchemy.exc import StatementError

from billing import instants, receipt_chain
from billing.db import Database
from billing.errors import DatabaseUnavailable
from billing.ids import RequestId, TenantId
from billing.instants import Clock
from billing.receipt_keys import SigningKey

LOOK_INTERVAL: Final = timedelta(milliseconds=500)
"""Between two looks: then whoever waits for the database has it."""
LOOK_BATCHES: Final = 128
"""Sealed in one look at most, so that closing does not take long, however much is due."""
BUSY_EVENTS: Final = 256
"""So many events that wait to be posted go first."""
PATIENT_LOOKS: Final = 20
"""As often in a row a look gives way to them."""
COUNTED_DUES: Final = 10_000
"""More than so many that are due are not counted."""

_logger = logging.getLogger(__name__)


class Sealer:
    """Thread-safe. `start()` it once, `close()` it once, after the meter: it seals what that posted last."""

    def __init__(
        self,
        db: Database,
        key: SigningKey,
        *,
        num_unposted: Callable[[], int] = lambda: 0,
        clock: Clock = instants.now,
    ) -> None:
        self.public_key: Final = key.public
        self._db = db
        self._key = key
        self._num_unposted = num_unposted
        self._clock = clock
        self._closing = threading.Event()
        self._publishing = threading.Lock()
        self._is_published = False
        self._thread = threading.Thread(target=self._run, name="billing-sealer", daemon=True)
        self._num_due = 0
        self._num_sealed = 0
        self._num_given_way = 0

    def start(self) -> None:
        """Needs a migrated database, but waits for none."""
        self._thread.start()

    def close(self) -> None:
        """Idempotent. What cannot be sealed now stays due, for the next process."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def seal_request(self, *, tenant_id: TenantId, request_id: RequestId) -> int:
        """What is due for one request, at once; returns how many. Raises DatabaseUnavailable."""
        self._publish()
        return receipt_chain.seal_request(
            self._db, self._key, tenant_id=tenant_id, request_id=request_id, now=self._clock()
        )

    def seal_some(self) -> int:
        """What has been due for longest; returns how many. Raises DatabaseUnavailable."""
        self._publish()
        total = 0
        for _ in range(LOOK_BATCHES):
            sealed = receipt_chain.seal_next(self._db, self._key, now=self._clock())
            total += sealed
            if not sealed:
                break
        self._num_sealed += total
        return total

    def stats(self) -> dict[str, int]:
        """For metrics: what was `sealed` here since start, and what was still `due` after the last look."""
        return {"sealed": self._num_sealed, "due": self._num_due}

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            is_closing = self._closing.wait(LOOK_INTERVAL.total_seconds())
            if self._gives_way() and not is_closing:
                continue
            try:
                self.seal_some()
                self._num_due = receipt_chain.num_due(self._db, at_most=COUNTED_DUES)
            except (DatabaseUnavailable, StatementError) as error:
                _logger.error("receipts: not sealed yet: %s", error)

    def _gives_way(self) -> bool:
        is_busy = self._num_unposted() >= BUSY_EVENTS and self._num_given_way < PATIENT_LOOKS
        self._num_given_way = self._num_given_way + 1 if is_busy else 0
        return is_busy

    def _publish(self) -> None:
        """Before the first receipt names the key."""
        with self._publishing:
            if not self._is_published:
                receipt_chain.publish_key(self._db, self._key.public, now=self._clock())
                self._is_published = True
