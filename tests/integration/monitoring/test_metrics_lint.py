"""`promtool check metrics` has nothing to say about a gateway's and a worker's metrics."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import httpx
import pytest

from tests.deployment import Deployment, running_deployment
from tests.servers import prometheus_program

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_deployment(tmp_path_factory.mktemp("lint"), "--kv-cache-blocks", "64") as one:
        assert one.ask(one.first_key, "hello").status_code == 200
        assert one.ask(one.first_key, "hello", model="nobody").status_code == 404
        yield one


@pytest.mark.parametrize("address", ["gateway_url", "worker_url"])
def test_promtool_has_nothing_to_say(deployment: Deployment, address: str) -> None:
    answer = httpx.get(f"{getattr(deployment, address)}/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    checked = subprocess.run(
        [prometheus_program("promtool"), "check", "metrics"],
        input=answer.content,
        capture_output=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
