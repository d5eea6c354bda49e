"""Receipts over HTTP and on the command line."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
from hashlib import sha256
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from billing.errors import InvalidReceiptKey, UnknownRequest
from billing.ids import new_request_id
from billing.receipt_keys import SigningKey, encode_key_set
from gateway.cli import app
from gateway.receipt_key import RECEIPT_KEY_FILE_NAME, load_receipt_key
from gateway.secrets import SecretUnusable
from gateway.settings import Settings
from gateway.terminal import CommandRefused
from model_worker.protocol import Finished
from tests.integration.gateway.scripted_worker import MODEL

MESSAGES = [{"role": "user", "content": "hello"}]


async def completed(stack) -> str:
    """A request that ended; returns its id."""
    async with stack.client() as client:
        answer = await client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES)
    return answer.headers["x-request-id"]


async def test_a_receipt_is_there_as_soon_as_the_answer_is(stack):
    request_id = await completed(stack)
    async with stack.http() as http:
        answer = await http.get(f"/v1/receipts/{request_id}")
    [receipt] = answer.json()["data"]
    [event] = await stack.usage_events()
    assert answer.status_code == 200
    assert receipt["request_id"] == request_id
    assert receipt["worker"] == event.worker
    assert receipt["miss_reason"] == event.miss_reason
    assert receipt["prompt_tokens"] == event.uncached_tokens + event.read_tokens
    assert receipt["tokens"]["output"] == event.output_tokens


async def test_receipts_of_http_are_checked_offline_with_the_published_keys(stack, tmp_path):
    request_ids = [await completed(stack) for _ in range(3)]
    async with stack.http() as http:
        answers = [(await http.get(f"/v1/receipts/{one}")).content for one in request_ids]
        keys = await http.get("/v1/receipts/keys", headers={"authorization": ""})
    assert keys.status_code == 200
    file, key_file = tmp_path / "receipts.jsonl", tmp_path / "keys.json"
    # Each is there as it was signed, byte by byte.
    signed = [one.removeprefix(b'{"object":"list","data":[').removesuffix(b"]}") for one in answers]
    file.write_bytes(b"".join(one + b"\n" for one in signed))
    key_file.write_bytes(keys.content)
    assert "receipts 1 to 3 are sound" in await asyncio.to_thread(
        run, "verify", file, "--public-key", key_file
    )


async def test_a_receipt_of_another_tenant_is_not_found(stack):
    request_id = await completed(stack)
    async with stack.http() as http:
        other = {"authorization": f"Bearer {stack.new_key('other')}"}
        answer = await http.get(f"/v1/receipts/{request_id}", headers=other)
        unknown = await http.get(f"/v1/receipts/{new_request_id()}")
        anonymous = await http.get(f"/v1/receipts/{request_id}", headers={"authorization": ""})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")
    assert unknown.json() == answer.json()
    assert anonymous.status_code == 401


async def test_a_request_that_has_not_ended_has_no_receipt_yet(stack):
    released = asyncio.Event()

    async def held(request):
        yield stack.worker.started(request)
        await released.wait()
        yield Finished(reason="stop", text="", output_tokens=0)

    stack.worker.script = held
    running = asyncio.create_task(completed(stack))
    exchange = await stack.worker.next_exchange()
    async with stack.http() as http:
        early = await http.get(f"/v1/receipts/{exchange.request.request_id}")
        released.set()
        late = await http.get(f"/v1/receipts/{await running}")
    assert (early.status_code, early.json()["error"]["code"]) == (404, "receipt_not_issued")
    assert late.status_code == 200


@pytest.mark.parametrize(
    ("path", "param"), [("/v1/receipts/nonsense", "request_id"), (f"/v1/receipts/{uuid4()}?all=1", "all")]
)
async def test_what_is_not_understood_is_refused_by_name(stack, path, param):
    async with stack.http() as http:
        answer = await http.get(path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_operators_see_how_many_receipts_are_due(stack):
    await completed(stack)
    async with stack.http() as http:
        scraped = (await http.get("/metrics")).text
    assert "headstart_receipts_due " in scraped
    assert "headstart_receipts_sealed_total " in scraped


@pytest.fixture
async def home(start_stack, tmp_path, monkeypatch):
    """The ids of three requests that a gateway served before it stopped; its home is the commands' own."""
    async with start_stack() as stack:
        request_ids = [await completed(stack) for _ in range(3)]
        monkeypatch.setenv("HEADSTART_HOME", str(stack.gateway.settings.home))
    return request_ids


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["receipts", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_receipts_are_shown_exported_and_checked(home, tmp_path, monkeypatch):
    request_ids = home
    keys, exported = tmp_path / "keys.json", tmp_path / "receipts.jsonl"
    keys.write_text(run("keys"))
    exported.write_text(run("export", "--tenant", "acme"))
    assert json.loads(run("show", request_ids[1])) == json.loads(exported.read_text().splitlines()[1])
    assert (
        run("export", "--tenant", "acme", "--after", 2) == exported.read_text().splitlines(keepends=True)[2]
    )
    # An auditor has no home, no database and no setting of ours.
    monkeypatch.setenv("HEADSTART_HOME", "/nonexistent")
    monkeypatch.setenv("HEADSTART_DATABASE_URL", "nonsense")
    digest = sha256(exported.read_bytes().splitlines()[-1]).hexdigest()
    said = run("verify", exported, "--public-key", keys)
    assert "receipts 1 to 3 are sound" in said
    assert digest in said
    exported.write_bytes(exported.read_bytes().replace(b'"amount":"', b'"amount":"1', 1))
    command = [sys.executable, "-m", "gateway", "receipts", "verify", exported, "--public-key", keys]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert "line 1, receipt 1 of tenant" in refused.stderr
    assert "it was changed" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_what_cannot_be_shown_or_checked_is_refused(home, tmp_path):
    other, nothing = tmp_path / "other.json", tmp_path / "nothing"
    other.write_bytes(encode_key_set([SigningKey.new().public]))
    nothing.write_bytes(b"")
    with pytest.raises(UnknownRequest):
        run("show", uuid4())
    for file, keys, refusal in (
        (nothing, other, CommandRefused),
        (tmp_path / "absent", other, CommandRefused),
        (other, tmp_path / "absent", CommandRefused),
        (nothing, nothing, InvalidReceiptKey),
    ):
        with pytest.raises(refusal):
            run("verify", file, "--public-key", keys)


def test_the_first_start_makes_a_key_that_later_starts_read(tmp_path):
    settings = Settings(home=tmp_path / "home")
    made = load_receipt_key(settings)
    path = settings.home / RECEIPT_KEY_FILE_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_receipt_key(settings).public.id == made.public.id
    path.chmod(0o644)
    with pytest.raises(SecretUnusable, match="chmod 600"):
        load_receipt_key(settings)


def test_the_operators_key_goes_first_and_a_damaged_one_is_refused(tmp_path):
    mine, key = tmp_path / "mine.pem", SigningKey.new()
    mine.write_text(key.as_pem())
    assert load_receipt_key(Settings(home=tmp_path, receipt_key_file=mine)).public.id == key.public.id
    mine.write_text("nonsense")
    for path in (mine, tmp_path / "absent"):
        with pytest.raises(SecretUnusable, match=str(path)):
            load_receipt_key(Settings(home=tmp_path, receipt_key_file=path))
    assert not (tmp_path / RECEIPT_KEY_FILE_NAME).exists()
