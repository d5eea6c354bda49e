"""`python -m model_worker`: loads a model and serves it until told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import structlog
import uvicorn
from pydantic import ValidationError
from pydantic_settings import CliApp

from model_worker.engine import Engine
from model_worker.kv_cache import KVCacheTooLarge
from model_worker.logs import configure_logs
from model_worker.models import ModelUnavailable
from model_worker.server import create_app
from model_worker.settings import WorkerSettings
from model_worker.tracing import Tracing, TracingUnavailable
from model_worker.wiring import Worker, load_worker

EXIT_UNUSABLE_MODEL = 3
EXIT_ENGINE_DIED = 70
"""BSD's EX_SOFTWARE: the supervisor may start a fresh worker."""

log = structlog.get_logger(__name__)


class DrainingServer(uvicorn.Server):
    """On a signal: refuses new requests, lets open ones end for a while, then ends them with an event."""

    def __init__(self, config: uvicorn.Config, engine: Engine, *, drain_seconds: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_seconds = drain_seconds

    def end(self) -> None:
        """Asks the server to stop; safe from any thread."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.drain()
        await asyncio.to_thread(self._engine.wait_until_drained, self._drain_seconds)
        await asyncio.to_thread(self._engine.stop)
        await super().shutdown(sockets)


def main() -> int:
    """Runs a worker; the exit status says why it ended."""
    try:
        settings = CliApp.run(WorkerSettings, cli_args=sys.argv[1:])
    except ValidationError as error:
        sys.stderr.write(f"headstart worker: {_settings_fault(error)}\n")
        return 2
    configure_logs(settings.log_level, settings.log_format)
    if settings.exit_with_parent:
        threading.Thread(target=_exit_when_stdin_closes, daemon=True).start()
    try:
        with _listen(settings) as listener:
            tracing = Tracing(settings.otlp_endpoint)
            return _serve(load_worker(settings), settings, listener, tracing)
    except TracingUnavailable as error:
        sys.stderr.write(f"headstart worker: {error}\n")
        return 2
    except (ModelUnavailable, KVCacheTooLarge) as error:
        sys.stderr.write(f"headstart worker: {error}\n")
        return EXIT_UNUSABLE_MODEL
    except OSError as error:
        sys.stderr.write(f"headstart worker: {error}\n")
        return 1


def _settings_fault(error: ValidationError) -> str:
    faults = (f"HEADSTART_{str(fault['loc'][0]).upper()}: {fault['msg']}" for fault in error.errors())
    return "; ".join(faults)


def _listen(settings: WorkerSettings) -> socket.socket:
    """Binds before the model loads, so that a taken port is told at once."""
    family = socket.AF_INET6 if ":" in settings.worker_host else socket.AF_INET
    return socket.create_server((settings.worker_host, settings.worker_port), family=family, backlog=512)


def _serve(worker: Worker, settings: WorkerSettings, listener: socket.socket, tracing: Tracing) -> int:
    app = create_app(
        engine=worker.engine,
        card=worker.card,
        files=worker.files,
        max_body_bytes=settings.max_body_bytes,
        tracing=tracing,
    )
    server = DrainingServer(
        uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5),
        worker.engine,
        drain_seconds=settings.drain_seconds,
    )
    worker.engine.start(on_death=server.end)
    try:
        if settings.port_file is not None:
            _write_atomically(settings.port_file, str(listener.getsockname()[1]))
        if worker.card.uncached_reason is not None:
            log.warning("prefixes_not_reused", model=worker.card.model, reason=worker.card.uncached_reason)
        log.info(
            "worker_listening",
            model=worker.card.model,
            port=listener.getsockname()[1],
            kv_codec=worker.card.kv_codec,
            exact=worker.card.exact,
        )
        server.run(sockets=[listener])
    finally:
        worker.engine.stop()
        tracing.close()
    return EXIT_ENGINE_DIED if worker.engine.died else 0


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _exit_when_stdin_closes() -> None:
    """The parent holds the other end of the pipe: when it is gone, however it went, so are we."""
    # The raw descriptor: a reader blocked inside sys.stdin would break the interpreter's own exit.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
