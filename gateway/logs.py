"""One line per event on standard error: a JSON object, or text for a person.

Knows how a line is shaped and what may stand in it: ids, counts, durations and names, never a prompt,
an answer or a key. An exception that is not ours is told by its type and its place alone: its words
may quote what a client sent.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from typing import Final, Literal, TextIO

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

LogFormat = Literal["json", "console"]
MAX_CLIENT_ID_CHARACTERS: Final = 128
WITHHELD: Final = "(withheld: it may quote a client)"
_CLIENT_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]+")
_OUR_PACKAGES: Final = frozenset({"billing", "gateway", "migrations", "model_worker", "prefix_store"})

# Without the frames' variables: prompts and keys are among them.
_TRANSFORMER: Final = ExceptionDictTransformer(show_locals=False)


def _told_exception(exc_info: ExcInfo) -> list[dict[str, object]]:
    told: list[dict[str, object]] = _TRANSFORMER(exc_info)
    words = {str(error) for error in _with_causes(exc_info[1]) if _may_be_quoted(error)}
    for one in told:
        if one["exc_value"] not in words:
            one["exc_value"] = WITHHELD
        one["exc_notes"] = []
    return told


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _may_be_quoted(error: BaseException) -> bool:
    """Ours are written without clients' text; an operating system's has none."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _OUR_PACKAGES


def _without_quoted_tasks(_: WrappedLogger, __: str, line: EventDict) -> EventDict:
    """asyncio describes a lost task by its exception's words, from the second line of a message on."""
    record = line.get("_record")
    if isinstance(record, logging.LogRecord) and record.name == "asyncio":
        line["event"] = str(line["event"]).partition("\n")[0]
    return line


def _exception_as_text(_: WrappedLogger, __: str, line: EventDict) -> EventDict:
    """The innermost last, as Python writes it."""
    told = line.get("exception")
    if isinstance(told, list):
        lines = []
        for one in reversed(told):
            lines += [
                f"  {frame['filename']}:{frame['lineno']} in {frame['name']}" for frame in one["frames"]
            ]
            lines.append(f"{one['exc_type']}: {one['exc_value']}")
        line["exception"] = "\n".join(lines)
    return line


_SHARED: Final[tuple[Processor, ...]] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.ExceptionRenderer(_told_exception),
)


def configure_logs(level: str, stream: TextIO = sys.stderr, *, log_format: LogFormat = "json") -> None:
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
            foreign_pre_chain=[_without_quoted_tasks, *_SHARED],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(log_format, colours=stream.isatty()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Below warning these tell of every connection and statement, and say nothing that our own line does not.
    for name in ("aiohttp", "asyncio", "sqlalchemy", "alembic", "uvicorn"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _renderers(log_format: LogFormat, *, colours: bool) -> list[Processor]:
    if log_format == "console":
        return [_exception_as_text, structlog.dev.ConsoleRenderer(colors=colours)]
    return [structlog.processors.JSONRenderer(sort_keys=False)]


def sanitised_client_id(value: str | None) -> str | None:
    """A client's own request id, for our log only: None unless it is short and of harmless characters."""
    if value is None or len(value) > MAX_CLIENT_ID_CHARACTERS or _CLIENT_ID.fullmatch(value) is None:
        return None
    return value
