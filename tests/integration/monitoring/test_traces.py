"""Requests as spans, sent to a real collector: one per phase, from the client's trace to the worker's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.collectors import CLIENT, INTERNAL, SERVER, Collector, Span, running_collector
from tests.deployment import MODEL, Deployment, running_deployment
from tests.processes import clean_environment
from tests.servers import free_port

pytestmark = pytest.mark.slow

SECRET = "zanzibarquokka"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
CLOCK_NS = 1_000_000
"""How far two clocks of one machine may have drifted while a request was served."""
GATEWAY, WORKER = "headstart-gateway", "headstart-worker"


@dataclass(frozen=True, slots=True)
class Traced:
    deployment: Deployment
    collector: Collector

    def spans(self, trace_id: str, *services: str) -> list[Span]:
        return self.collector.trace(trace_id, services=set(services))


def environment(url: str) -> dict[str, str]:
    return {"HEADSTART_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "50"}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    with running_collector() as collector:
        settings = environment(collector.url)
        with running_deployment(
            folder, "--kv-cache-blocks", "64", environment=settings, worker_environment=settings
        ) as deployment:
            yield Traced(deployment, collector)


def traceparent(trace_id: str, *, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{PARENT_ID}-{'01' if sampled else '00'}"}


def by_name(spans: list[Span], service: str) -> dict[str, Span]:
    named = {span.name: span for span in spans if span.service == service}
    assert len(named) == len([span for span in spans if span.service == service])
    return named


def test_a_request_is_one_span_per_phase_under_the_clients_own(traced: Traced) -> None:
    key = traced.deployment.first_key
    answer = traced.deployment.ask(
        key, f"{SECRET} once", stream=True, seed=7, stop=[SECRET], headers=traceparent(TRACE_ID)
    )
    assert answer.status_code == 200
    spans = traced.spans(TRACE_ID, GATEWAY, WORKER)
    gateway, worker = by_name(spans, GATEWAY), by_name(spans, WORKER)
    root = gateway[f"chat {MODEL}"]
    assert (root.parent_id, root.kind, root.is_error) == (PARENT_ID, SERVER, False)
    phases = ["authenticate", "receive", "parse", "route", "render", "admit", "generate", "settle"]
    assert [span.name for span in spans if span.parent_id == root.span_id] == phases
    hop = gateway["generate"]
    assert (hop.kind, gateway["admit"].kind) == (CLIENT, INTERNAL)
    assert [gateway[name].parent_id for name in ("prefill", "stream")] == [hop.span_id] * 2
    assert (worker["generate"].parent_id, worker["generate"].kind) == (hop.span_id, SERVER)
    assert {worker[name].parent_id for name in ("queue", "prefill", "decode")} == {worker["generate"].span_id}
    for outermost, inner in ((root, gateway), (worker["generate"], worker)):
        for span in inner.values():
            assert outermost.began_ns - CLOCK_NS <= span.began_ns
            assert span.began_ns <= span.ended_ns <= outermost.ended_ns + CLOCK_NS


def test_a_hit_says_how_much_of_it_was_cached(traced: Traced) -> None:
    key, question = traced.deployment.first_key, "a question that is asked twice, word for word"
    traced.deployment.ask(key, question)
    answer = traced.deployment.ask(key, question, headers=traceparent("ab" * 16), seed=7)
    usage = answer.json()["usage"]
    spans = traced.spans("ab" * 16, GATEWAY, WORKER)
    told = by_name(spans, GATEWAY)[f"chat {MODEL}"].attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.provider.name"] == "headstart"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == MODEL
    assert told["gen_ai.response.id"] == answer.json()["id"]
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.temperature"]) == (4, 0.0)
    assert (told["gen_ai.request.seed"], told["gen_ai.request.stream"]) == (7, False)
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert told["gen_ai.response.finish_reasons"] == [answer.json()["choices"][0]["finish_reason"]]
    assert told["gen_ai.response.time_to_first_chunk"] > 0
    assert (told["headstart.cache.status"], told["headstart.outcome"]) == ("hit", "answered")
    assert told["headstart.request_id"] == answer.headers["x-request-id"]
    assert told["http.response.status_code"] == 200
    at_worker = by_name(spans, WORKER)["generate"].attributes
    same = ["gen_ai.usage.input_tokens", "gen_ai.usage.cache_read.input_tokens", "headstart.request_id"]
    assert [at_worker[name] for name in same] == [told[name] for name in same]


def test_a_refusal_ends_where_it_was_refused_and_is_no_fault_of_ours(traced: Traced) -> None:
    answer = traced.deployment.ask(
        traced.deployment.first_key, SECRET, model=SECRET, headers=traceparent("cd" * 16)
    )
    assert answer.status_code == 404
    spans = by_name(traced.spans("cd" * 16, GATEWAY), GATEWAY)
    assert set(spans) == {"chat", "authenticate", "receive", "parse", "route"}
    assert spans["route"].attributes["error.type"] == "ModelNotFound"
    told = spans["chat"].attributes
    assert (told["error.type"], told["headstart.outcome"]) == ("model_not_found", "refused")
    assert not spans["chat"].is_error
    assert "gen_ai.request.model" not in told


def test_a_hang_up_is_told_as_one(traced: Traced) -> None:
    before = len(traced.collector.spans)
    traced.deployment.hang_up(traced.deployment.first_key, "on and on")

    def roots() -> list[Span]:
        return [span for span in traced.collector.spans[before:] if span.kind == SERVER]

    with traced.collector.arrived:
        assert traced.collector.arrived.wait_for(lambda: len(roots()) == 2, 30)
    outcomes = {span.service: span.attributes["headstart.outcome"] for span in roots()}
    assert outcomes == {GATEWAY: "hung_up", WORKER: "abort"}


def test_a_client_that_does_not_sample_is_obeyed_on_both_sides(traced: Traced) -> None:
    key = traced.deployment.first_key
    traced.deployment.ask(key, "do not look", headers=traceparent("ef" * 16, sampled=False))
    traced.deployment.ask(key, "look", headers=traceparent("01" * 16))
    traced.spans("01" * 16, GATEWAY, WORKER)
    assert [span for span in traced.collector.spans if span.trace_id == "ef" * 16] == []


def test_a_traceparent_that_is_none_begins_a_new_trace(traced: Traced) -> None:
    before = len(traced.collector.spans)
    answer = traced.deployment.ask(traced.deployment.first_key, "hi", headers={"traceparent": f"00-{SECRET}"})
    assert answer.status_code == 200
    with traced.collector.arrived:
        assert traced.collector.arrived.wait_for(
            lambda: any(not span.parent_id for span in traced.collector.spans[before:]), 30
        )


def test_the_log_line_names_the_trace(traced: Traced) -> None:
    answer = traced.deployment.ask(traced.deployment.first_key, "hi", headers=traceparent("23" * 16))
    traced.spans("23" * 16, GATEWAY)
    request_id = answer.headers["x-request-id"]
    [line] = [line for line in traced.deployment.gateway_log.read_text().splitlines() if request_id in line]
    assert json.loads(line)["trace_id"] == "23" * 16


def test_no_span_holds_a_word_of_a_client(traced: Traced) -> None:
    for body in (b'{"' + SECRET.encode(), json.dumps({"model": MODEL, SECRET: SECRET}).encode()):
        traced.deployment.post(traced.deployment.first_key, body)
    traced.deployment.post(SECRET, b"{}")
    traced.deployment.ask(traced.deployment.first_key, SECRET, user=SECRET, headers=traceparent("45" * 16))
    traced.spans("45" * 16, GATEWAY, WORKER)
    assert len(traced.collector.bodies) > 0
    assert all(SECRET.encode() not in body for body in traced.collector.bodies)
    assert all(traced.deployment.first_key.encode() not in body for body in traced.collector.bodies)


def test_a_collector_that_is_away_costs_no_request_and_no_long_end(tmp_path: Path) -> None:
    settings = environment(f"http://127.0.0.1:{free_port()}")
    with running_deployment(
        tmp_path, "--kv-cache-blocks", "64", environment=settings, worker_environment=settings
    ) as deployment:
        for _ in range(3):
            assert deployment.ask(deployment.first_key, "hello").status_code == 200
    # `running_process` kills what has not ended by itself in time, and then no last line is written.
    assert "Traceback" not in deployment.gateway_log.read_text()


def test_nothing_of_it_is_loaded_when_nobody_wants_traces() -> None:
    code = (
        "import sys, gateway.cli, gateway.app, model_worker.tracing; "
        "from gateway.tracing import UNTRACED, tracer_for; from model_worker.tracing import Tracing; "
        "assert tracer_for(None).begin({}) is UNTRACED; Tracing(None); Tracing(''); "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", [["gateway", "gateway"], ["model_worker", "--model", "nowhere"]])
def test_who_wants_traces_without_the_extra_is_told_what_to_install(
    tmp_path: Path, command: list[str]
) -> None:
    """Python is kept from finding the packages, as where they are not installed."""
    folder = tmp_path / "opentelemetry"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('not here')")
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=clean_environment(
            {
                "HEADSTART_HOME": str(tmp_path / "home"),
                "HEADSTART_PORT": "0",
                "HEADSTART_WORKER_URL": "http://127.0.0.1:1",
                "HEADSTART_WORKER_PORT": "0",
                "HEADSTART_OTLP_ENDPOINT": "http://127.0.0.1:4318",
                "PYTHONPATH": f"{tmp_path}:{':'.join(path for path in sys.path if path)}",
            }
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "pip install 'headstart[otel]'" in done.stderr
    assert "Traceback" not in done.stderr
