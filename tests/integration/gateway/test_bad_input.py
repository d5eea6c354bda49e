"""Bad input is refused in OpenAI's shape with the field named; nothing reaches the worker; the
gateway lives on.
"""

import asyncio
import json
import threading

import pytest

from gateway.app import Gateway
from gateway.edge import openai
from gateway.edge.canonical import CanonicalRequest
from tests.integration.gateway.conftest import Stack
from tests.integration.gateway.scripted_worker import MODEL, WINDOW

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


HELLO = [said("hi")]


def body(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "messages": HELLO, **fields}).encode()


async def refusal(stack: Stack, content: bytes, **headers: str) -> tuple[int, dict]:
    """Sends a body, checks the shape of the refusal and that the gateway still serves, and returns
    the error.
    """
    async with stack.http() as http:
        answer = await http.post(PATH, content=content, headers=JSON | headers)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"]
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert stack.worker.exchanges == []
        assert (await http.post(PATH, content=body())).status_code == 415, "a content type is asked for"
        assert (await http.post(PATH, content=body(), headers=JSON)).status_code == 200
    assert len(stack.worker.exchanges) == 1
    assert len(await stack.usage_events()) == 1
    return answer.status_code, error


@pytest.mark.parametrize(
    ("content", "status", "param", "code"),
    [
        (b"{", 400, "body", None),
        (b'{"model": "\xff"}', 400, "body", None),
        (body(messages="hi"), 400, "messages", "invalid_value"),
        (body(messages=[]), 400, "messages", "invalid_value"),
        (body(model="no-such-model"), 404, "model", "model_not_found"),
        (body(temperature=2.5), 400, "temperature", "invalid_value"),
        (body(max_tokens=0), 400, "max_tokens", "invalid_value"),
        (body(max_tokens=WINDOW + 1), 400, "max_tokens", "context_length_exceeded"),
        (body(max_completion_tokens=10**12), 400, "max_completion_tokens", "context_length_exceeded"),
        (body(max_tokens=WINDOW - 1), 400, "max_tokens", "context_length_exceeded"),
        (body(max_tokens=10**30), 400, "max_tokens", "invalid_value"),
        (body(tools=[{}]), 400, "tools", "unsupported_parameter"),
        (
            b'{"model": "tiny-chat", "messages": [{"role": "user", "content": "\\ud800"}]}',
            400,
            "messages[0].content",
            None,
        ),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, 400, "a", "unknown_parameter"),
        (
            body(messages=[said("x" * WINDOW)]),
            400,
            "messages",
            "context_length_exceeded",
        ),
        (
            body(messages=[said("x" * 10**6)]),
            400,
            "messages",
            "context_length_exceeded",
        ),
        (body(messages=[HELLO[0]] * 2048), 400, "messages", "context_length_exceeded"),
        (body(messages=[HELLO[0]] * 10_000), 400, "messages", "invalid_value"),
        (body(tools=[*range(100_000), float("nan")]), 400, "tools[100000]", None),
    ],
)
async def test_a_bad_body_is_refused_by_name(shared_stack, content, status, param, code):
    got_status, error = await refusal(shared_stack, content)
    assert (got_status, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("headers", "status", "param"),
    [
        ({"content-type": "text/plain"}, 415, "content-type"),
        ({"content-encoding": "gzip"}, 415, "content-encoding"),
        ({"x-headstart-cache": "always"}, 400, "x-headstart-cache"),
        ({"authorization": "Bearer hs-wrong"}, 401, "authorization"),
        ({"authorization": "Bearer " + "k" * 5000}, 401, "authorization"),
        ({"authorization": "Basic abc"}, 401, "authorization"),
        ({"authorization": ""}, 401, "authorization"),
    ],
)
async def test_a_bad_header_is_refused_by_name(shared_stack, headers, status, param):
    got_status, error = await refusal(shared_stack, body(), **headers)
    assert (got_status, error["param"]) == (status, param)


async def test_a_large_body_is_read_off_the_event_loop(shared_stack, monkeypatch):
    threads: list[str] = []

    def watched(content: bytes) -> CanonicalRequest:
        threads.append(threading.current_thread().name)
        return parse_chat(content)

    parse_chat = openai.parse_chat
    monkeypatch.setattr(openai, "parse_chat", watched)
    async with shared_stack.http() as http:
        small = await http.post(PATH, content=body(max_tokens=0), headers=JSON)
        large = await http.post(PATH, content=body(tools=[0] * 100_000), headers=JSON)
    assert (small.status_code, large.status_code) == (400, 400)
    assert large.json()["error"]["param"] == "tools"
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("prompt")


async def test_a_request_without_a_key_is_refused_before_its_body_is_looked_at(shared_stack):
    async with shared_stack.http() as http:
        del http.headers["authorization"]
        answer = await http.post(PATH, content=b"{", headers=JSON)
        assert (await http.get("/v1/models")).status_code == 401
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


async def raw_answer(shared_stack: Stack, request: bytes) -> bytes:
    """Sends raw bytes and no more, and returns the head of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", shared_stack.port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    finally:
        writer.close()
        await writer.wait_closed()


def head(stack: Stack, *headers: str) -> bytes:
    lines = (
        f"POST {PATH} HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"authorization: Bearer {stack.key}",
        *headers,
        "",
        "",
    )
    return "\r\n".join(lines).encode()


async def test_a_declared_length_over_the_limit_is_refused_before_a_byte_of_it_comes(shared_stack):
    answer = await raw_answer(shared_stack, head(shared_stack, "content-length: 1000000000"))
    assert b" 413 " in answer


async def test_an_undeclared_length_over_the_limit_is_refused_while_it_comes(start_stack):
    async with start_stack(max_body_bytes=1024) as stack:
        chunk = b"800\r\n" + b" " * 0x800 + b"\r\n"
        assert b" 413 " in await raw_answer(stack, head(stack, "transfer-encoding: chunked") + chunk)


async def test_a_body_that_never_comes_is_not_waited_for(start_stack):
    async with start_stack(body_timeout_seconds=0.05) as stack:
        assert b" 408 " in await raw_answer(stack, head(stack, "content-length: 10"))


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/v1/", 404, "unknown_url"),
        ("GET", "/nowhere", 404, "unknown_url"),
        ("GET", PATH, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/no/such", 404, "model_not_found"),
    ],
)
async def test_a_wrong_url_or_method_is_told_in_the_same_shape(shared_stack, method, path, status, code):
    async with shared_stack.http() as http:
        answer = await http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_mistake_of_ours_is_told_without_its_place(shared_stack, monkeypatch):
    """The last resort, reached here by taking away what every request needs."""

    async def broken(self: Gateway, key: str) -> None:
        raise RuntimeError("the secret place")

    monkeypatch.setattr(Gateway, "authenticate", broken)
    async with shared_stack.http() as http:
        answer = await http.get("/v1/models")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret place" not in answer.text
