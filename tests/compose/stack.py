"""The stack of compose.yaml, as a newcomer would bring it up, apart from anything else on this machine.

Knows Docker's command lines. Does not know what is tested. The stack has its own project name, image
tags, port and copy of the checkout, and nothing of it stays but Docker's cache of build steps.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.servers import free_port

CHECKOUT = Path(__file__).parents[2]
SHIPPED = (
    ".dockerignore",
    "LICENSE",
    "README.md",
    "billing",
    "compose.yaml",
    "constraints.txt",
    "deploy",
    "gateway",
    "migrations",
    "model_worker",
    "prefix_store",
    "pyproject.toml",
)
"""What the images are built from."""

ONE_SHOTS = ("secrets", "migrate")
SERVICES = ("postgres", "worker", "gateway", "prometheus")
"""Those that stay up, without profiles."""
UP_TIMEOUT_SECONDS = 3_000
COMMAND_TIMEOUT_SECONDS = 120


class DockerMissingError(RuntimeError):
    """No Docker engine answers, or Compose is not installed; the message says what to do."""


class CommandFailedError(AssertionError):
    """A command ended badly; the message carries what it wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A running stack."""

    compose_command: tuple[str, ...]
    folder: Path
    project: str
    port: int
    prometheus_port: int
    password: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def compose(self, *arguments: str, timeout_seconds: int = COMMAND_TIMEOUT_SECONDS) -> str:
        return _run(
            *self.compose_command,
            "--project-name",
            self.project,
            "--file",
            "compose.yaml",
            *arguments,
            folder=self.folder,
            environment=self._environment(),
            timeout_seconds=timeout_seconds,
        )

    def execute(self, service: str, *command: str, **environment: str) -> str:
        """A command inside a running container."""
        given = [part for name, value in environment.items() for part in ("-e", f"{name}={value}")]
        return self.compose("exec", "-T", *given, service, *command)

    def query(self, statement: str) -> list[list[str]]:
        """Rows, asked of PostgreSQL itself."""
        psql = ("psql", "-h", "127.0.0.1", "-U", "headstart", "-d", "headstart", "-AtX", "-F", "|")
        output = self.execute("postgres", *psql, "-c", statement, PGPASSWORD=self.password)
        return [line.split("|") for line in output.splitlines()]

    def container(self, service: str) -> dict[str, Any]:
        """What Docker knows of a service's container."""
        label = "com.docker.compose"
        found = _run(
            "docker", "ps", "--all", "--quiet",
            "--filter", f"label={label}.project={self.project}",
            "--filter", f"label={label}.service={service}",
        )  # fmt: skip
        inspected: list[dict[str, Any]] = json.loads(_run("docker", "inspect", *found.split()))
        assert len(inspected) == 1, f"{service}: one container, not {len(inspected)}"
        return inspected[0]

    def images(self) -> tuple[str, ...]:
        return tuple(f"headstart-{target}:{self.project}" for target in ("gateway", "worker"))

    def _environment(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")}
        return kept | {
            # Where a container cannot reach a package index by itself, the machine can.
            "BUILD_NETWORK": os.environ.get("BUILD_NETWORK", "host"),
            "COMPOSE_PROGRESS": "plain",
            "HEADSTART_PORT": str(self.port),
            "HEADSTART_TAG": self.project,
            "PROMETHEUS_PORT": str(self.prometheus_port),
        }


@contextmanager
def running_stack(folder: Path) -> Iterator[Stack]:
    """Builds, starts and, at the end, removes a stack. Raises DockerMissingError or CommandFailedError."""
    stack = Stack(
        compose_command=_compose_command(),
        folder=folder,
        project=f"headstart-test-{os.getpid()}",
        port=free_port(),
        prometheus_port=free_port(),
        password=secrets.token_urlsafe(12) + "@:/ $",  # a password may have any character
    )
    _copy_checkout(folder)
    given = folder / "deploy/secrets/postgres-password"
    given.write_text(stack.password + "\n")
    given.chmod(0o600)
    try:
        _say(stack.compose("up", "--build", "--detach", timeout_seconds=UP_TIMEOUT_SECONDS))
        yield stack
    except CommandFailedError as error:
        error.add_note(stack.compose("logs", "--no-color"))
        raise
    finally:
        stack.compose("down", "--volumes", "--remove-orphans")
        _run("docker", "image", "rm", "--force", *stack.images())


def _compose_command() -> tuple[str, ...]:
    try:
        _run("docker", "version", "--format", "{{.Server.Version}}")
    except (FileNotFoundError, CommandFailedError) as error:
        raise DockerMissingError(
            "these tests need a running Docker engine, and `docker version` reaches none: "
            f"install Docker (Debian's `docker.io`) and start `dockerd`\n{error}"
        ) from error
    for command in (("docker", "compose"), ("docker-compose",)):
        try:
            _run(*command, "version")
        except (FileNotFoundError, CommandFailedError):
            continue
        return command
    raise DockerMissingError(
        "these tests need Compose, and neither `docker compose` nor `docker-compose` is installed"
    )


def _not_committed(folder: str, names: list[str]) -> list[str]:
    if Path(folder).name in {"secrets", "wheels"}:
        return [name for name in names if name != ".gitignore"]
    return [name for name in names if name == "__pycache__"]


def _copy_checkout(folder: Path) -> None:
    """What is committed to be shipped, and the wheels that pip would take from a folder of this machine."""
    for name in SHIPPED:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=_not_committed)
        else:
            shutil.copy2(source, folder / name)
    for location in os.environ.get("PIP_FIND_LINKS", "").split():
        for wheel in Path(location).glob("torch-*.whl"):
            shutil.copy2(wheel, folder / "deploy" / "wheels")


def _run(
    *command: str,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: int = COMMAND_TIMEOUT_SECONDS,
) -> str:
    """Standard output. Raises CommandFailedError."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    if ended.returncode != 0:
        raise CommandFailedError(
            f"{' '.join(command)}: status {ended.returncode}\n{ended.stdout[-6000:]}\n{ended.stderr[-6000:]}"
        )
    return ended.stdout


def _say(text: str) -> None:
    sys.stdout.write(text)
