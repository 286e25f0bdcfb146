"""Speed of sandboxes, compared with swe-rex on the same machine, engine and image.

Round trips are the times of the command `true`: in a shell that stays open, as a process of its own, and in a shell
over the HTTP service. Starts are the times from the request for a sandbox to the result of its first command: with a
warm sandbox in the pool, and from nothing. `bound` is the time that the engine alone needs to create and start the same
container.

`reference` is swe-rex 1.4.0. Its server runs in a container of the same image with the same limits, and its client in
this process (`benchmarks.sandbox.swerex`). Measurements of both systems take turns. While starts with a warm sandbox
are timed, the pool makes the next warm sandbox on the same cores.

The engine is the one that `flash sandbox` finds: that of DOCKER_HOST, or at a usual socket.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import anyio

from benchmarks.form import Args, Row, main
from benchmarks.plots import bars
from benchmarks.sandbox.swerex import SWEREX, SweRex, connected
from envs.sandbox import images
from envs.sandbox.api import Result, Session, Spec
from envs.sandbox.engines.backend import Backend, Images
from envs.sandbox.engines.docker import DockerBackend, find_engine
from envs.sandbox.local.sandbox import LocalSandbox
from envs.sandbox.pool.host import HostSettings
from envs.sandbox.pool.local_host import LocalHost, open_engine_host
from envs.sandbox.pool.ownership import Identity, OwnerLock
from envs.sandbox.pool.pool import SandboxPool, open_pool
from envs.sandbox.remote.client import SandboxClient
from envs.sandbox.sandbox import Sandbox
from envs.sandbox.service.service import open_service
from envs.sandbox.service.web import make_app
from envs.sandbox.tokens import ADMIN, Token, Tokens
from flash.errors import ConfigError
from flash.http.server import HttpAddress, open_socket, serving

ROUND_TRIP_MS, SPEEDUP = 1.0, 50.0
"""Goals of a command in an open shell: its median time in milliseconds, and its speed-up over swe-rex."""
WARM_MS = 20.0
"""Goal of the median time of a start with a warm sandbox, in milliseconds."""
OVER_ENGINE = 1.3
"""Goal of the time of a start from nothing, as a multiple of the time that the engine alone needs."""
LABEL = "flash.benchmark"
"""Label of the containers that no pool makes."""
WARM_UP = 20
"""Number of commands before the first that is timed."""
NAMES = {"reference": SWEREX, "ours": "Flash", "bound": "the engine alone"}
"""Names of the systems in the legend of the plot, by the field of the row."""
IMAGE = "flash-sandbox-python"
"""Name of the image of all measurements."""
SPEC = Spec(image=IMAGE)
"""Description of the sandboxes."""
COMMAND_S = 60.0
"""Longest wait for a command, in seconds."""
READY_S = 120.0
"""Longest wait for a warm sandbox, in seconds. A sandbox is warm if it has started and nobody uses it yet."""
FIXED_WARM = HostSettings(warm_max=0)
"""Settings of a host that keeps a fixed number of sandboxes warm, and does not adapt it to the load."""
COUNTS = {
    "rounds": (5, 2),
    "session": (1000, 200),
    "fresh": (400, 50),
    "over_http": (200, 40),
    "swerex_session": (20, 5),
    "warm": (40, 5),
    "cold": (20, 2),
}
"""Numbers of measurements, in a full and in a quick run: rounds, in which ours and those of swe-rex take turns;
commands of each kind in each round; starts with a warm sandbox and from nothing."""


async def succeed(running: Awaitable[Result]) -> None:
    """Wait for the result of a command. Raises RuntimeError if it failed, because its time would mean nothing."""
    if not (result := await running).ok:
        raise RuntimeError(f"a command failed: {result}")


async def timed(call: Callable[[], Awaitable[None]], count: int) -> list[float]:
    """Return the seconds of each of `count` calls, one after the other."""
    taken: list[float] = []
    for _ in range(count):
        begin = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - begin)
    return taken


async def session(shell: Session, count: int) -> list[float]:
    """Return the seconds of each of `count` commands in a shell that stays open."""
    return await timed(lambda: succeed(shell.run("true", timeout=COMMAND_S)), count)


async def fresh(sandbox: Sandbox, count: int) -> list[float]:
    """Return the seconds of each of `count` commands, each a process of its own."""
    return await timed(lambda: succeed(sandbox.run(["true"], timeout=COMMAND_S)), count)


async def cold_start(backend: Backend, labels: dict[str, str]) -> float:
    """Return the seconds from nothing to the result of a first command in a new sandbox."""
    begin = time.perf_counter()
    async with LocalSandbox(backend, SPEC, labels=labels) as sandbox:
        await fresh(sandbox, 1)
        return time.perf_counter() - begin


async def engine_start(backend: Backend, labels: dict[str, str]) -> float:
    """Return the seconds of the engine to make and start the same container, without our agent in it."""
    begin = time.perf_counter()
    container_id = await backend.containers.create(SPEC, name=f"bare-{uuid4().hex[:20]}", labels=labels)
    try:
        await backend.containers.start(container_id)
        return time.perf_counter() - begin
    finally:
        with anyio.CancelScope(shield=True):
            await backend.containers.delete(container_id)


@asynccontextmanager
async def open_local_pool(backend: Backend, warm: int) -> AsyncGenerator[tuple[SandboxPool, LocalHost]]:
    """Open a pool like the one of the sandbox service, with this machine as its only host, which keeps `warm` sandboxes
    warm."""
    with tempfile.TemporaryDirectory(prefix="flash-bench-") as folder, OwnerLock(Path(folder) / "lock") as lock:
        identity = Identity.of(f"benchmark-{uuid4().hex[:12]}", lock)
        async with (
            open_engine_host(backend, identity, name="here", settings=FIXED_WARM, warm=[(SPEC, warm)]) as host,
            open_pool([host]) as pool,
        ):
            yield pool, host


@asynccontextmanager
async def over_http(backend: Backend) -> AsyncGenerator[Sandbox]:
    """Provide a sandbox of a service over HTTP at loopback. Service and client are in this process."""
    token, address = uuid4().hex, HttpAddress(port=0)
    async with (
        open_local_pool(backend, 0) as (pool, _),
        open_service(pool, Tokens({ADMIN: Token(token)})) as service,
        serving(make_app(service), open_socket(address), address) as url,
        SandboxClient(url, token) as client,
        client.acquire(SPEC, deadline=READY_S) as sandbox,
    ):
        yield sandbox


async def warm_starts(backend: Backend, count: int) -> list[float]:
    """Return the seconds of `count` starts in a pool that has a warm sandbox.

    The time of a start is from the request of a sandbox to the result of its first command.
    """
    taken: list[float] = []
    async with open_local_pool(backend, 1) as (pool, host):
        for _ in range(count):
            # The request before took the only warm sandbox. The host makes the next one in the background, and
            # `pool.state` gets a new version when that sandbox is warm.
            with anyio.fail_after(READY_S):
                while not sum(host.report().warm.values()):
                    await pool.state.changed_since(pool.state.version)
            begin = time.perf_counter()
            async with pool.acquire(SPEC, deadline=READY_S) as sandbox:
                await fresh(sandbox, 1)
                taken.append(time.perf_counter() - begin)
    return taken


async def round_trips(backend: Backend, labels: dict[str, str], peer: SweRex, counts: Mapping[str, int]) -> list[Row]:
    """Measure commands in running sandboxes, and return the rows.

    `labels` are those of the containers, by which containers that are left behind are found.
    """
    # Seconds of each command: in a shell of ours, as a process, in a shell over HTTP; and in a shell of swe-rex.
    in_shell: list[float] = []
    alone: list[float] = []
    http: list[float] = []
    their_session: list[float] = []
    async with (
        LocalSandbox(backend, SPEC, labels=labels) as sandbox,
        sandbox.session() as shell,
        over_http(backend) as remote,
        remote.session() as remote_shell,
    ):
        await session(shell, WARM_UP)
        await session(remote_shell, WARM_UP)
        await peer.start()
        await peer.open_session()
        await peer.session()
        for _ in range(counts["rounds"]):
            in_shell += await session(shell, counts["session"])
            alone += await fresh(sandbox, counts["fresh"])
            http += await session(remote_shell, counts["over_http"])
            their_session += await timed(peer.session, counts["swerex_session"])
        await peer.stop()
    ratio = statistics.median(their_session) / statistics.median(in_shell)
    return [
        median("command in a session", "round_trip", in_shell, their_session, ROUND_TRIP_MS),
        median("fresh command", "round_trip", alone),
        median("command in a session, over HTTP", "round_trip", http, their_session),
        Row("command in a session", "speedup", "x", ratio, at_least=SPEEDUP),
    ]


async def starts(backend: Backend, labels: dict[str, str], peer: SweRex, counts: Mapping[str, int]) -> list[Row]:
    """Measure how long it takes to get a sandbox, and return the rows. The parameters are those of `round_trips`."""
    # Seconds of each start from nothing: of ours, of the engine alone, and of swe-rex.
    cold: list[float] = []
    bare: list[float] = []
    theirs: list[float] = []
    for number in range(counts["cold"] + 1):
        taken = await cold_start(backend, labels), await engine_start(backend, labels), await peer.start()
        await peer.stop()
        if number > 0:  # the first of each reads files that the machine has not read yet
            for times, seconds in zip((cold, bare, theirs), taken, strict=True):
                times.append(seconds)
    warm = await warm_starts(backend, counts["warm"])
    engine_s, case = statistics.median(bare), "start to first command"
    ratio = statistics.median(cold) / engine_s
    return [
        median(f"{case}, one ready", "start", warm, theirs, WARM_MS),
        median(f"{case}, from nothing", "start", cold, theirs, bound=engine_s * 1e3),
        Row(f"{case}, from nothing", "start_ratio", "x the engine", ratio, at_most=OVER_ENGINE),
    ]


def median(
    case: str,
    what: str,
    seconds: Sequence[float],
    reference: Sequence[float] | None = None,
    goal_ms: float | None = None,
    bound: float | None = None,
) -> Row:
    """Return a row with the medians of `seconds`, which are Flash's, and of `reference`, swe-rex's, in milliseconds.

    `what` is the thing that was timed, with which the name of the metric begins. `goal_ms` and `bound` are the goal and
    the least possible value of Flash's median, in milliseconds; None: there is none.
    """
    ours_ms = statistics.median(seconds) * 1e3
    other_ms = None if reference is None else statistics.median(reference) * 1e3
    return Row(case, f"{what}_ms_median", "ms", ours_ms, other_ms, at_most=goal_ms, bound=bound)


async def ensure_image(stored: Images, name: str = IMAGE) -> None:
    """Make an image, unless the engine has it. `stored` are the engine's images, `name` a key of `images.RECIPES`.

    Raises:
        ConfigError: its packages cannot be had.
    """
    if any(name in names for names in await stored.list({})):
        return
    print(f"making image {name} (once per engine)", flush=True)
    with tempfile.TemporaryDirectory(prefix="flash-image-") as folder:
        archive = Path(folder) / "root.tar"
        await anyio.to_thread.run_sync(images.build, images.RECIPES[name], archive)
        await stored.make(archive, name)


async def in_containers(url: str, counts: Mapping[str, int]) -> list[Row]:
    """Measure on the engine at `url`.

    Raises:
        ConfigError: the packages of the image cannot be had, or are not for the Python of swe-rex's packages.
        RuntimeError: a command has failed, or a container is left behind.
    """
    labels = {LABEL: uuid4().hex}  # a new value, by which the containers of this run that no pool makes are found
    async with DockerBackend(url) as backend:
        await ensure_image(backend.images)
        info = await backend.info()
        # The version of Python in the image, with which swe-rex's packages must agree.
        async with LocalSandbox(backend, SPEC, labels=labels) as sandbox:
            command = ["python3", "-c", "import platform; print(platform.python_version())"]
            image_python = (await sandbox.run(command, timeout=COMMAND_S)).stdout.decode().strip()
        async with connected(url, SPEC, labels, image_python) as peer:
            print(f"  engine   {info.name}, {info.default_runtime}, {info.cpus} cores; image {IMAGE}")
            print(
                f"  peer     {SWEREX}, its server in a container of the same image over the host's network\n",
                flush=True,
            )
            rows = await round_trips(backend, labels, peer, counts)
            rows += await starts(backend, labels, peer, counts)
        if left := await backend.containers.list(labels):
            raise RuntimeError(f"{len(left)} containers were left behind: {', '.join(each.name for each in left)}")
    return rows


def measure(args: Args) -> list[Row]:
    """Measure on the engine of this machine. `benchmarks.form.main` calls this.

    Ends the process with a message if there is no engine, or if packages of the image cannot be had.
    """
    counts = {name: quick if args.quick else full for name, (full, quick) in COUNTS.items()}
    try:
        return anyio.run(in_containers, find_engine(), counts)
    except ConfigError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    plot = bars("Time until the answer, logarithmic", "median, ms", "_ms_median", names=NAMES, log=True)
    main("sandbox", __doc__ or "", measure, plot=plot)
