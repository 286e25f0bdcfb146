"""A run in which containers, the sandbox service and its engine are killed while users work; test_faults.py judges it.

Users in several processes (fault_load.py) hold sandboxes over `SandboxClient`: commands, shells, jobs, files, forks,
with deadlines, and some are cancelled. Meanwhile SIGKILL hits the agent, the `conmon` and the runtime of random
containers, the service (`flash sandbox serve`, started again at once with the same state), and the engine (`podman
system service`, started again on the same storage). Needs root, Debian's `podman` and `runc`, and packages for the
image.

The law: nothing is left, no user gets an answer that is false, and every user is answered in time.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from benchmarks.form import ROOT
from benchmarks.sandbox.run import ensure_image
from envs.sandbox.engines.backend import SNAPSHOT_LABEL
from envs.sandbox.engines.docker import DockerBackend
from envs.sandbox.pool.ownership import PREFIX
from envs.sandbox.remote.client import LEASE_S, SandboxClient, service_token
from flash.errors import SandboxError
from tests.envs.sandbox.fault_tally import Tally
from tests.envs.sandbox.podman import PodmanEngine, Process, send_kill

SERVE_S = 60.0
"""Seconds for the service to say that it listens."""
SETTLE_S = LEASE_S + 60.0
"""Seconds after the load for everything to be gone: a lease that could not be given back runs out first."""
END_S = 60.0
"""Seconds for the service to end when asked to, and for processes of removed containers to go."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Length of a run, and frequency of the kills."""

    seconds: float = 180.0
    seed: int = 0
    processes: int = 2
    users: int = 4
    """In each process."""
    container_every_s: float = 2.0
    """Mean time between two kills of a part of a container."""
    service_every_s: float = 20.0
    engine_every_s: float = 15.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run."""

    tally: Tally
    faults: dict[str, int]
    leaked: list[str]
    """Containers and snapshots that the engine, or only its storage, has in the end."""
    leftovers: list[str]
    """Processes of containers that are gone."""
    settled_s: float
    seconds: float


class Serving:
    """The sandbox service, as a process of its own."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.folder = folder
        self.url = f"unix:{folder / 's'}"
        self.tokens = folder / "tokens"
        self.log = folder / "serve.log"
        self._engine = engine
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it, and wait until it listens."""
        words = ["sandbox", "serve", "--listen", self.url, "--state", str(self.folder), "--engine", self._engine]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220  # starting it does not wait
                [sys.executable, "-m", "flash", *words], stdout=subprocess.PIPE, stderr=log
            )
        assert self._process.stdout is not None
        with anyio.fail_after(SERVE_S):
            line = await anyio.to_thread.run_sync(self._process.stdout.readline, abandon_on_cancel=True)
        if not line.startswith(b"sandboxes at"):
            raise RuntimeError(f"the service did not start; see {self.log}:\n{self.log.read_text()[-2000:]}")

    async def end(self, number: signal.Signals) -> None:
        """End it with SIGKILL at once, or with SIGTERM, after which it closes everything."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.send_signal(number)
        with anyio.CancelScope(shield=True):
            with suppress(subprocess.TimeoutExpired):
                await anyio.to_thread.run_sync(process.wait, END_S)
            if process.poll() is None:
                process.kill()
                await anyio.to_thread.run_sync(process.wait)
                raise RuntimeError(f"the service did not end within {END_S:g} s; see {self.log}")
        assert process.stdout is not None
        process.stdout.close()


