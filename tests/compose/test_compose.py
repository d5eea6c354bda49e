"""`compose.yaml` brings up everything, and that does the main job: MISS, then HIT, then ledger rows."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.compose.stack import ONE_SHOTS, SERVICES, Stack, running_stack

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3_600)]

MODEL = "smollm2-135m-instruct"
POSTED_SECONDS = 30.0
BRIEFING = " ".join(
    f"Rule {number}: a guest in room {100 + number} gets breakfast at {7 + number % 3} o'clock, "
    f"towels every {1 + number % 4} days, and late check-out on request."
    for number in range(1, 25)
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture(scope="module")
def key(stack: Stack) -> str:
    """Where compose.yaml says that a newcomer finds it."""
    return stack.execute("gateway", "cat", "/var/lib/headstart/first-key").strip()


def test_everything_becomes_healthy(stack: Stack) -> None:
    for service in ONE_SHOTS:
        state = stack.container(service)["State"]
        assert (state["Status"], state["ExitCode"]) == ("exited", 0)
    deadline = time.monotonic() + 60
    for service in SERVICES:
        while (health := stack.container(service)["State"]["Health"]["Status"]) != "healthy":
            assert time.monotonic() < deadline, f"{service} is {health}"
            time.sleep(0.5)


def test_the_official_client_gets_a_miss_then_a_hit_and_both_are_in_postgresql(
    stack: Stack, key: str
) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key, timeout=300, max_retries=0)
    messages = [
        {"role": "system", "content": BRIEFING},
        {"role": "user", "content": "When is breakfast in room 105?"},
    ]
    answers = []
    for _ in range(2):
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=messages,
            temperature=0,
            max_tokens=16,  # type: ignore[arg-type]
        )
        answers.append((raw.headers["x-headstart-cache"], raw.parse()))
    client.close()
    (first_status, first), (second_status, second) = answers
    assert (first_status.upper(), second_status.upper()) == ("MISS", "HIT")
    assert first.choices[0].message.content == second.choices[0].message.content
    prompt = first.usage.prompt_tokens
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert cached > 0.9 * prompt

    rows = posted_rows(stack, num_rows=2)
    output = [answer.usage.completion_tokens for _, answer in answers]
    assert rows == [
        ["final", str(prompt), "0", str(output[0])],
        ["final", str(prompt - cached), str(cached), str(output[1])],
    ]
    [[amount, without_cache]] = stack.query(
        "SELECT sum(amount_pusd), sum(amount_without_cache_pusd) FROM ledger_lines"
    )
    assert int(amount) < int(without_cache)


def posted_rows(stack: Stack, *, num_rows: int) -> list[list[str]]:
    """The ledger's events, once there are as many: an answer does not wait for its posting."""
    deadline = time.monotonic() + POSTED_SECONDS
    while True:
        rows = stack.query(
            "SELECT kind, uncached_tokens, read_tokens, output_tokens FROM usage_events "
            "ORDER BY admitted_at_us"
        )
        if len(rows) >= num_rows or time.monotonic() > deadline:
            return rows
        time.sleep(0.2)


def test_the_command_line_reports_the_same_ledger(stack: Stack) -> None:
    [[read]] = stack.query("SELECT sum(read_tokens) FROM usage_events")
    assert f"{int(read):,}" in stack.execute("gateway", "headstart", "usage", "--tenant", "default")


def test_the_dashboard_is_there(stack: Stack) -> None:
    with urllib.request.urlopen(f"{stack.url}/dashboard", timeout=30) as answer:
        assert answer.status == 200
        assert "Sign in" in answer.read().decode()


def test_images_hold_what_they_need_run_as_nobody_and_change_nothing_of_themselves(stack: Stack) -> None:
    find_torch = "import importlib.util as i; print(i.find_spec('torch') is not None)"
    assert stack.execute("gateway", "python", "-c", find_torch).strip() == "False"
    assert stack.execute("worker", "python", "-c", find_torch).strip() == "True"
    for service in ("gateway", "worker", "prometheus"):
        assert stack.execute(service, "id", "-u").strip() == "10001"
    for service in SERVICES:
        host = stack.container(service)["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
    for service, modules in (("gateway", "opentelemetry.sdk"), ("worker", "opentelemetry.sdk, peft")):
        stack.execute(service, "python", "-c", f"import {modules}")


def test_gateway_and_prometheus_can_be_reached_and_from_this_machine_alone(stack: Stack) -> None:
    published = {service: stack.container(service)["NetworkSettings"]["Ports"] for service in SERVICES}
    addresses = {
        (service, binding["HostIp"])
        for service, ports in published.items()
        for bindings in ports.values()
        for binding in bindings or ()
    }
    assert addresses == {("gateway", "127.0.0.1"), ("prometheus", "127.0.0.1")}


def test_workers_get_the_seed_of_block_names_and_not_the_secret(stack: Stack) -> None:
    seed = stack.execute("worker", "cat", "/run/headstart/block-seed").strip()
    assert len(bytes.fromhex(seed)) == 8
    assert seed not in stack.execute("gateway", "cat", "/run/secrets/headstart-secret")
    assert stack.execute("worker", "find", "/run", "/var/lib/headstart", "-name", "*secret*").strip() == ""


def test_secrets_are_in_files_and_in_no_containers_settings(stack: Stack) -> None:
    assert stack.execute("gateway", "cat", "/run/secrets/postgres-password") == stack.password
    secrets = [
        stack.execute("gateway", "cat", f"/run/secrets/{name}").strip()
        for name in ("postgres-password", "headstart-secret", "admin-key")
    ]
    for service in (*ONE_SHOTS, *SERVICES):
        known = str(stack.container(service))
        assert not any(secret in known for secret in secrets), service


def test_the_admins_key_sees_every_tenants_business(stack: Stack) -> None:
    key = stack.execute("gateway", "cat", "/run/secrets/admin-key").strip()
    request = urllib.request.Request(
        f"{stack.url}/v1/organization/costs?start_time=0", headers={"authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


def test_prometheus_scrapes_gateway_and_worker_and_knows_the_alerts(stack: Stack) -> None:
    deadline = time.monotonic() + 60
    while True:
        targets = asked_of_prometheus(stack, "targets?state=active")["activeTargets"]
        health = {target["labels"]["job"]: target["health"] for target in targets}
        if health == {"gateway": "up", "worker": "up"} or time.monotonic() > deadline:
            break
        time.sleep(1)
    assert health == {"gateway": "up", "worker": "up"}
    assert {group["name"] for group in asked_of_prometheus(stack, "rules")["groups"]} >= {
        "headstart-available"
    }


def asked_of_prometheus(stack: Stack, path: str) -> dict[str, Any]:
    url = f"http://127.0.0.1:{stack.prometheus_port}/api/v1/{path}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        asked: dict[str, Any] = json.load(answer)["data"]
    return asked
