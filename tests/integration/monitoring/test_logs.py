"""Whatever a client sends, its words are in no log: of the gateway, the worker or the journal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployment import MODEL, REQUEST_SECONDS, Deployment, running_deployment

pytestmark = pytest.mark.slow

SECRET = "zanzibarquokka"
"""In every prompt and every wrong value below."""
WITHIN_SECONDS = 30.0
DEBUG = {"HEADSTART_LOG_LEVEL": "debug"}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("logs")
    with running_deployment(
        folder, "--kv-cache-blocks", "64", environment=DEBUG, worker_environment=DEBUG
    ) as one:
        yield one


def lines_of(log: Path) -> list[dict[str, Any]]:
    """Every line of a log is one JSON object, but what the command itself tells on standard output."""
    lines = log.read_text().splitlines()
    return [json.loads(line) for line in lines if line and not line.startswith("Headstart's gateway")]


def lines_for(log: Path, event: str, request_id: str) -> list[dict[str, Any]]:
    """Once there are any: a line is written a moment after its answer."""
    deadline = time.monotonic() + WITHIN_SECONDS
    while True:
        found = [
            line for line in lines_of(log) if (line["event"], line.get("request_id")) == (event, request_id)
        ]
        if found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def chat(content: object = SECRET, **more: object) -> bytes:
    message = {"role": "user", "content": content}
    return json.dumps({"model": MODEL, "messages": [message], "max_tokens": 4} | more).encode()


REFUSED = {
    "unknown model": chat(model=SECRET),
    "unknown field": chat(**{SECRET: 1}),
    "wrong type": chat(temperature=SECRET),
    "wrong choice": chat(response_format={"type": SECRET}),
    "wrong role": json.dumps({"model": MODEL, "messages": [{"role": SECRET, "content": SECRET}]}).encode(),
    "wrong content": chat([{"type": SECRET, "text": SECRET}]),
    "lone surrogate": chat().replace(SECRET.encode(), rb"\ud800" + SECRET.encode()),
    "broken JSON": b'{"messages": "' + SECRET.encode(),
    "not UTF-8": b'{"model": "' + SECRET.encode() + b'\xff"}',
    "too long": chat(f"{SECRET} " * 3_000),
    "too many tokens": chat(max_tokens=10**9, user=SECRET),
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_a_refusal_is_logged_by_its_id_and_without_a_word_of_it(deployment: Deployment, body: bytes) -> None:
    answer = deployment.post(deployment.first_key, body)
    assert 400 <= answer.status_code < 500
    [line] = lines_for(deployment.gateway_log, "request", answer.headers["x-request-id"])
    assert (line["outcome"], line["status"]) == ("refused", answer.status_code)
    assert_silent(deployment)


def test_one_id_leads_from_the_answer_to_the_lines_of_gateway_and_worker(deployment: Deployment) -> None:
    answer = deployment.ask(deployment.first_key, f"tell me of {SECRET}", stop=["never"], user=SECRET)
    request_id = answer.headers["x-request-id"]
    [ours] = lines_for(deployment.gateway_log, "request", request_id)
    [theirs] = lines_for(deployment.worker_log, "generation", request_id)
    usage = answer.json()["usage"]
    assert ours["read_tokens"] == theirs["cached_tokens"]
    assert ours["output_tokens"] == theirs["output_tokens"] == usage["completion_tokens"]
    assert theirs["prompt_tokens"] == usage["prompt_tokens"]
    assert (ours["outcome"], theirs["outcome"]) == ("answered", "length")
    assert_silent(deployment)


def test_streams_and_hang_ups_say_nothing_either(deployment: Deployment) -> None:
    deployment.ask(deployment.first_key, SECRET, stream=True, n=2)
    deployment.hang_up(deployment.first_key, f"{SECRET}, and on and on")
    assert_silent(deployment)


@pytest.mark.parametrize("path", [f"/{SECRET}", f"/v1/models/{SECRET}", f"/v1/usage?start_time={SECRET}"])
def test_other_routes_tell_their_pattern_and_not_what_was_asked(deployment: Deployment, path: str) -> None:
    headers = {"authorization": f"Bearer {deployment.first_key}"}
    answer = httpx.get(f"{deployment.gateway_url}{path}", headers=headers)
    [line] = lines_for(deployment.gateway_log, "http_request", answer.headers["x-request-id"])
    assert line["status"] == answer.status_code
    assert line["route"] in {None, "/v1/models/{model:path}", "/v1/usage"}
    assert_silent(deployment)


@pytest.mark.parametrize("key", [SECRET, f"hs-AAAAAAAA-{'A' * 43}"])
def test_a_wrong_key_is_not_repeated(deployment: Deployment, key: str) -> None:
    assert deployment.post(key, chat()).status_code == 401
    assert_silent(deployment)
    assert key not in deployment.gateway_log.read_text()


def test_headers_are_not_repeated(deployment: Deployment) -> None:
    for name in ("x-headstart-cache", "x-request-id", "traceparent", "content-encoding"):
        deployment.post(deployment.first_key, chat(), headers={name: f"two {SECRET} words"})
    deployment.post(deployment.first_key, chat(), headers={"content-type": f"text/{SECRET}"})
    assert_silent(deployment)


def test_the_workers_own_refusals_are_not_repeated(deployment: Deployment) -> None:
    known = {"request_id": "x", "scope": "aa", "token_ids": [1], "sampling": {"max_tokens": 2}}
    structure = {"type": "regex", "pattern": f"({SECRET}"}
    for body in (
        {SECRET: 1},
        {**known, "adapter": SECRET},
        {**known, "sampling": {"max_tokens": 2, "structure": structure}},
    ):
        answer = httpx.post(f"{deployment.worker_url}/v1/generate", json=body, timeout=REQUEST_SECONDS)
        assert answer.status_code == 400
    assert_silent(deployment)


def test_the_dashboards_sign_in_repeats_nothing(deployment: Deployment) -> None:
    httpx.post(f"{deployment.gateway_url}/dashboard/sign-in", data={"key": SECRET, "next": f"/{SECRET}"})
    assert_silent(deployment)


def test_the_key_that_works_is_in_no_log(deployment: Deployment) -> None:
    assert deployment.ask(deployment.first_key, "hello").status_code == 200
    assert deployment.first_key not in everything_written(deployment)


def assert_silent(deployment: Deployment) -> None:
    text = everything_written(deployment)
    assert "worker_listening" in text
    assert SECRET not in text


def everything_written(deployment: Deployment) -> str:
    """Both logs, whose every line is JSON, the journal and both expositions."""
    for log in (deployment.gateway_log, deployment.worker_log):
        assert all(isinstance(line, dict) for line in lines_of(log))
    files = [deployment.gateway_log, deployment.worker_log, *deployment.home.glob("journal/*")]
    texts = [path.read_text(errors="replace") for path in files]
    texts += [httpx.get(f"{url}/metrics").text for url in (deployment.gateway_url, deployment.worker_url)]
    return "\n".join(texts)
