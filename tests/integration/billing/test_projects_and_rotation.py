"""Projects of a tenant, keys that belong to one, and keys that are replaced."""

from datetime import timedelta

import pytest

from billing import instants
from billing.accounts import (
    KeyHasher,
    authenticate,
    create_key,
    find_tenant,
    list_keys,
    revoke_key,
    rotate_key,
    set_zone,
)
from billing.calendar import uncut, zone_named
from billing.errors import InvalidName, NameTaken, UnknownKey, UnknownProject, UnknownTenant, UnknownZone
from billing.ids import ApiKeyId, ProjectId, TenantId, new_id
from billing.projects import archive_project, create_project, find_project, list_projects
from billing.reports import Dimension, Selection, grouped_usage
from tests.integration.billing.conftest import Account, new_account
from tests.integration.billing.ledger_checks import check_ledger
from tests.unit.billing.builders import T0, final

HASHER = KeyHasher(bytes(32))
HOUR = timedelta(hours=1)


def key_of(db, account, **given):
    return create_key(db, tenant_id=account.tenant.id, hasher=HASHER, now=T0, **given)


def works(db, text, at) -> bool:
    return authenticate(db, HASHER.digest(text), now=at) is not None


def test_usage_of_a_projects_key_is_the_projects(db, account, new_meter):
    project = create_project(db, tenant_id=account.tenant.id, name="search", now=T0)
    key, text = key_of(db, account, label="search", project_id=project.id)
    principal = authenticate(db, HASHER.digest(text), now=T0)
    assert principal is not None
    assert principal.project_id == key.project_id == project.id
    meter = new_meter()
    meter.settle(final(account.admission(), uncached=1))
    meter.settle(final(Account(tenant=account.tenant, key=key).admission(), uncached=20))
    meter.flush()
    check_ledger(db)
    spans = uncut(T0, T0 + 1, zone_named("UTC"))
    found = grouped_usage(db, Selection(tenant_ids=[account.tenant.id]), spans, by=[Dimension.PROJECT])
    assert {one.group.project_id: one.totals.uncached_tokens for one in found} == {None: 1, project.id: 20}


def test_projects_are_listed_found_and_archived_and_an_archived_one_gets_no_key(db, account):
    tenant_id = account.tenant.id
    for name in ("search", "chat"):
        create_project(db, tenant_id=tenant_id, name=name, now=T0)
    archive_project(db, tenant_id=tenant_id, name="chat", now=T0 + 1)
    archive_project(db, tenant_id=tenant_id, name="chat", now=T0 + 2)
    assert [(one.name, one.archived_at) for one in list_projects(db, tenant_id=tenant_id)] == [
        ("chat", T0 + 1),
        ("search", None),
    ]
    with pytest.raises(UnknownProject):
        key_of(db, account, label="x", project_id=find_project(db, tenant_id=tenant_id, name="chat").id)


def test_a_project_is_its_tenants_alone(db, account):
    other = new_account(db, "other")
    project = create_project(db, tenant_id=other.tenant.id, name="search", now=T0)
    for foreign in (project.id, ProjectId(new_id())):
        with pytest.raises(UnknownProject):
            key_of(db, account, label="x", project_id=foreign)
    with pytest.raises(UnknownProject):
        find_project(db, tenant_id=account.tenant.id, name="search")
    with pytest.raises(NameTaken):
        create_project(db, tenant_id=other.tenant.id, name="search", now=T0)
    with pytest.raises(InvalidName):
        create_project(db, tenant_id=other.tenant.id, name=" search", now=T0)
    with pytest.raises(UnknownTenant):
        create_project(db, tenant_id=TenantId(new_id()), name="search", now=T0)


def test_a_rotated_key_works_until_its_grace_is_over_and_its_successor_has_its_label(db, account):
    project = create_project(db, tenant_id=account.tenant.id, name="search", now=T0)
    old, old_text = key_of(db, account, label="ci", project_id=project.id)
    new, new_text = rotate_key(db, key_id=old.id, hasher=HASHER, now=T0 + 10, grace=HOUR)
    last = instants.later(T0 + 10, HOUR)
    assert works(db, old_text, last - 1)
    assert not works(db, old_text, last)
    assert works(db, new_text, last)
    assert (new.label, new.project_id, new.role) == ("ci", project.id, old.role)
    listed = {key.id: key for key in list_keys(db, tenant_id=account.tenant.id)}
    assert listed[old.id].replaced_by == new.id
    assert listed[new.id].label == "ci"
    with pytest.raises(NameTaken):
        key_of(db, account, label="ci")


def test_without_grace_the_old_key_ends_at_once(db, account):
    old, old_text = key_of(db, account, label="ci")
    rotate_key(db, key_id=old.id, hasher=HASHER, now=T0 + 10, grace=timedelta())
    assert not works(db, old_text, T0 + 10)


def test_a_key_that_would_end_sooner_is_not_kept_alive_by_its_rotation(db, account):
    old, old_text = key_of(db, account, label="ci", expires_at=T0 + 100)
    _, new_text = rotate_key(db, key_id=old.id, hasher=HASHER, now=T0 + 10, grace=HOUR)
    assert not works(db, old_text, T0 + 100)
    assert not works(db, new_text, T0 + 100)


def test_what_cannot_be_rotated_is_refused(db, account):
    revoked, _ = key_of(db, account, label="revoked")
    revoke_key(db, key_id=revoked.id, now=T0)
    expired, _ = key_of(db, account, label="expired", expires_at=T0 + 1)
    rotated, _ = key_of(db, account, label="rotated")
    rotate_key(db, key_id=rotated.id, hasher=HASHER, now=T0, grace=HOUR)
    for key_id in (revoked.id, expired.id, rotated.id, ApiKeyId(new_id())):
        with pytest.raises(UnknownKey):
            rotate_key(db, key_id=key_id, hasher=HASHER, now=T0 + 1, grace=HOUR)


def test_a_tenants_zone_can_be_changed_to_one_that_exists(db, account):
    set_zone(db, tenant_id=account.tenant.id, time_zone="Asia/Kathmandu", now=T0)
    assert find_tenant(db, name="acme").time_zone == "Asia/Kathmandu"
    with pytest.raises(UnknownZone, match="Mars"):
        set_zone(db, tenant_id=account.tenant.id, time_zone="Mars/Olympus", now=T0)
    with pytest.raises(UnknownTenant):
        set_zone(db, tenant_id=TenantId(new_id()), time_zone="UTC", now=T0)
