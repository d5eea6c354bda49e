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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

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


class PostgresCluster:
    """A throw-away database folder, and the server that runs on it or not. States: stopped ⇄ running."""

    def __init__(self, folder: Path, settings: Sequence[str]) -> None:
        self._binaries = postgres_binaries()
        self._folder = folder
        self._become_owner = _unprivileged_prefix(folder)
        self._port = free_port()
        self._options = ["-h", "127.0.0.1"]
        for setting in (*settings, "max_connections=200"):
            self._options += ["-c", setting]
        self._process: subprocess.Popen[bytes] | None = None
        initdb = [self._binaries / "initdb", "--pgdata", folder / "cluster", "--username=headstart"]
        subprocess.run(
            [*self._become_owner, *initdb, "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            check=True,
        )

    def start(self) -> PostgresServer:
        """Also after `kill`: then it recovers what it had committed."""
        program = [self._binaries / "postgres", "-D", self._folder / "cluster", "-p", str(self._port)]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._become_owner, *program, "-k", self._folder, *self._options],
                cwd=self._folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        _wait_until_accepting(self._process, self._binaries, self._port, self._folder / "server.log")
        return PostgresServer(port=self._port, socket_dir=self._folder, process_id=self._process.pid)

    def kill(self) -> None:
        """kill -9 of the server; its children end when they notice."""
        assert self._process is not None, "it runs"
        self._process.kill()
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        """At once, with no last checkpoint: the folder goes too."""
        if self._process is not None:
            _stop(self._process, signal.SIGQUIT)


@contextmanager
def postgres_cluster(settings: Sequence[str] = NOT_DURABLE) -> Iterator[PostgresCluster]:
    """A cluster, not yet started; raises ServerMissingError with what to install."""
    # Outside pytest's folders: a socket's path has about 100 bytes, and the server's user must reach it.
    folder = Path(tempfile.mkdtemp(prefix="hs-pg-"))
    try:
        cluster = PostgresCluster(folder, settings)
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(folder)


@contextmanager
def running_postgres(settings: Sequence[str] = NOT_DURABLE) -> Iterator[PostgresServer]:
    """Starts a throw-away PostgreSQL; raises ServerMissingError with what to install."""
    with postgres_cluster(settings) as cluster:
        yield cluster.start()


def postgres_binaries() -> Path:
    """The newest installed server's program folder. Installs Debian's package where that is possible."""
    found = find_or_install(find_postgres_binaries, "postgresql")
    if found is None:
        raise ServerMissingError(
            "these tests run a real PostgreSQL and found none: install Debian's `postgresql` package, "
            "or put `initdb` and `postgres` on PATH"
        )
    return found


@contextmanager
def running_prometheus(config: Path) -> Iterator[str]:
    """Prometheus with this configuration, on a free port; its address once it is ready."""
    program = prometheus_program("prometheus")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="hs-prom-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    program,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--query.lookback-delta=1m",
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}/-/ready", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            _stop(process, signal.SIGTERM)


def prometheus_program(name: str) -> Path:
    """`prometheus` or `promtool`. Installs Debian's package, which has both, where that is possible."""
    found = find_or_install(lambda: find_prometheus_program(name), "prometheus")
    if found is None:
        raise ServerMissingError(
            f"these tests run a real Prometheus and found no {name}: install Debian's `prometheus` package, "
            "or put `prometheus` and `promtool` on PATH"
        )
    return found


def find_prometheus_program(name: str) -> Path | None:
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None


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


def _wait_until_accepting(process: subprocess.Popen[bytes], binaries: Path, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    ready = [binaries / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port), "-U", "headstart"]
    while subprocess.run(ready, check=False).returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"PostgreSQL did not start:\n{log.read_text(errors='replace')}")
        time.sleep(0.05)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        with suppress(httpx.TransportError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')}")
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes], stop_signal: signal.Signals) -> None:
    process.send_signal(stop_signal)
    try:
        process.wait(STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_TIMEOUT_SECONDS)
