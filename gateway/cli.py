"""The command `headstart`: serve, operate, report.

Knows arguments and how a result is shown. Does not know how anything is done:
each command calls one owner. Torch is never imported here.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final
from uuid import UUID

import typer
import uvloop
from pydantic import ValidationError

from billing import instants
from billing.accounts import (
    Role,
    create_key,
    create_tenant,
    find_tenant,
    list_keys,
    list_tenants,
    revoke_key,
    rotate_key,
    set_zone,
)
from billing.db import open_database
from billing.errors import BillingError
from billing.ids import ApiKeyId
from billing.projects import archive_project, create_project, find_project, list_projects
from gateway import (
    limit_commands,
    price_commands,
    receipt_commands,
    reconcile_commands,
    report_commands,
)
from gateway.app import Gateway, build_app, build_gateway
from gateway.auth import key_hasher
from gateway.bootstrap import (
    FIRST_TENANT,
    FirstKey,
    HomeUnusable,
    ensure_admin_key,
    ensure_first_key,
    make_home,
    prepare_database,
)
from gateway.child import WorkerChild, WorkerEnded, WorkerSlow, worker_command
from gateway.logs import configure_logs
from gateway.secrets import SecretUnusable, ledger_url, load_secret
from gateway.serving import PortTaken, Stop, listen, run_gateway, run_with_worker
from gateway.settings import Settings
from gateway.terminal import (
    CommandRefused,
    TenantOption,
    open_current_database,
    print_table,
    require_current,
    settings_fault,
    settings_from,
    shown,
)
from gateway.tracing import TracingUnavailable
from prefix_store.simulate import command as simulate_trace

EXIT_REFUSED: Final = 1
EXIT_USAGE: Final = 2

app = typer.Typer(
    name="headstart",
    help="A prompt-caching gateway: each shared prompt prefix is computed once and billed once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
tenants = typer.Typer(no_args_is_help=True, help="Who is billed.")
projects = typer.Typer(no_args_is_help=True, help="What a tenant's keys and budgets are told apart by.")
keys = typer.Typer(no_args_is_help=True, help="How tenants prove who they are.")
app.add_typer(tenants, name="tenants")
app.add_typer(projects, name="projects")
app.add_typer(keys, name="keys")
app.add_typer(price_commands.prices, name="prices")
app.add_typer(limit_commands.budgets, name="budgets")
app.add_typer(limit_commands.limits, name="limits")
app.add_typer(receipt_commands.receipts, name="receipts")
app.add_typer(reconcile_commands.books, name="billing")
app.command("simulate")(simulate_trace)
app.command("usage")(report_commands.usage)
app.command("statement")(report_commands.statement)
app.command("export")(report_commands.export)

PortOption = Annotated[int | None, typer.Option(help="Default HEADSTART_PORT, else 8080.")]


def main() -> None:
    """Entry point of the command."""
    with refusals_told():
        app()


@contextmanager
def refusals_told() -> Iterator[None]:
    """A refusal is one line on standard error and an exit status, never a stack trace."""
    try:
        yield
    except ValidationError as error:
        _end(settings_fault(error), EXIT_USAGE)
    except (
        CommandRefused,
        BillingError,
        HomeUnusable,
        SecretUnusable,
        TracingUnavailable,
        PortTaken,
        WorkerEnded,
        WorkerSlow,
    ) as error:
        _end(str(error), EXIT_REFUSED)


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Option(help="A local folder or hub id; default HEADSTART_MODEL.")
    ] = None,
    port: PortOption = None,
) -> None:
    """Start a gateway and its worker on this machine. Ctrl-C stops both."""
    settings = settings_from(model=model, port=port)
    serve_locally(settings, worker_command(settings.model))


def serve_locally(settings: Settings, command: Sequence[str]) -> None:
    """A gateway and the worker that the command starts, until a signal. Raises what its parts raise."""
    configure_logs(settings.log_level, log_format=settings.log_format)
    with listen(settings.host, settings.port) as listener:
        actual_port: int = listener.getsockname()[1]
        gateway = build_gateway(settings)
        prepare_database(ledger_url(settings), gateway.database)
        first_key = ensure_first_key(gateway.database, key_hasher(gateway.secret), settings.first_key_file)
        child = WorkerChild(
            command,
            block_seed=gateway.secret.block_seed(),
            start_timeout_seconds=settings.worker_start_timeout_seconds,
        )
        uvloop.run(
            run_with_worker(
                gateway,
                build_app(gateway),
                listener,
                child,
                Stop(),
                lambda: typer.echo(_welcome(gateway, actual_port, first_key)),
            )
        )
    typer.echo("Headstart has stopped.")


@app.command(name="gateway")
def serve_gateway(
    port: PortOption = None,
    worker_url: Annotated[str | None, typer.Option(help="Default HEADSTART_WORKER_URL.")] = None,
) -> None:
    """Start a gateway alone, in front of a worker that runs elsewhere."""
    settings = settings_from(port=port, worker_url=worker_url)
    if settings.worker_url is None:
        raise CommandRefused("no worker: set HEADSTART_WORKER_URL or give --worker-url")
    configure_logs(settings.log_level, log_format=settings.log_format)
    with listen(settings.host, settings.port) as listener:
        address = f"http://{settings.host}:{listener.getsockname()[1]}/v1"
        gateway = build_gateway(settings)
        require_current(gateway.database)
        uvloop.run(
            run_gateway(
                gateway,
                build_app(gateway),
                listener,
                Stop(),
                lambda: typer.echo(f"Headstart's gateway listens on {address}"),
            )
        )


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def worker(context: typer.Context) -> None:
    """Start a model worker alone; every argument is passed on to `python -m model_worker`."""
    seed = os.environ.get("HEADSTART_BLOCK_SEED") or load_secret(settings_from()).block_seed()
    command = [sys.executable, "-m", "model_worker", *context.args]
    os.execve(sys.executable, command, {**os.environ, "HEADSTART_BLOCK_SEED": seed})  # noqa: S606


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def capacity(context: typer.Context) -> None:
    """Show how many tokens and conversations fit in memory. Arguments: --model, --memory, --context."""
    command = [sys.executable, "-m", "model_worker.capacity", *context.args]
    os.execv(sys.executable, command)  # noqa: S606


@app.command()
def migrate(
    first_key: Annotated[
        bool, typer.Option("--first-key", help="Also make the first tenant and key, if there is none.")
    ] = False,
) -> None:
    """Bring the database's schema to this version, and publish the default prices where there are none."""
    settings = settings_from()
    make_home(settings.home)
    url = ledger_url(settings)
    with open_database(url) as database:
        prepare_database(url, database)
        typer.echo("The schema is current.")
        if first_key:
            hasher = key_hasher(load_secret(settings))
            made = ensure_first_key(database, hasher, settings.first_key_file)
            typer.echo(_about_first_key(made, settings))
        if settings.admin_key_file is not None:
            ensure_admin_key(database, key_hasher(load_secret(settings)), settings.admin_key_file)
            typer.echo(f"The key in {settings.admin_key_file} is an admin's.")


