"""What is on the wire: headers, cookies, forms, assets. The site is real; the client sees every byte."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from billing import instants
from billing.accounts import create_key
from gateway.auth import key_hasher
from gateway.web.assets import PLOTLY, load_assets
from tests.browser.site import Customer, Site, running_site

NO_UNSAFE_SCRIPT = "script-src 'self'"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running_site(tmp_path_factory.mktemp("site") / "home") as site:
        yield site


@pytest.fixture(scope="module")
def acme(site: Site) -> Customer:
    customer = site.add_customer("Acme Chat")
    site.record_day(customer)
    return customer


@pytest.fixture
def client(site: Site) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=site.url, timeout=30) as client:
        yield client


def form_token(page: httpx.Response) -> str:
    found = re.search(r'name="form_token" value="([^"]+)"', page.text)
    assert found is not None
    return found[1]


def sign_in(client: httpx.Client, key: str, **headers: str) -> httpx.Response:
    page = client.get("/dashboard/sign-in", headers=headers)
    fields = {"form_token": form_token(page), "key": key}
    return client.post("/dashboard/sign-in", data=fields, headers=headers)


def test_without_a_session_every_page_leads_to_the_sign_in(client: httpx.Client) -> None:
    answer = client.get("/dashboard")
    assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/sign-in")
    assert "set-cookie" not in answer.headers


def test_every_page_carries_the_security_headers(client: httpx.Client, acme: Customer) -> None:
    pages = [client.get("/dashboard"), client.get("/dashboard/sign-in"), sign_in(client, "wrong")]
    pages += [sign_in(client, acme.secret), client.get("/dashboard"), client.post("/dashboard/sign-out")]
    assert [page.status_code for page in pages] == [303, 200, 403, 303, 200, 403]
    for page in pages:
        policy = page.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", NO_UNSAFE_SCRIPT, "base-uri 'none'", "frame-ancestors 'none'"} <= {
            *policy
        }
        assert page.headers["cache-control"] == "no-store"
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["referrer-policy"] == "no-referrer"
        assert "style-src 'self'" in policy
    unsafe = ["'unsafe-inline'" in page.headers["content-security-policy"] for page in pages]
    assert unsafe == [False, False, False, False, True, False], "the attributes of the page with a chart"


def test_no_page_has_a_script_or_a_style_of_its_own(client: httpx.Client, acme: Customer) -> None:
    sign_in(client, acme.secret)
    for page in (client.get("/dashboard"), client.get("/dashboard/sign-in", params={"ended": "expired"})):
        assert re.findall(r"<script(?![^>]*(?:src=|application/json))", page.text) == []
        assert re.findall(r"<style|\sstyle=|\son[a-z]+=|javascript:", page.text) == []
        assert re.findall(r"(?:src|href|action)=\"(?!/dashboard|#)", page.text) == []


@pytest.mark.parametrize(("proto", "is_secure"), [("http", False), ("https", True)])
def test_cookies_are_strict_and_secure_behind_https(
    client: httpx.Client, acme: Customer, proto: str, is_secure: bool
) -> None:
    # What a proxy on this machine says about the connection that it ended.
    page = client.get("/dashboard/sign-in", headers={"x-forwarded-proto": proto})
    nonce = page.headers["set-cookie"].partition("=")[2].partition(";")[0]
    answer = client.post(
        "/dashboard/sign-in",
        data={"form_token": form_token(page), "key": acme.secret},
        headers={"x-forwarded-proto": proto, "cookie": f"headstart_form={nonce}"},
    )
    assert answer.status_code == 303
    for cookie in (page.headers["set-cookie"], answer.headers["set-cookie"]):
        attributes = {part.strip().lower() for part in cookie.split(";")[1:]}
        assert {"httponly", "samesite=strict"} <= attributes
        assert ("secure" in attributes) == is_secure


def test_a_sign_in_needs_the_form_of_the_same_browser(
    client: httpx.Client, site: Site, acme: Customer
) -> None:
    token = form_token(client.get("/dashboard/sign-in"))
    with httpx.Client(base_url=site.url, timeout=30) as stranger:
        stranger.get("/dashboard/sign-in")  # has a cookie, but another form's token
        for fields in ({"key": acme.secret}, {"key": acme.secret, "form_token": token}):
            answer = stranger.post("/dashboard/sign-in", data=fields)
            assert answer.status_code == 403
            assert "headstart_session" not in stranger.cookies
            assert "This form was open for too long." in answer.text
    answer = client.post("/dashboard/sign-in", data={"key": acme.secret, "form_token": token})
    assert answer.status_code == 303


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"key": "x"}', "application/json"),
        (b"key=" + b"x" * 5000, "application/x-www-form-urlencoded"),
        (b"key=\xff", "application/x-www-form-urlencoded"),
        (b"&".join(b"a%d=1" % index for index in range(50)), "application/x-www-form-urlencoded"),
        (b"", ""),
    ],
    ids=["json", "too large", "not ascii", "too many fields", "no type"],
)
def test_what_is_no_form_is_refused(client: httpx.Client, body: bytes, content_type: str) -> None:
    answer = client.post("/dashboard/sign-in", content=body, headers={"content-type": content_type})
    assert answer.status_code == 400
    assert "That was not a form of this page." in answer.text


@pytest.mark.parametrize("key", ["", " ", "hs-", "%00", "%ED%A0%80", "<script>alert(1)</script>", "x" * 3000])
def test_hostile_keys_are_wrong_keys(client: httpx.Client, key: str) -> None:
    answer = sign_in(client, key)
    assert answer.status_code == 403
    assert "This key does not work." in answer.text
    assert "alert(1)" not in answer.text


def test_space_around_a_pasted_key_does_not_matter(client: httpx.Client, acme: Customer) -> None:
    assert sign_in(client, f"  {acme.secret}\n").status_code == 303


def test_signing_out_needs_the_sessions_own_token(client: httpx.Client, acme: Customer) -> None:
    sign_in(client, acme.secret)
    page = client.get("/dashboard")
    for fields in ({}, {"form_token": "made up"}):
        assert client.post("/dashboard/sign-out", data=fields).status_code == 403
        assert client.get("/dashboard").status_code == 200
    answer = client.post("/dashboard/sign-out", data={"form_token": form_token(page)})
    assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/sign-in")
    assert client.get("/dashboard").status_code == 303


def test_what_comes_without_the_cookie_does_not_delete_it(site: Site) -> None:
    """A strict cookie is not sent with what another site asks for; the answer must not end the session."""
    with httpx.Client(base_url=site.url, timeout=30) as foreign:
        for answer in (
            foreign.get("/dashboard"),
            foreign.post("/dashboard/sign-out", data={"form_token": "x"}),
        ):
            assert answer.status_code == 303
            assert "set-cookie" not in answer.headers


def test_a_second_sign_in_replaces_the_session(client: httpx.Client, site: Site, acme: Customer) -> None:
    fields = {"form_token": form_token(client.get("/dashboard/sign-in")), "key": acme.secret}
    client.post("/dashboard/sign-in", data=fields)
    first = client.cookies["headstart_session"]
    client.post("/dashboard/sign-in", data=fields)
    assert client.cookies["headstart_session"] != first
    assert client.get("/dashboard").status_code == 200
    with httpx.Client(base_url=site.url, cookies={"headstart_session": first}, timeout=30) as old:
        assert old.get("/dashboard").status_code == 303


def test_an_expired_key_opens_nothing(client: httpx.Client, site: Site, acme: Customer) -> None:
    _, secret = create_key(
        site.gateway.database,
        tenant_id=acme.tenant.id,
        label="expired",
        hasher=key_hasher(site.gateway.secret),
        now=instants.now(),
        expires_at=site.clock(),
    )
    assert sign_in(client, secret).status_code == 403


def test_a_forged_host_is_not_repeated(client: httpx.Client, site: Site) -> None:
    sign_in(client, site.add_customer("newcomer").secret)
    assert f"curl {site.url}/v1" in client.get("/dashboard").text
    page = client.get("/dashboard", headers={"host": "x$(reboot)"})
    assert page.status_code in {200, 303}
    assert "reboot" not in page.text


def test_a_page_answers_head_and_refuses_other_methods(client: httpx.Client) -> None:
    assert client.head("/dashboard/sign-in").status_code == 200
    assert client.put("/dashboard/sign-in").status_code == 405
    assert client.get("/dashboard/sign-out").status_code == 405
    assert client.get("/dashboard/nothing").status_code == 404


def test_assets_are_kept_for_ever_by_their_content(client: httpx.Client) -> None:
    for name, asset in load_assets().items():
        answer = client.get(asset.address)
        assert answer.content == asset.content
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert client.get(f"/dashboard/static/{name}?v=old").headers["cache-control"] == "no-cache"
        again = client.get(asset.address, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        plain = client.get(asset.address, headers={"accept-encoding": "gzip;q=0, identity"})
        assert (plain.content, "content-encoding" in plain.headers) == (asset.content, False)


def test_plotly_comes_from_its_python_package_compressed(client: httpx.Client) -> None:
    asset = load_assets()[PLOTLY]
    assert gzip.decompress(asset.compressed) == asset.content
    assert len(asset.compressed) < len(asset.content) / 3
    assert b"plotly.js v" in asset.content[:200]


@pytest.mark.parametrize("name", ["..%2froutes.py", "routes.py", "%00", ".", "plotly.min.js.map"])
def test_nothing_else_is_served_as_an_asset(client: httpx.Client, name: str) -> None:
    assert client.get(f"/dashboard/static/{name}").status_code == 404


def test_an_unreachable_ledger_is_told_and_the_session_survives(tmp_path: Path) -> None:
    with running_site(tmp_path / "home") as site, httpx.Client(base_url=site.url, timeout=30) as client:
        sign_in(client, site.add_customer("Acme Chat").secret)
        database = tmp_path / "home" / "headstart.db"
        away = database.rename(database.with_suffix(".away"))
        database.mkdir()  # a folder is no database: connecting fails
        site.gateway.database.close()
        answer = client.get("/dashboard")
        assert answer.status_code == 503
        assert "The ledger cannot be read at the moment." in answer.text
        database.rmdir()
        away.rename(database)
        assert client.get("/dashboard").status_code == 200


def test_a_form_that_stalls_is_given_up(tmp_path: Path) -> None:
    async def stall(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /dashboard/sign-in HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-type: application/x-www-form-urlencoded\r\ncontent-length: 10\r\n\r\nkey="
        )
        await writer.drain()
        status = await reader.readline()
        writer.close()
        return status

    with running_site(tmp_path / "home", body_timeout_seconds=0.05) as site:
        status = asyncio.run(stall(int(site.url.rpartition(":")[2])))
    assert status.split()[1] == b"400"
