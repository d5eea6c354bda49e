"""Every test here runs twice: on SQLite and on a real PostgreSQL."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import Connection, create_engine, text

from billing import schema
from billing.accounts import ApiKey, KeyHasher, Tenant, create_key, create_tenant
from billing.db import Database, migrate, open_database
from billing.meter import Meter, MeterLimits
from billing.price_sheet import parse_price_sheet
from billing.prices import ensure_published
from billing.usage import Admission
from tests.servers import PostgresServer, running_postgres
from tests.unit.billing import builders
from tests.unit.billing.builders import T0

BOOK = parse_price_sheet(
    f"""
    book: test
    currency: USD
    cache_basis_points: {{read: 1000, write_auto: 10000, write_5m: 12500, write_1h: 20000}}
    models:
      {builders.MODEL}: {{input: 3000000, output: 15000000}}
    """
)


@dataclass(frozen=True, kw_only=True)
class Account:
    """A tenant with one key, to admit requests for."""

    tenant: Tenant
    key: ApiKey

    def admission(self, **changes) -> Admission:
        return builders.admission(tenant_id=self.tenant.id, api_key_id=self.key.id, **changes)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def migrated_postgres_url(postgres: PostgresServer) -> str:
    """One migrated database for all tests, which empty it before they use it."""
    url = new_postgres_database(postgres)
    migrate(url)
    return url


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite").joinpath("template.db")
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without any schema."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path.joinpath('empty.db')}"
    return new_postgres_database(request.getfixturevalue("postgres"))


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A migrated database, empty of rows."""
    if request.param == "sqlite":
        path = tmp_path.joinpath("headstart.db")
        shutil.copy(request.getfixturevalue("sqlite_template"), path)
        return f"sqlite:///{path}"
    url: str = request.getfixturevalue("migrated_postgres_url")
    empty_postgres_database(url)
    return url


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    with open_database(database_url) as database:
        yield database


@pytest.fixture
def account(db: Database) -> Account:
    """A tenant and a key, in a database with the test's price book in force."""
    ensure_published(db, BOOK, clock=lambda: T0)
    return new_account(db, "acme")


@pytest.fixture
def new_meter(db: Database, tmp_path: Path) -> Iterator[Callable[..., Meter]]:
    """Makes meters on the same journal, one after another; the last is closed at the end."""
    made: list[Meter] = []

    def make(*, start: bool = True, journal: str = "journal", **limits) -> Meter:
        meter = Meter(db, tmp_path.joinpath(journal), clock=lambda: T0, limits=MeterLimits(**limits))
        if start:
            meter.start()
            made.append(meter)
        return meter

    yield make
    for meter in made:
        meter.close()


@pytest.fixture
def outage(database_url: str) -> Callable[[], AbstractContextManager[None]]:
    """While it lasts, the database answers every statement on usage with a failure."""
    return lambda: database_outage(database_url)


def new_account(db: Database, name: str) -> Account:
    tenant = create_tenant(db, name=name, now=T0)
    key, _ = create_key(db, tenant_id=tenant.id, label="first", hasher=KeyHasher(bytes(32)), now=T0)
    return Account(tenant=tenant, key=key)


def new_postgres_database(server: PostgresServer) -> str:
    name = f"billing_{uuid4().hex}"
    with autocommitted(server.url()) as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    return server.url(name)


def empty_postgres_database(url: str) -> None:
    deletions = "; ".join(f"DELETE FROM {table}" for table in schema.metadata.tables)
    with autocommitted(url) as connection:
        # As a replica no trigger fires; or the ledger's would refuse.
        connection.execute(text(f"SET session_replication_role = replica; {deletions}"))


@contextmanager
def autocommitted(url: str) -> Iterator[Connection]:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


@contextmanager
def database_outage(url: str) -> Iterator[None]:
    if url.startswith("sqlite"):
        with _sqlite_without_tables(url):
            yield
        return
    server, name = url.rsplit("/", 1)
    with autocommitted(f"{server}/postgres") as connection:
        connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false"))
        terminate = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = :name"
        connection.execute(text(terminate), {"name": name})
        try:
            yield
        finally:
            connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true"))


@contextmanager
def _sqlite_without_tables(url: str) -> Iterator[None]:
    with open_database(url) as database:
        with database.write() as connection:
            connection.execute(text("ALTER TABLE requests RENAME TO requests_away"))
        try:
            yield
        finally:
            with database.write() as connection:
                connection.execute(text("ALTER TABLE requests_away RENAME TO requests"))
