"""Pools over simulated engines, for tests on the virtual clock."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any

import anyio

from envs.sandbox.api import Spec
from envs.sandbox.pool.admission import Demand
from envs.sandbox.pool.host import HostSettings
from envs.sandbox.pool.journal import Entry, MemoryPoolJournal
from envs.sandbox.pool.local_host import LocalHost
from envs.sandbox.pool.ownership import Identity, OwnerAlive
from envs.sandbox.pool.pool import SandboxPool, open_pool
from envs.sandbox.pool.simulated import SimulatedMaker, SimulatedSandbox
from envs.sandbox.pool.state import PoolSettings

SPEC = Spec(image="img")
FEW_WARM = HostSettings(cpu_factor=1.0, memory_factor=1.0, warm_max=0)
"""No learned warm pool, and what the engine has is what can be promised."""


def wall() -> float:
    return 1e9 + anyio.current_time()


def engine(cpus: int = 4, **options: Any) -> SimulatedMaker:
    return SimulatedMaker(Demand(1000 * cpus, 100_000), **options)


def host(name: str, maker: SimulatedMaker, *, service: str = "svc", **options: Any) -> LocalHost:
    options.setdefault("settings", FEW_WARM)
    options.setdefault("alive", lambda labels, machine: OwnerAlive.UNKNOWN)
    return LocalHost(name, maker, Identity(service, "/nowhere", "machine", "run"), wall=wall, **options)


@asynccontextmanager
async def pool_of(
    *makers: SimulatedMaker, journal: MemoryPoolJournal | None = None, host_options: Any = None, **settings: Any
):
    hosts = [host("abcdef"[number], maker, **(host_options or {})) for number, maker in enumerate(makers)]
    async with open_pool(hosts, settings=PoolSettings(**settings), journal=journal, wall=wall) as pool:
        yield pool


class Crash:
    """`kill -9` of a service: its engine's containers and its journal stay as they are at that moment."""

    def __init__(self, *makers: SimulatedMaker, journal: MemoryPoolJournal) -> None:
        self._makers = makers
        self._journal = journal
        self._entries: dict[str, Entry] = {}

    def now(self) -> None:
        """From here on nothing that the dying process does has an effect."""
        for maker in self._makers:
            maker.frozen = True
        self._entries = dict(self._journal.leases.rows)

    def over(self) -> None:
        """The process is gone."""
        for maker in self._makers:
            maker.frozen = False
        self._journal.leases.rows = dict(self._entries)


def sandbox_of(pool: SandboxPool, id: str) -> SimulatedSandbox:
    """The simulated sandbox behind a lease."""
    lease = pool.state.leases.find(id)
    assert lease is not None
    assert isinstance(lease.sandbox, SimulatedSandbox)
    return lease.sandbox