@tenants.command("create")
def tenants_create(name: str) -> None:
    """Add a tenant."""
    with open_current_database() as database:
        tenant = create_tenant(database, name=name, now=instants.now())
    typer.echo(f"{tenant.name} {tenant.id}")


tenants.command("set-discount")(price_commands.discount)


@tenants.command("set-zone")
def tenants_set_zone(
    tenant: TenantOption, zone: Annotated[str, typer.Argument(help="Asia/Kolkata.")]
) -> None:
    """Say where a tenant's days and months begin."""
    with open_current_database() as database:
        tenant_id = find_tenant(database, name=tenant).id
        set_zone(database, tenant_id=tenant_id, time_zone=zone, now=instants.now())


@projects.command("create")
def projects_create(tenant: TenantOption, name: str) -> None:
    """Add a project, for keys and budgets."""
    with open_current_database() as database:
        owner = find_tenant(database, name=tenant).id
        project = create_project(database, tenant_id=owner, name=name, now=instants.now())
    typer.echo(f"{project.name} {project.id}")


@projects.command("list")
def projects_list(tenant: TenantOption) -> None:
    """Show a tenant's projects."""
    with open_current_database() as database:
        found = list_projects(database, tenant_id=find_tenant(database, name=tenant).id)
    rows = [
        (one.name, str(one.id), shown(one.created_at), "archived" if one.archived_at is not None else "open")
        for one in found
    ]
    print_table(("project", "id", "created", "state"), rows)


@projects.command("archive")
def projects_archive(tenant: TenantOption, name: str) -> None:
    """Give a project no more keys. Those that it has go on working."""
    with open_current_database() as database:
        owner = find_tenant(database, name=tenant).id
        archive_project(database, tenant_id=owner, name=name, now=instants.now())