class Faults:
    """Kills at random moments. The kinds of kills do not wait for each other."""

    def __init__(self, plan: Plan, engine: PodmanEngine, serving: Serving) -> None:
        self.counts: Counter[str] = Counter()
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._engine = engine
        self._serving = serving

    async def run(self) -> None:
        """Kill until the load is over."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._each, self._plan.container_every_s, self._container)
            tasks.start_soon(self._each, self._plan.service_every_s, self._service)
            tasks.start_soon(self._each, self._plan.engine_every_s, self._podman)
            await anyio.sleep(self._plan.seconds)
            tasks.cancel_scope.cancel()

    async def _each(self, mean_s: float, kill: Callable[[], Awaitable[None]]) -> None:
        while True:
            await anyio.sleep(min(self._rng.expovariate(1 / mean_s), 3 * mean_s))
            # The process that was killed must be there again, also when the load ends now.
            with anyio.CancelScope(shield=True):
                await kill()

    async def _container(self) -> None:
        """Kill the agent or the conmon of a container, or a runtime that is at work."""
        found = await anyio.to_thread.run_sync(self._engine.processes)
        kind = self._rng.choices(["agent", "conmon", "runtime"], [5, 3, 3])[0]
        some = [each for each in found if each.kind == kind and "flash-snapshot" not in each.command]
        if some:
            victim = self._rng.choice(some)
            if send_kill(victim.pid):
                self.counts[f"kills_of_{kind}"] += 1

    async def _service(self) -> None:
        await self._serving.end(signal.SIGKILL)
        self.counts["kills_of_service"] += 1
        await self._serving.start()

    async def _podman(self) -> None:
        await anyio.to_thread.run_sync(self._engine.kill)
        self.counts["kills_of_engine"] += 1
        await anyio.sleep(self._rng.choice([0, 0, 0.5, 3.0]))
        await anyio.to_thread.run_sync(self._engine.start)


async def faults(plan: Plan) -> Outcome:
    """Run the load and the kills once, on an engine of this run's own, and count what is left."""
    # With Podman's default delay, each reconnection would leave a process for 300 s, which looks like a leak.
    engine = PodmanEngine(exec_delay_s=0)
    serving = Serving(engine.folder / "state", engine.url)
    try:
        await anyio.to_thread.run_sync(engine.open)
        async with DockerBackend(engine.url) as backend:
            await ensure_image(backend.images)
        serving.folder.mkdir(mode=0o700)
        await serving.start()
        injected, tally = Faults(plan, engine, serving), Tally()
        begin = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(injected.run)
            for number in range(plan.processes):
                tasks.start_soon(_load, plan, serving, plan.seed * 1000 + number, tally)
        seconds = time.monotonic() - begin
        settled = await _settle(engine, serving)
        await serving.end(signal.SIGTERM)
        leaked, leftovers = await _left(engine)
    finally:
        with anyio.CancelScope(shield=True):
            try:
                await serving.end(signal.SIGTERM)
            finally:
                await anyio.to_thread.run_sync(engine.close)
    return Outcome(
        tally=tally,
        faults=dict(injected.counts),
        leaked=leaked,
        leftovers=leftovers,
        settled_s=settled,
        seconds=seconds,
    )


async def _load(plan: Plan, serving: Serving, seed: int, tally: Tally) -> None:
    words = [serving.url, str(serving.tokens), str(plan.seconds), str(plan.users), str(seed)]
    done = await anyio.run_process(
        [sys.executable, "-m", "tests.envs.sandbox.fault_load", *words], stderr=None, check=False, cwd=ROOT
    )
    if done.returncode != 0:
        tally.untyped.append(f"a client process ended with {done.returncode}")
    else:
        tally.add(msgspec.json.decode(done.stdout, type=Tally))


async def _settle(engine: PodmanEngine, serving: Serving) -> float:
    """Wait until no sandbox is left except those that stand ready; return the seconds."""
    begin = time.monotonic()
    token = service_token(serving.tokens)
    async with DockerBackend(engine.url) as backend, SandboxClient(serving.url, token) as client:
        while time.monotonic() - begin < SETTLE_S:
            with suppress(SandboxError):
                status = await client.status()
                sandboxes = await backend.containers.list({f"{PREFIX}service": ""})
                snapshots = await backend.images.list({SNAPSHOT_LABEL: ""})
                warm = sum(host.warm for host in status.hosts)
                if not status.sandboxes and not snapshots and len(sandboxes) <= warm:
                    break
            await anyio.sleep(0.5)
    return time.monotonic() - begin


async def _left(engine: PodmanEngine) -> tuple[list[str], list[str]]:
    """Return what the engine still has, and the processes that outlived their containers."""
    async with DockerBackend(engine.url) as backend:
        leaked = [f"container {sandbox.name} ({sandbox.labels})" for sandbox in await backend.containers.list({})]
        leaked += [f"snapshot {name}" for name in await backend.images.list({SNAPSHOT_LABEL: ""})]
    leaked += [f"storage of {name}" for name in await anyio.to_thread.run_sync(engine.external)]
    processes: list[Process] = []
    with anyio.move_on_after(END_S):
        # A `conmon` ends a moment after its container.
        while processes := await anyio.to_thread.run_sync(engine.processes):  # noqa: ASYNC110  # nobody tells us
            await anyio.sleep(0.5)
    return leaked, [f"{each.kind} {each.pid}: {each.command}" for each in processes]
