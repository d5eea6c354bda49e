import pytest

from billing import schema
from billing.accounts import (
    KeyHasher,
    Role,
    authenticate,
    create_key,
    create_tenant,
    find_tenant,
    list_keys,
    list_tenants,
    revoke_key,
)
from billing.errors import InvalidName, NameTaken, UnknownKey, UnknownTenant
from billing.ids import ApiKeyId, TenantId, new_id
from tests.integration.billing.ledger_checks import rows
from tests.unit.billing.builders import T0

HASHER = KeyHasher(bytes(range(32)))


@pytest.fixture
def acme(db):
    return create_tenant(db, name="acme", now=T0)


def new_key(db, tenant, label="first", **options):
    return create_key(db, tenant_id=tenant.id, label=label, hasher=HASHER, now=T0, **options)


def test_a_key_proves_its_tenant(db, acme):
    key, secret = new_key(db, acme)
    principal = authenticate(db, HASHER.digest(secret), now=T0)
    assert principal.tenant_id == acme.id
    assert principal.tenant_name == "acme"
    assert principal.api_key_id == key.id
    assert principal.role is Role.TENANT
    _, admin_secret = new_key(db, acme, "admin", role=Role.ADMIN)
    assert authenticate(db, HASHER.digest(admin_secret), now=T0).role is Role.ADMIN


def test_a_key_of_another_deployment_proves_nothing(db, acme):
    _, secret = new_key(db, acme)
    assert authenticate(db, KeyHasher(bytes(32)).digest(secret), now=T0) is None


def test_nothing_at_rest_gives_the_key_away(db, acme):
    key, secret = new_key(db, acme)
    (row,) = rows(db, schema.api_keys)
    hidden = secret.removeprefix(key.prefix + "-")
    assert all(hidden not in str(value) for value in row)
    assert hidden.encode() not in row.digest
    assert secret.startswith(row.prefix)


def test_a_revoked_key_proves_nothing_and_revoking_again_changes_nothing(db, acme):
    key, secret = new_key(db, acme)
    other, other_secret = new_key(db, acme, "other")
    revoke_key(db, key_id=key.id, now=T0 + 1)
    revoke_key(db, key_id=key.id, now=T0 + 2)
    assert authenticate(db, HASHER.digest(secret), now=T0) is None
    assert authenticate(db, HASHER.digest(other_secret), now=T0).api_key_id == other.id
    assert [one.revoked_at for one in list_keys(db, tenant_id=acme.id)] == [T0 + 1, None]


def test_a_key_expires_at_its_instant(db, acme):
    _, secret = new_key(db, acme, expires_at=T0 + 10)
    assert authenticate(db, HASHER.digest(secret), now=T0 + 9).expires_at == T0 + 10
    assert authenticate(db, HASHER.digest(secret), now=T0 + 10) is None


def test_names_are_unique_and_a_revoked_key_frees_its_label(db, acme):
    with pytest.raises(NameTaken):
        create_tenant(db, name="acme", now=T0)
    key, _ = new_key(db, acme)
    with pytest.raises(NameTaken):
        new_key(db, acme)
    new_key(db, create_tenant(db, name="other", now=T0))  # labels are a tenant's own
    revoke_key(db, key_id=key.id, now=T0)
    new_key(db, acme)


@pytest.mark.parametrize("name", ["", " acme", "acme ", "a\nb", "a\0b", "\ud800", "x" * 129])
def test_a_name_that_cannot_be_shown_is_refused(db, acme, name):
    with pytest.raises(InvalidName):
        create_tenant(db, name=name, now=T0)
    with pytest.raises(InvalidName):
        new_key(db, acme, name)


@pytest.mark.parametrize("name", ["x", "Zoë & Söhne 有限公司", "'; DROP TABLE tenants; --", "x" * 128])
def test_any_name_that_can_be_shown_is_kept_as_it_is(db, name):
    created = create_tenant(db, name=name, now=T0)
    assert find_tenant(db, name=name) == created


def test_tenants_are_listed_by_name(db):
    for name in ("b", "c", "a"):
        create_tenant(db, name=name, now=T0)
    assert [tenant.name for tenant in list_tenants(db)] == ["a", "b", "c"]


def test_keys_are_listed_for_their_tenant_alone(db, acme):
    key, _ = new_key(db, acme)
    other = create_tenant(db, name="other", now=T0)
    assert list_keys(db, tenant_id=acme.id) == [key]
    assert list_keys(db, tenant_id=other.id) == []


def test_what_does_not_exist_is_refused(db, acme):
    with pytest.raises(UnknownTenant):
        find_tenant(db, name="nobody")
    with pytest.raises(UnknownTenant):
        create_key(db, tenant_id=TenantId(new_id()), label="x", hasher=HASHER, now=T0)
    with pytest.raises(UnknownKey):
        revoke_key(db, key_id=ApiKeyId(new_id()), now=T0)
