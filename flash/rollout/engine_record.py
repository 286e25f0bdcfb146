"""What the proxy knows of one engine."""

from __future__ import annotations

import anyio

from flash.errors import EngineDeadError
from flash.rollout.concurrency import ConcurrencyLimit
from flash.rollout.engine import Engine
from flash.rollout.routing import EngineView, RoutedRequest
from flash.rollout.usage import EngineUsage


class EngineRecord:
    """One engine: itself, what it runs, and what is known of it.

    `view` is the router's part, a value of its own: the router decides without tasks, clocks and engines, so that it
    must not see the rest.
    """

    def __init__(self, engine: Engine, number: int, view: EngineView) -> None:
        self.number = number
        """Among the engines of the run; `view.index` counts those of this proxy."""
        self.view = view
        self.running: dict[anyio.CancelScope, RoutedRequest] = {}
        """One scope per request, the youngest last: cancelling it makes the request move."""
        self.emptied = anyio.Event()
        self.usage = EngineUsage(f"engine {number}")
        self.tokens = 0
        """That have come from this place."""
        self.begin(engine, view.limit)

    def renumber(self, number: int) -> None:
        """It is this one among the engines of the next hub's run."""
        self.number = number
        self.usage.lane = f"engine {number}"

    def begin(self, engine: Engine, limit: int) -> None:
        """From now on it is this one, of which nothing is known yet."""
        self.engine = engine
        self.limit = ConcurrencyLimit(limit)
        self.canary_error = 0.0
        self.loaded: tuple[float, float] | None = None
        """When it began to load its version, and when it had it."""
        self.failed_in_a_row = 0
        self.death: EngineDeadError | None = None
        self.died = anyio.Event()
