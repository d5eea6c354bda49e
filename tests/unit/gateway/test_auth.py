"""Keys, scopes, and how soon a revocation is noticed."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pytest

from billing.accounts import KeyDigest, Principal, Role
from billing.errors import DatabaseUnavailable
from billing.ids import ApiKeyId, TenantId
from gateway.auth import Authenticator, bearer_key, key_hasher, scope_of
from gateway.edge.errors import ServiceUnavailable, Unauthenticated
from gateway.secrets import DeploymentSecret

SECRET = DeploymentSecret(b"s" * 32)
TENANT_A, TENANT_B = TenantId(UUID(int=1)), TenantId(UUID(int=2))
PRINCIPAL = Principal(
    tenant_id=TENANT_A,
    tenant_name="a",
    api_key_id=ApiKeyId(UUID(int=3)),
    role=Role.TENANT,
    expires_at=None,
)
KEY = "hs-" + "a" * 8 + "-" + "b" * 43


class Keys:
    """A database of one key, with a clock that a test moves."""

    def __init__(self) -> None:
        self.answer: Principal | None = PRINCIPAL
        self.fault: Exception | None = None
        self.asked = 0
        self.now = 0.0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def look_up(self, digest: KeyDigest) -> Principal | None:
        self.asked += 1
        assert self.may_answer.wait(10)
        if self.fault is not None:
            raise self.fault
        return self.answer


@pytest.fixture
def keys():
    return Keys()


@pytest.fixture
def authenticator(keys):
    with ThreadPoolExecutor(2) as threads:
        yield Authenticator(
            keys.look_up, key_hasher(SECRET), threads, remember_seconds=1.0, clock=lambda: keys.now
        )


@pytest.mark.parametrize("header", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY} "])
def test_a_bearer_header_carries_a_key(header):
    assert bearer_key(header) == KEY


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", f"Basic {KEY}", KEY])
def test_any_other_header_is_refused(header):
    with pytest.raises(Unauthenticated) as caught:
        bearer_key(header)
    assert caught.value.status == 401
    assert caught.value.code == "invalid_api_key"
    assert caught.value.param == "authorization"
    assert caught.value.headers["www-authenticate"] == "Bearer"


async def test_an_answer_is_remembered_for_a_second_and_no_longer(keys, authenticator):
    assert await authenticator.authenticate(KEY) == PRINCIPAL
    keys.answer, keys.now = None, 0.99
    assert await authenticator.authenticate(KEY) == PRINCIPAL
    assert keys.asked == 1
    keys.now = 1.0
    with pytest.raises(Unauthenticated):
        await authenticator.authenticate(KEY)


async def test_an_unknown_key_is_remembered_too(keys, authenticator):
    keys.answer = None
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            await authenticator.authenticate(KEY)
    assert keys.asked == 1


@pytest.mark.parametrize("text", ["", "x", "hs-é", "\ud800", "hs-" + "a" * 10_000, "sk-1234"])
async def test_a_text_that_is_no_key_never_reaches_the_database(keys, authenticator, text):
    with pytest.raises(Unauthenticated):
        await authenticator.authenticate(text)
    assert keys.asked == 0


async def test_askers_that_come_together_share_one_question_and_one_may_leave(keys, authenticator):
    keys.may_answer.clear()
    askers = [asyncio.create_task(authenticator.authenticate(KEY)) for _ in range(5)]
    await asyncio.sleep(0)
    askers[0].cancel()
    await asyncio.sleep(0)
    keys.may_answer.set()
    assert await asyncio.gather(*askers[1:]) == [PRINCIPAL] * 4
    assert keys.asked == 1


async def test_a_database_that_is_away_is_not_a_wrong_key_and_is_not_remembered(keys, authenticator):
    keys.fault = DatabaseUnavailable("away")
    with pytest.raises(ServiceUnavailable):
        await authenticator.authenticate(KEY)
    keys.fault = None
    assert await authenticator.authenticate(KEY) == PRINCIPAL


def test_a_scope_is_one_tenants_in_one_deployment():
    scopes = {
        scope_of(secret, tenant, salt=salt)
        for secret in (SECRET, DeploymentSecret(b"t" * 32))
        for tenant in (TENANT_A, TENANT_B)
        for salt in (b"", b"x")
    }
    assert len(scopes) == 8
    assert scope_of(SECRET, TENANT_A) == scope_of(SECRET, TENANT_A, salt=b"")
    assert all(len(bytes.fromhex(scope)) == 32 for scope in scopes)