@tenants.command("list")
def tenants_list() -> None:
    """Show every tenant."""
    with open_current_database() as database:
        rows = [(tenant.name, str(tenant.id), shown(tenant.created_at)) for tenant in list_tenants(database)]
    print_table(("tenant", "id", "created"), rows)


@keys.command("create")
def keys_create(
    tenant: TenantOption,
    label: Annotated[str, typer.Option(help="What the key is for; unique among the tenant's live keys.")],
    admin: Annotated[bool, typer.Option("--admin", help="May see every tenant's business.")] = False,
    project: Annotated[str | None, typer.Option(help="A project's name; the key stays with it.")] = None,
    expires: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"], help="UTC.")
    ] = None,
) -> None:
    """Make a key. It is printed once, alone on standard output, and kept nowhere."""
    with open_current_database() as database:
        tenant_id = find_tenant(database, name=tenant).id
        _, text = create_key(
            database,
            tenant_id=tenant_id,
            label=label,
            hasher=key_hasher(load_secret(settings_from())),
            now=instants.now(),
            role=Role.ADMIN if admin else Role.TENANT,
            expires_at=None if expires is None else instants.from_datetime(expires.replace(tzinfo=UTC)),
            project_id=None
            if project is None
            else find_project(database, tenant_id=tenant_id, name=project).id,
        )
    typer.echo(text)
    typer.echo("Keep it: it cannot be shown again.", err=True)


@keys.command("rotate")
def keys_rotate(
    key_id: UUID,
    grace_hours: Annotated[int, typer.Option(min=0, help="How long the old key goes on working.")] = 24,
) -> None:
    """Make a successor with the key's label. It is printed once; the old key works for a while yet."""
    with open_current_database() as database:
        _, text = rotate_key(
            database,
            key_id=ApiKeyId(key_id),
            hasher=key_hasher(load_secret(settings_from())),
            now=instants.now(),
            grace=timedelta(hours=grace_hours),
        )
    typer.echo(text)
    typer.echo(f"Keep it: it cannot be shown again. The old key works for {grace_hours} hours.", err=True)


@keys.command("list")
def keys_list(tenant: TenantOption) -> None:
    """Show a tenant's keys, without their secret part."""
    with open_current_database() as database:
        found = list_keys(database, tenant_id=find_tenant(database, name=tenant).id)
    rows = [
        (
            str(key.id),
            key.label,
            key.prefix,
            key.role.value,
            shown(key.created_at),
            shown(key.revoked_at) if key.revoked_at is not None else "",
        )
        for key in found
    ]
    print_table(("id", "label", "prefix", "role", "created", "revoked"), rows)


@keys.command("revoke")
def keys_revoke(key_id: UUID) -> None:
    """Make a key useless, within a second, for ever. KEY_ID is what `keys list` shows."""
    with open_current_database() as database:
        revoke_key(database, key_id=ApiKeyId(key_id), now=instants.now())
    typer.echo("revoked")


def _welcome(gateway: Gateway, port: int, first_key: FirstKey | None) -> str:
    """What a person needs to send a first request, ready to paste."""
    settings = gateway.settings
    base_url = f"http://{settings.host}:{port}/v1"
    card = gateway.roster.workers[0].card
    assert card is not None, "announced only when the worker is ready"
    key = first_key.text if first_key is not None else "YOUR_KEY"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": card.model, "messages": question, "max_tokens": 64, "temperature": 0})
    lines = (
        "",
        f"Headstart is ready. It serves {card.model} on {card.device}. Ctrl-C stops it.",
        _about_first_key(first_key, settings),
        "",
        f"export OPENAI_BASE_URL={base_url}",
        f"export OPENAI_API_KEY={key}",
        f"curl {base_url}/chat/completions -H 'Authorization: Bearer {key}' "
        f"-H 'Content-Type: application/json' -d {shlex.quote(body)}",
        "",
    )
    return "\n".join(lines)


def _about_first_key(first_key: FirstKey | None, settings: Settings) -> str:
    if first_key is None:
        return f"Keys exist; make another with: headstart keys create --tenant {FIRST_TENANT} --label NAME"
    made = "A first key was made" if first_key.is_new else "The first key is still valid"
    where = f"kept, readable by you alone, in {settings.first_key_file}"
    return f"{made} for tenant '{FIRST_TENANT}'; it is {where}"


def _end(message: str, status: int) -> None:
    typer.echo(f"headstart: {message}", err=True)
    raise SystemExit(status)
