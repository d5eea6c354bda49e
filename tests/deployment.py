"""A worker and a gateway as processes of their own, on a tiny model: real HTTP all the way, in seconds.

Knows how to start them, make tenants and send requests. Does not know what a test looks for.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.processes import ProcessFailed, clean_environment, running_process, wait_for_file
from tests.tiny_models import tiny_llama

MODEL = "tiny-chat"
READY_SECONDS = 60.0
REQUEST_SECONDS = 60.0
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Where both can be reached, and what they wrote."""

    home: Path
    gateway_url: str
    worker_url: str
    gateway_log: Path
    worker_log: Path
    first_key: str

    def headstart(self, *arguments: str) -> str:
        """What the command line prints for this deployment."""
        return _headstart(self.home, *arguments)

    def new_tenant(self, name: str) -> str:
        """A key of a new tenant."""
        self.headstart("tenants", "create", name)
        return self.headstart("keys", "create", "--tenant", name, "--label", "test").strip()

    def ask(
        self, key: str, content: str, *, headers: Mapping[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        """One chat completion of at most four tokens unless told otherwise."""
        message = {"role": "user", "content": content}
        wanted = {"model": MODEL, "messages": [message], "max_tokens": 4, "temperature": 0} | body
        return self.post(key, json.dumps(wanted).encode(), headers=headers)

    def post(self, key: str, body: bytes, *, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return httpx.post(
            f"{self.gateway_url}/v1/chat/completions",
            content=body,
            headers={"authorization": f"Bearer {key}", "content-type": "application/json", **(headers or {})},
            timeout=REQUEST_SECONDS,
        )

    def hang_up(self, key: str, content: str) -> None:
        """Leaves a stream at its first bytes."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": True}
        with httpx.stream(
            "POST",
            f"{self.gateway_url}/v1/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {key}"},
            timeout=REQUEST_SECONDS,
        ) as answer:
            next(answer.iter_bytes())


@contextmanager
def running_deployment(
    folder: Path,
    *worker_flags: str,
    environment: Mapping[str, str] | None = None,
    worker_environment: Mapping[str, str] | None = None,
) -> Iterator[Deployment]:
    """`environment` is the gateway's. Both are stopped when the block ends."""
    model = folder / MODEL
    tiny_llama(model).network.save_pretrained(model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    port_file, worker_log, gateway_log = folder / "port", folder / "worker.log", folder / "gateway.log"
    worker = ["-m", "model_worker", "--model", str(model), "--worker-port", "0"]
    worker += ["--port-file", str(port_file), *worker_flags]
    with running_process(*worker, log=worker_log, environment=worker_environment or {}) as process:
        worker_url = f"http://127.0.0.1:{wait_for_file(port_file, process, worker_log)}"
        home = folder / "home"
        _headstart(home, "migrate", "--first-key")
        settings = {
            "HEADSTART_HOME": str(home),
            "HEADSTART_PORT": "0",
            "HEADSTART_WORKER_URL": worker_url,
            "HEADSTART_CARD_POLL_SECONDS": "0.2",
        }
        with running_process(
            "-m", "gateway", "gateway", log=gateway_log, environment=settings | dict(environment or {})
        ) as gateway:
            gateway_url = _address(gateway, gateway_log)
            yield Deployment(
                home=home,
                gateway_url=gateway_url,
                worker_url=worker_url,
                gateway_log=gateway_log,
                worker_log=worker_log,
                first_key=(home / "first-key").read_text().strip(),
            )


def _headstart(home: Path, *arguments: str) -> str:
    completed = subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        env=clean_environment({"HEADSTART_HOME": str(home)}),
        capture_output=True,
        text=True,
        check=True,
    )
    return completed.stdout


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Once it would serve a request."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"listens on (http://\S+)/v1", log.read_text(errors="replace"))
        if found and httpx.get(f"{found[1]}/health/readiness").status_code == 200:
            return found[1]
        time.sleep(0.05)
    raise ProcessFailed(log.read_text(errors="replace"))
