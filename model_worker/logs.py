"""The worker's log lines: one JSON object each on standard error, or text for a person.

Knows how a line is shaped. What stands in it are ids, counts, durations and names; token ids and text
never do. Libraries' lines go the same way.
"""

from __future__ import annotations

import logging
import sys
from typing import Final, Literal, TextIO

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import Processor
from transformers.utils import logging as transformers_logging

LogFormat = Literal["json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]

# Without the frames' variables: prompts are among them.
_TRANSFORMER: Final = ExceptionDictTransformer(show_locals=False)


def configure_logs(level: LogLevel, log_format: LogFormat, stream: TextIO = sys.stderr) -> None:
    """Call once, at start."""
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if log_format == "json":
        shared.append(structlog.processors.ExceptionRenderer(_TRANSFORMER))
        renderer: Processor = structlog.processors.JSONRenderer()
        # Bars are drawn with carriage returns, between the lines.
        transformers_logging.disable_progress_bar()
    else:
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.dev.ConsoleRenderer(colors=stream.isatty())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("asyncio", "uvicorn", "urllib3", "filelock", "huggingface_hub", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
