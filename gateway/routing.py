"""Which worker serves a request.

Knows the roster and model names. Does not know tenants, prompts' text or how
a worker is spoken to.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.edge.errors import ModelNotFound, ServiceUnavailable
from gateway.prompt import PromptEncoder
from gateway.roster import Roster, Worker
from model_worker.protocol import WorkerCard


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The worker that was chosen for a model, and what was known of it at that instant.

    The model is the worker's own or one of its adapters.
    """

    model: str
    worker: Worker
    card: WorkerCard
    encoder: PromptEncoder

    @property
    def adapter(self) -> str | None:
        return None if self.model == self.card.model else self.model

    @property
    def fingerprint(self) -> str:
        """Of the exact weights that answer."""
        return self.card.fingerprints[self.model]


class Router:
    """Chooses among the workers that serve the model: the one with the fewest requests in flight."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    async def choose(self, model: str) -> Route:
        """Raises `ModelNotFound`, or `ServiceUnavailable` while no worker is known at all, or each of
        them is draining.
        """
        routes = self._routes()
        if not any(route.model == model for route in routes):
            # A worker that has just come up is not made to wait for the next poll.
            await self._roster.refresh()
            routes = self._routes()
        if not routes:
            raise ServiceUnavailable("No model worker is available.", code="worker_unavailable")
        fitting = [route for route in routes if route.model == model]
        if not fitting:
            raise ModelNotFound(
                f"The model '{model}' does not exist or you do not have access to it.", param="model"
            )
        fitting = [route for route in fitting if not route.worker.is_draining]
        if not fitting:
            raise ServiceUnavailable("Every worker of the model is draining.", code="worker_draining")
        return min(fitting, key=lambda route: (route.worker.away_because is not None, route.worker.in_flight))

    async def models(self) -> list[str]:
        """Names that can be asked for, sorted. Raises `ServiceUnavailable` while no worker is known
        at all.
        """
        if not self._routes():
            await self._roster.refresh()
        names = sorted({route.model for route in self._routes()})
        if not names:
            raise ServiceUnavailable("No model worker is available.", code="worker_unavailable")
        return names

    def _routes(self) -> list[Route]:
        return [
            Route(model=model, worker=worker, card=worker.card, encoder=worker.encoder)
            for worker in self._roster.workers
            if worker.card is not None and worker.encoder is not None
            for model in worker.card.fingerprints
        ]
