"""A worker as a process of its own, on a tiny model, over HTTP."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest

from model_worker.protocol import (
    EPOCH_HEADER,
    EVENT_STREAM_TYPE,
    CacheStatistics,
    Event,
    Finished,
    Refusal,
    Started,
    Token,
    WorkerCard,
    WorkerStats,
    decode_event,
)
from tests.processes import running_process, wait_for_file
from tests.tiny_models import tiny_llama

WITHIN_SECONDS = 10.0


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama(folder).network.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class RunningWorker:
    client: httpx.Client
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def stats(self) -> WorkerStats:
        return msgspec.json.decode(self.client.get("/v1/stats").content, type=WorkerStats)

    def wait_for(self, holds: Callable[[WorkerStats], bool]) -> WorkerStats:
        deadline = time.monotonic() + WITHIN_SECONDS
        while not holds(stats := self.stats()):
            assert time.monotonic() < deadline, stats
            time.sleep(0.01)
        return stats


def start_worker(model_folder: Path, folder: Path, *flags: str) -> Iterator[RunningWorker]:
    log, port_file = folder / "worker.log", folder / "port"
    arguments = ["-m", "model_worker", "--model", str(model_folder), "--worker-port", "0"]
    arguments += ["--port-file", str(port_file), "--kv-cache-blocks", "128", "--exit-with-parent", *flags]
    with running_process(*arguments, log=log, environment={}, stdin=subprocess.PIPE) as process:
        port = int(wait_for_file(port_file, process, log))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WITHIN_SECONDS) as client:
            yield RunningWorker(client, process, port, log)


@pytest.fixture(scope="module")
def worker(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningWorker]:
    yield from start_worker(model_folder, tmp_path_factory.mktemp("worker"))


def body(request_id: str, prompt: list[int], **sampling: object) -> dict[str, object]:
    return {
        "request_id": request_id,
        "scope": "ab",
        "token_ids": prompt,
        "sampling": {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | sampling,
    }


def events_of(response: httpx.Response) -> list[Event]:
    return [decode_event(line.encode()) for line in response.iter_lines()]


def test_a_generation_streams_counts_tokens_and_an_end(worker: RunningWorker) -> None:
    with worker.client.stream("POST", "/v1/generate", json=body("stream", list(range(50)))) as response:
        assert response.headers["content-type"].startswith(EVENT_STREAM_TYPE)
        events = events_of(response)
        epoch = response.headers[EPOCH_HEADER]
    stats = msgspec.json.decode(worker.client.get("/v1/stats").content, type=WorkerStats)
    assert stats.epoch == epoch
    assert stats.step_tokens == 512
    assert isinstance(events[0], Started)
    assert events[0].prompt == 50
    assert len([event for event in events if isinstance(event, Token)]) == 8
    assert isinstance(events[-1], Finished)
    assert events[-1].output_tokens == 8


def test_the_card_says_what_runs(worker: RunningWorker, model_folder: Path) -> None:
    card = msgspec.json.decode(worker.client.get("/v1/card").content, type=WorkerCard)
    assert (card.model, card.num_blocks, card.block_size, card.dtype) == ("tiny", 128, 16, "float32")
    assert card.context_window_tokens == 2048
    assert card.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert (
        worker.client.get("/v1/files/tokenizer.json").content
        == (model_folder / "tokenizer.json").read_bytes()
    )


def test_the_cache_is_told_about_over_http(worker: RunningWorker) -> None:
    answer = worker.client.get("/v1/statistics")
    seen = msgspec.json.decode(answer.content, type=CacheStatistics)
    assert seen.block_size == 16
    assert sum(row.queries for row in seen.scopes) == seen.total.queries
    assert set(seen.resident_blocks_by_tier) == {"device"}


@pytest.mark.parametrize("name", ["model.safetensors", "..%2fport", "nothing"])
def test_only_tokenizer_files_are_served(worker: RunningWorker, name: str) -> None:
    assert worker.client.get(f"/v1/files/{name}").status_code == 404


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "truncated"),
        (b'{"request_id": 1}', "request_id"),
        (msgspec.json.encode(body("x", [])), "token_ids"),
        (msgspec.json.encode(body("x", [2**32])), "token_ids"),
        (msgspec.json.encode(body("x", [1], temperature=3)), "temperature"),
        (msgspec.json.encode(body("x", [1], max_tokens=0)), "max_tokens"),
        (msgspec.json.encode(body("x", [1]) | {"scope": "not hex"}), "scope"),
        (msgspec.json.encode(body("x", [1]) | {"more": 1}), "more"),
        (msgspec.json.encode(body("x", [999])), "vocabulary"),
    ],
)
def test_bad_requests_are_refused_by_name(worker: RunningWorker, content: bytes, says: str) -> None:
    response = worker.client.post("/v1/generate", content=content)
    assert response.status_code == 400
    assert says in msgspec.json.decode(response.content, type=Refusal).message


def test_a_prompt_over_the_window_has_its_own_code(worker: RunningWorker) -> None:
    response = worker.client.post("/v1/generate", json=body("x", [1] * 2045))
    assert response.status_code == 400
    assert msgspec.json.decode(response.content, type=Refusal).code == "context_length_exceeded"


def test_a_body_over_the_limit_is_refused_before_it_is_read(model_folder: Path, tmp_path: Path) -> None:
    for running in start_worker(model_folder, tmp_path, "--max-body-bytes", "2048"):
        with socket.create_connection(("127.0.0.1", running.port), timeout=WITHIN_SECONDS) as connection:
            connection.sendall(b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n")
            assert connection.recv(64).startswith(b"HTTP/1.1 413")
        assert running.client.post("/v1/generate", json=body("x", [1] * 2000)).status_code == 413


@pytest.mark.parametrize("after_first_token", [False, True])
def test_a_hang_up_stops_the_generation_and_frees_its_blocks(
    worker: RunningWorker, after_first_token: bool
) -> None:
    before = worker.stats()
    wanted = body(f"hang-up-{after_first_token}", list(range(200)), max_tokens=1800)
    with worker.client.stream("POST", "/v1/generate", json=wanted) as response:
        if after_first_token:
            for line in response.iter_lines():
                if isinstance(decode_event(line.encode()), Token):
                    break
    after = worker.wait_for(lambda stats: stats.requests_cancelled > before.requests_cancelled)
    assert after.requests_cancelled == before.requests_cancelled + 1
    assert after.blocks_held == 0
    assert after.output_tokens - before.output_tokens < 1800
    assert after.blocks_free + after.blocks_cached == after.blocks_total


def test_metrics_are_prometheus_text(worker: RunningWorker) -> None:
    text = worker.client.get("/metrics").text
    assert 'headstart_worker_blocks{state="held"} 0.0' in text
    assert "headstart_worker_prompt_tokens_computed_total" in text
    assert "headstart_worker_kv_bytes_per_conversation 0.0" in text


def test_it_ends_with_its_parent(model_folder: Path, tmp_path: Path) -> None:
    for running in start_worker(model_folder, tmp_path):
        assert running.process.stdin is not None
        running.process.stdin.close()
        assert running.process.wait(WITHIN_SECONDS) is not None


@pytest.mark.parametrize(
    ("drain_seconds", "max_tokens", "ends_with"), [("0", 1900, "failed"), ("60", 200, "finished")]
)
def test_a_signal_lets_open_streams_end_for_a_while_and_then_ends_them_with_an_event(
    model_folder: Path, tmp_path: Path, drain_seconds: str, max_tokens: int, ends_with: str
) -> None:
    for running in start_worker(model_folder, tmp_path, "--drain-seconds", drain_seconds):
        wanted = body("long", list(range(100)), max_tokens=max_tokens)
        with running.client.stream("POST", "/v1/generate", json=wanted) as response:
            lines = response.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            last = [*lines][-1]
        assert f'"type":"{ends_with}"' in last
        assert running.process.wait(WITHIN_SECONDS) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("./no-such-folder", "there is no model folder"),
        ("no-such-org/no-such-model", "no built-in model"),
    ],
)
def test_an_unusable_model_is_told_plainly(tmp_path: Path, model: str, says: str) -> None:
    log = tmp_path / "log"
    arguments = ["-m", "model_worker", "--model", model, "--worker-port", "0"]
    with running_process(*arguments, log=log, environment={}) as process:
        assert process.wait(60) == 3
    assert says in log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_wrong_setting_is_told_by_its_variable_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {"HEADSTART_KV_CACHE_BLOCKS": "0"}
    with running_process("-m", "model_worker", log=log, environment=environment) as process:
        assert process.wait(60) == 2
    (line,) = log.read_text().splitlines()
    assert line.startswith("headstart worker: HEADSTART_KV_CACHE_BLOCKS: ")
