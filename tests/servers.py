"""Real servers for tests: each on a free port, in a temporary folder, stopped at the end.

Knows how to start and stop a server of each kind. Does not know what tests do
with it. Every kind is a context manager `running_<kind>()` that yields its address.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.debian import find_or_install

START_TIMEOUT_SECONDS = 60
STOP_TIMEOUT_SECONDS = 20
UNPRIVILEGED_USERS = ("postgres", "nobody")


class ServerMissingError(RuntimeError):
    """A server's programs are not installed; the message says what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresServer:
    """A running PostgreSQL that trusts local connections."""

    port: int
    socket_dir: Path
    process_id: int

    def url(self, database: str = "postgres") -> str:
        return f"postgresql+psycopg://headstart@127.0.0.1:{self.port}/{database}"


# These databases live for one test run, and what is killed in tests is mostly our side.
NOT_DURABLE = ("fsync=off", "full_page_writes=off")


@contextmanager
def running_postgres(settings: Sequence[str] = NOT_DURABLE) -> Iterator[PostgresServer]:
    """Starts a throw-away PostgreSQL; raises ServerMissingError with what to install."""
    binaries = postgres_binaries()
    # Outside pytest's folders: a socket's path has about 100 bytes, and the server's user must reach it.
    folder = Path(tempfile.mkdtemp(prefix="hs-pg-"))
    try:
        become_owner = _unprivileged_prefix(folder)
        yield from _serve_postgres(binaries, folder, become_owner, settings)
    finally:
        shutil.rmtree(folder)


def postgres_binaries() -> Path:
    """The newest installed server's program folder. Installs Debian's package where that is possible."""
    found = find_or_install(find_postgres_binaries, "postgresql")
    if found is None:
        raise ServerMissingError(
            "these tests run a real PostgreSQL and found none: install Debian's `postgresql` package, "
            "or put `initdb` and `postgres` on PATH"
        )
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def find_postgres_binaries() -> Path | None:
    installed = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if (path / "postgres").exists()]
    if installed:
        return max(installed, key=lambda path: int(path.parent.name))
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path and shutil.which("postgres") else None


def _unprivileged_prefix(folder: Path) -> list[str]:
    """PostgreSQL refuses to run as root: the command that drops to a plain user, who then owns the folder."""
    if os.geteuid() != 0:
        return []
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = next(known[name] for name in UNPRIVILEGED_USERS if name in known)
    os.chown(folder, user.pw_uid, user.pw_gid)
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]


def _serve_postgres(
    binaries: Path, folder: Path, become_owner: list[str], settings: Sequence[str]
) -> Iterator[PostgresServer]:
    cluster = folder / "cluster"
    initdb = [binaries / "initdb", "--pgdata", cluster, "--username=headstart", "--auth=trust", "--no-sync"]
    subprocess.run(
        [*become_owner, *initdb, "--encoding=UTF8", "--locale=C"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    port = free_port()
    options = ["-h", "127.0.0.1"]
    for setting in (*settings, "max_connections=200"):
        options += ["-c", setting]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*become_owner, binaries / "postgres", "-D", cluster, "-p", str(port), "-k", folder, *options],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_accepting(process, binaries, port, folder / "server.log")
        yield PostgresServer(port=port, socket_dir=folder, process_id=process.pid)
    finally:
        _stop(process, signal.SIGQUIT)  # at once, with no last checkpoint: the folder goes too


def _wait_until_accepting(process: subprocess.Popen[bytes], binaries: Path, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    ready = [binaries / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port), "-U", "headstart"]
    while subprocess.run(ready, check=False).returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"PostgreSQL did not start:\n{log.read_text(errors='replace')}")
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes], stop_signal: signal.Signals) -> None:
    process.send_signal(stop_signal)
    try:
        process.wait(STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_TIMEOUT_SECONDS)
