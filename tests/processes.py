"""Starting this project's own processes in tests, and ending exactly those."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 180.0
STOP_SECONDS = 30.0


class ProcessFailed(AssertionError):
    """A process ended or stayed silent; the message carries what it wrote."""


def clean_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without any `HEADSTART_*` of the developer's, offline, plus `changes`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")}
    return kept | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | dict(changes)


@contextmanager
def running_process(
    *arguments: str, log: Path, environment: Mapping[str, str], stdin: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    """`python ARGUMENTS` until the block ends; output goes to `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=clean_environment(environment),
        )
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for_file(path: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    """The content of a file that `process` writes when it is ready."""
    deadline = time.monotonic() + START_SECONDS
    while not path.exists():
        if process.poll() is not None:
            raise ProcessFailed(f"exit status {process.returncode}:\n{log.read_text()}")
        if time.monotonic() > deadline:
            raise ProcessFailed(f"not ready after {START_SECONDS} s:\n{log.read_text()}")
        time.sleep(0.02)
    return path.read_text()
