"""One JSON object per line on standard error.

Knows how a line is shaped and what may stand in it: ids, counts, durations
and names, never a prompt, an answer or a key.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Final, TextIO

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import Processor

MAX_CLIENT_ID_CHARACTERS: Final = 128
_CLIENT_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]+")

_SHARED: Final[tuple[Processor, ...]] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    # Without the frames' variables: prompts and keys are among them.
    structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
)


def configure_logs(level: str, stream: TextIO = sys.stderr) -> None:
    """Sends our lines and every library's through one formatter. Call once, at start."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(sort_keys=False),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Below warning these tell of every connection and statement, and say nothing that our own line does not.
    for name in ("aiohttp", "asyncio", "sqlalchemy", "alembic", "uvicorn"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def sanitised_client_id(value: str | None) -> str | None:
    """A client's own request id, for our log only: None unless it is short and of harmless characters."""
    if value is None or len(value) > MAX_CLIENT_ID_CHARACTERS or _CLIENT_ID.fullmatch(value) is None:
        return None
    return value
