"""The wiring: every part of a gateway is made here and nowhere else.

Knows the parts, the routes and the order of starting and stopping. Does not
know how any part works.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from billing import instants
from billing.accounts import KeyDigest, Principal, authenticate
from billing.db import Database, open_database
from billing.instants import Clock
from billing.meter import Meter
from billing.sealer import Sealer
from gateway.auth import Authenticator, bearer_key, key_hasher
from gateway.bootstrap import make_home
from gateway.chat import Chat
from gateway.drain import Drain
from gateway.edge import openai
from gateway.edge.errors import (
    ApiError,
    InternalError,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
)
from gateway.loop_lag import watched
from gateway.metric_sources import AboutSource, BillingSource, WorkersSource
from gateway.metrics import CONTENT_TYPE, Metrics
from gateway.receipt_key import load_receipt_key
from gateway.reporting import Reporting
from gateway.request_ids import RequestIds, request_id_of, route_of
from gateway.roster import Roster
from gateway.routing import Router
from gateway.secrets import DeploymentSecret, ledger_url, load_secret
from gateway.settings import Settings
from gateway.tracing import Tracer, tracer_for
from gateway.web.routes import Dashboard
from gateway.workers import PhaseTimeouts

PROMPT_THREADS: Final = 2
DATABASE_THREADS: Final = 4
HEALTH_TIMEOUT_SECONDS: Final = 5.0
log = structlog.get_logger("gateway.app")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Everything that is alive while a gateway serves. Reachable from a request as
    `request.app.state.gateway`.
    """

    settings: Settings
    secret: DeploymentSecret
    database: Database
    meter: Meter
    sealer: Sealer
    authenticator: Authenticator
    roster: Roster
    router: Router
    metrics: Metrics
    tracer: Tracer
    drain: Drain
    prompt_threads: ThreadPoolExecutor
    database_threads: ThreadPoolExecutor
    created: int

    async def authenticate(self, key: str) -> Principal:
        """For pages that get a key in another way than a header. Raises `Unauthenticated`."""
        return await self.authenticator.authenticate(key)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Starts the parts, and stops them in the reverse order: nothing settles after the meter is
        closed.
        """
        await asyncio.to_thread(self.meter.start)
        try:
            self.sealer.start()
            self.roster.start()
            try:
                async with watched(self.metrics.observe_loop_lag):
                    yield
            finally:
                await self.drain.drain(self.settings.drain_seconds)
                await self.roster.close()
        finally:
            await asyncio.to_thread(self.meter.close)
            await asyncio.to_thread(self.sealer.close)
            await asyncio.to_thread(self.tracer.close)
            self.prompt_threads.shutdown(wait=False, cancel_futures=True)
            self.database_threads.shutdown(wait=True, cancel_futures=True)
            self.database.close()


def build_gateway(settings: Settings) -> Gateway:
    """Raises `HomeUnusable`, `SecretUnusable`, `TracingUnavailable`, or billing's `UnsupportedDatabase`.
    Makes the home directory, and connects to nothing yet.
    """
    tracer = tracer_for(settings.otlp_endpoint)
    make_home(settings.home)
    secret = load_secret(settings)
    receipt_key = load_receipt_key(settings)
    database = open_database(ledger_url(settings))
    meter = Meter(database, settings.journal_directory)
    sealer = Sealer(database, receipt_key, num_unposted=lambda: meter.stats().pending)
    metrics = Metrics(max_tenants=settings.metrics_max_tenants)
    prompt_threads = ThreadPoolExecutor(PROMPT_THREADS, thread_name_prefix="prompt")
    database_threads = ThreadPoolExecutor(DATABASE_THREADS, thread_name_prefix="database")

    def look_up(digest: KeyDigest) -> Principal | None:
        return authenticate(database, digest, now=instants.now())

    roster = Roster(
        timeouts=_timeouts(settings), executor=prompt_threads, poll_seconds=settings.card_poll_seconds
    )
    if settings.worker_url is not None:
        roster.point_to(settings.worker_url)
    metrics.watch(AboutSource(version("headstart")))
    metrics.watch(WorkersSource(lambda: roster.workers))
    metrics.watch(BillingSource(meter, sealer))
    return Gateway(
        settings=settings,
        secret=secret,
        database=database,
        meter=meter,
        sealer=sealer,
        authenticator=Authenticator(
            look_up,
            key_hasher(secret),
            database_threads,
            remember_seconds=settings.key_cache_seconds,
            clock=time.monotonic,
        ),
        roster=roster,
        router=Router(roster),
        metrics=metrics,
        tracer=tracer,
        drain=Drain(),
        prompt_threads=prompt_threads,
        database_threads=database_threads,
        created=int(time.time()),
    )


def build_app(
    gateway: Gateway, *, extra_routes: Sequence[BaseRoute] = (), clock: Clock = instants.now
) -> Starlette:
    """The ASGI application, to be served inside `gateway.running()`.

    `clock` tells the dashboard which day it is.
    """
    chat = Chat(
        dialect=openai.ChatCompletions(),
        settings=gateway.settings,
        secret=gateway.secret,
        authenticator=gateway.authenticator,
        router=gateway.router,
        meter=gateway.meter,
        metrics=gateway.metrics,
        tracer=gateway.tracer,
        drain=gateway.drain,
        prompt_threads=gateway.prompt_threads,
    )
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", _list_models, methods=["GET"]),
            Route("/v1/models/{model:path}", _show_model, methods=["GET"]),
            Route("/health/liveness", _liveness, methods=["GET"]),
            Route("/health/readiness", _readiness, methods=["GET"]),
            Route("/metrics", _metrics, methods=["GET"]),
            *_reporting(gateway).routes(),
            *_dashboard(gateway, clock).routes(),
            *extra_routes,
        ],
        middleware=[Middleware(RequestIds)],
        exception_handlers={ApiError: _refuse, HTTPException: _refuse_http, Exception: _refuse_unexpected},
    )
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    return app


def _timeouts(settings: Settings) -> PhaseTimeouts:
    return PhaseTimeouts(
        connect_seconds=settings.connect_timeout_seconds,
        first_event_seconds=settings.first_event_timeout_seconds,
        between_events_seconds=settings.between_events_timeout_seconds,
    )


def _reporting(gateway: Gateway) -> Reporting:
    return Reporting(
        authenticator=gateway.authenticator,
        database=gateway.database,
        meter=gateway.meter,
        sealer=gateway.sealer,
        executor=gateway.database_threads,
        count_credit=gateway.metrics.count_credit,
    )


def _dashboard(gateway: Gateway, clock: Clock) -> Dashboard:
    return Dashboard(
        database=gateway.database,
        secret=gateway.secret,
        hasher=key_hasher(gateway.secret),
        meter=gateway.meter,
        sealer=gateway.sealer,
        roster=gateway.roster,
        executor=gateway.database_threads,
        clock=clock,
        form_timeout_seconds=gateway.settings.body_timeout_seconds,
    )


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def _json(body: bytes) -> Response:
    return Response(body, media_type=openai.JSON_TYPE)


async def _list_models(request: Request) -> Response:
    gateway = _gateway(request)
    await gateway.authenticate(bearer_key(request.headers.get("authorization")))
    return _json(openai.encode_models(await gateway.router.models(), created=gateway.created))


async def _show_model(request: Request) -> Response:
    gateway = _gateway(request)
    await gateway.authenticate(bearer_key(request.headers.get("authorization")))
    name = request.path_params["model"]
    if name not in await gateway.router.models():
        raise ModelNotFound(
            f"The model '{name}' does not exist or you do not have access to it.", param="model"
        )
    return _json(openai.encode_model(name, created=gateway.created))


async def _liveness(_: Request) -> Response:
    return JSONResponse({"status": "alive"})


async def _readiness(request: Request) -> Response:
    """Ready means that a request could be served now: some worker takes work, and what is used can
    be written down.
    """
    gateway = _gateway(request)
    database, *workers = await asyncio.gather(
        _database_is_reachable(gateway), *(worker.client.is_ready() for worker in gateway.roster.workers)
    )
    details = [
        {
            "worker": worker.name,
            "ready": ready and worker.card is not None,
            "model": worker.card.model if worker.card else None,
            "away_because": worker.away_because,
        }
        for worker, ready in zip(gateway.roster.workers, workers, strict=False)
    ]
    ready = database and not gateway.drain.is_draining and any(detail["ready"] for detail in details)
    return JSONResponse(
        {
            "status": "ready" if ready else "not_ready",
            "draining": gateway.drain.is_draining,
            "database": "reachable" if database else "unreachable",
            "workers": details,
        },
        status_code=200 if ready else 503,
    )


async def _database_is_reachable(gateway: Gateway) -> bool:
    asking = asyncio.get_running_loop().run_in_executor(
        gateway.database_threads, gateway.database.is_reachable
    )
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_SECONDS):
            return await asyncio.shield(asking)
    except TimeoutError:
        return False


async def _metrics(request: Request) -> Response:
    """On a thread of its own: those of the database may all be waiting for it."""
    gateway = _gateway(request)
    gateway.metrics.set_database_up(await _database_is_reachable(gateway))
    text = await asyncio.to_thread(gateway.metrics.exposition)
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for ApiError alone"
    return Response(
        openai.encode_error(error),
        status_code=error.status,
        media_type=openai.JSON_TYPE,
        headers=dict(error.headers),
    )


async def _refuse_http(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such path, no such method."""
    assert isinstance(error, HTTPException), "registered for HTTPException alone"
    where = f"{request.method} {request.url.path}"
    known: dict[int, ApiError] = {
        404: NotFound(f"Unknown request URL: {where}.", code="unknown_url"),
        405: MethodNotAllowed(f"Not allowed method: {where}.", headers=error.headers),
    }
    return await _refuse(
        request, known.get(error.status_code, InternalError("The request cannot be served."))
    )


async def _refuse_unexpected(request: Request, error: Exception) -> Response:
    """Our own mistake: logged with its place, and told without it."""
    request_id = str(request_id_of(request.scope))
    log.error("unexpected", exc_info=error, route=route_of(request.scope), request_id=request_id)
    told = InternalError("Something went wrong on our side.", headers={"x-request-id": request_id})
    return await _refuse(request, told)
