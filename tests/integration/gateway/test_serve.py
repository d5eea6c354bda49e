"""`headstart serve` as processes: what is printed, what is restarted, and that nothing is left behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.integration.gateway.scripted_worker import ANSWER, MODEL

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_SECONDS = 60


class Served:
    """A running `serve`: its standard output so far, and what it printed for the user to paste."""

    def __init__(self, process: subprocess.Popen[str], home: Path) -> None:
        self.process = process
        self.home = home
        self.printed = ""

    def read_until_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if line.startswith("curl "):
                return
        pytest.fail(f"ended with {self.process.wait()} before it was ready: {self.printed}{self.stderr()}")

    def export(self, name: str) -> str:
        found = re.search(rf"^export {name}=(.+)$", self.printed, re.MULTILINE)
        assert found is not None
        return found[1]

    def ask(self) -> str | None:
        with openai.OpenAI(
            base_url=self.export("OPENAI_BASE_URL"),
            api_key=self.export("OPENAI_API_KEY"),
            max_retries=0,
            http_client=httpx.Client(verify=False),
        ) as client:
            messages = [{"role": "user", "content": "hi"}]
            answer = client.chat.completions.create(model=MODEL, messages=messages)
        return answer.choices[0].message.content

    def worker_pid(self) -> int:
        return int((self.home / "worker.pid").read_text())

    def stderr(self) -> str:
        return (self.home / "stderr").read_text()

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        assert self.process.stdout is not None
        self.printed += self.process.stdout.read()
        return self.process.wait(PATIENCE_SECONDS)


@contextmanager
def serve(home: Path, *worker_arguments: str, **environment: str) -> Iterator[Served]:
    home.mkdir(exist_ok=True, mode=0o700)
    command = [sys.executable, "-m", "tests.integration.gateway.serve_scripted"]
    with (home / "stderr").open("a") as stderr:
        process = subprocess.Popen(
            [*command, "--pid-file", str(home / "worker.pid"), *worker_arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={
                **os.environ,
                "HEADSTART_HOME": str(home),
                "HEADSTART_PORT": "0",
                "HEADSTART_DRAIN_SECONDS": "0",
                **environment,
            },
        )
    try:
        yield Served(process, home)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_until(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not claim():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody has waited for yet counts as ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_what_is_printed_works_a_signal_ends_all_cleanly_and_the_next_start_goes_on(tmp_path):
    home, keys = tmp_path / "home", []
    for number in (signal.SIGINT, signal.SIGTERM):
        with serve(home) as served:
            served.read_until_ready()
            assert served.ask() == "".join(ANSWER)
            keys.append(served.export("OPENAI_API_KEY"))
            assert str(home / "first-key") in served.printed
            pid = served.worker_pid()
            assert served.end(number) == 0
            assert is_gone(pid)
            assert served.printed.endswith("Headstart has stopped.\n")
            assert "Traceback" not in served.stderr()
            assert '"level": "error"' not in served.stderr()
    assert keys[0] == keys[1] == (home / "first-key").read_text().strip()
    assert (home / "first-key").stat().st_mode & 0o777 == 0o600
    assert "still valid" in served.printed
    usage = subprocess.run(
        [sys.executable, "-m", "gateway", "usage", "--tenant", "default"],
        cwd=ROOT,
        env={**os.environ, "HEADSTART_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert re.search(r"requests\s+│\s+2\b", usage)


def test_a_journal_has_one_gateway_and_a_worker_is_not_orphaned_even_by_a_kill(tmp_path):
    with serve(tmp_path / "home") as served:
        served.read_until_ready()
        pid = served.worker_pid()
        with serve(tmp_path / "home") as second:
            assert second.process.wait(PATIENCE_SECONDS) == 1
            assert "journal" in second.stderr()
        assert served.ask() == "".join(ANSWER)
        served.process.kill()
        wait_until(lambda: is_gone(pid))


def test_a_worker_that_dies_is_started_again(tmp_path):
    with serve(tmp_path / "home") as served:
        served.read_until_ready()
        first = served.worker_pid()
        os.kill(first, signal.SIGKILL)

        def answers_again() -> bool:
            try:
                return served.ask() == "".join(ANSWER)
            except openai.InternalServerError:
                return False

        wait_until(lambda: served.worker_pid() != first)
        wait_until(answers_again)
        assert served.end(signal.SIGINT) == 0


def test_a_worker_that_cannot_start_is_told_with_its_status(tmp_path):
    with serve(tmp_path / "home", "--fail", "3") as served:
        assert served.process.wait(PATIENCE_SECONDS) == 1
        assert "the model worker ended with status 3" in served.stderr()
        assert "Traceback" not in served.stderr()


def test_a_taken_port_is_told_before_anything_is_made(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with serve(tmp_path / "home", HEADSTART_PORT=port) as served:
            assert served.process.wait(PATIENCE_SECONDS) == 1
            assert f"cannot listen on 127.0.0.1:{port}" in served.stderr()
            assert not (tmp_path / "home" / "secrets.json").exists()
