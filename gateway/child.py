"""The worker process of `headstart serve`: started, watched, started again, and never orphaned.

Knows a command line, a port file and a pipe. Does not know what a worker
does. States: stopped → starting → running → stopped; only `WorkerChild` moves.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

FIRST_BACKOFF_SECONDS: Final = 0.5
LAST_BACKOFF_SECONDS: Final = 30.0
HEALTHY_AFTER_SECONDS: Final = 60.0
TERMINATION_SECONDS: Final = 15.0
POLL_SECONDS: Final = 0.05
log = structlog.get_logger("gateway.child")


class WorkerEnded(Exception):
    """The worker ended before it was listening."""

    def __init__(self, status: int) -> None:
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        super().__init__(f"the model worker ended with {how} before it was ready; its own output says why")
        self.status = status


class WorkerSlow(Exception):
    """The worker did not start listening in time."""


def worker_command(model: str | None) -> list[str]:
    """The command that `headstart serve` runs, without its port file."""
    command = [sys.executable, "-m", "model_worker", "--worker-host", "127.0.0.1", "--worker-port", "0"]
    return [*command, "--model", model] if model is not None else command


class WorkerChild:
    """One worker process at a time. It holds the read end of a pipe whose write end only we have: when we
    are gone, even by `kill -9`, the pipe closes and the worker exits.
    """

    def __init__(self, command: Sequence[str], *, block_seed: str, start_timeout_seconds: float) -> None:
        self._command = command
        self._environment = {**os.environ, "HEADSTART_BLOCK_SEED": block_seed}
        self._start_timeout_seconds = start_timeout_seconds
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> str:
        """Starts the process and returns its URL once it listens. Raises `WorkerEnded` or `WorkerSlow`."""
        assert self._process is None, "one process at a time"
        with tempfile.TemporaryDirectory(prefix="headstart-") as directory:
            port_file = Path(directory) / "port"
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                "--port-file",
                str(port_file),
                "--exit-with-parent",
                stdin=asyncio.subprocess.PIPE,
                env=self._environment,
                # Ctrl-C in a terminal goes to the whole group: the worker must outlive our draining streams.
                start_new_session=True,
            )
            try:
                async with asyncio.timeout(self._start_timeout_seconds):
                    port = await self._port(port_file)
            except TimeoutError as error:
                raise WorkerSlow("the model worker did not start in time") from error
        return f"http://127.0.0.1:{port}"

    async def _port(self, port_file: Path) -> int:
        while True:
            with suppress(FileNotFoundError):
                # A few bytes of a local file, renamed into place whole.
                return int(port_file.read_text("ascii"))  # noqa: ASYNC240
            self.raise_if_ended()
            await asyncio.sleep(POLL_SECONDS)

    def raise_if_ended(self) -> None:
        """Raises `WorkerEnded`."""
        if self._process is not None and self._process.returncode is not None:
            raise WorkerEnded(self._process.returncode)

    async def wait(self) -> int:
        """Waits until the process ends by itself, and returns its status."""
        assert self._process is not None, "nothing to wait for"
        status = await self._process.wait()
        self._process = None
        return status

    async def keep_running(self, point_to: Callable[[str], None]) -> None:
        """Starts the worker again whenever it ends, ever more slowly while it keeps ending. Never returns."""
        loop = asyncio.get_running_loop()
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            began = loop.time()
            status = await self.wait()
            if loop.time() - began >= HEALTHY_AFTER_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            log.error("worker_ended", status=status, restart_in_seconds=backoff)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)
            try:
                point_to(await self.start())
            except (WorkerEnded, WorkerSlow) as error:
                log.error("worker_did_not_start", reason=str(error))
                await self._end_slow_start()

    async def _end_slow_start(self) -> None:
        """A worker that did not start in time is ended, so that the next turn's wait returns."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Asks the process to end, and makes it. Idempotent."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(TERMINATION_SECONDS):
                await process.wait()
        except TimeoutError:
            log.warning("worker_killed", after_seconds=TERMINATION_SECONDS)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
