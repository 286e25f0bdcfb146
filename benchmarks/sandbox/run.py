"""Speed of sandboxes, compared with swe-rex on the same machine, engine and image.

Round trips are the times of the command `true`: in a shell that stays open, as a process of its own, and in a shell
over the HTTP service. Starts are the times from the request for a sandbox to the result of its first command: with a
warm sandbox in the pool, and from nothing. `bound` is the time that the engine alone needs to create and start the same
container.

`reference` is swe-rex 1.4.0. Its server runs in a container of the same image with the same limits, and its client in a
Python environment of its own under build/swerex (`benchmarks.sandbox.swerex`). Measurements of both systems take turns.
While starts with a warm sandbox are timed, the pool makes the next warm sandbox on the same cores.

The engine is the one of DOCKER_HOST, or a Podman service of this benchmark. `--without-swerex` leaves out swe-rex.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

import anyio
import msgspec
import numpy as np

from benchmarks.form import Args, Row
from benchmarks.sandbox import ours
from benchmarks.sandbox.engine import IMAGE, engine, ensure_image
from benchmarks.sandbox.swerex import SWEREX, SweRex, connected
from envs.sandbox.engines.backend import Backend
from envs.sandbox.engines.docker import DockerBackend
from envs.sandbox.local.sandbox import LocalSandbox

ROUND_TRIP_MS = 1.0
"""Goal of the median time of a command in an open shell, in milliseconds."""
SPEEDUP = 50.0
"""Goal of the speed-up over swe-rex for a command in an open shell."""
WARM_MS = 20.0
"""Goal of the median time of a start with a warm sandbox, in milliseconds."""
OVER_ENGINE = 1.3
"""Goal of the time of a start from nothing, as a multiple of the time that the engine alone needs."""
LABEL = "flash.benchmark"
"""Label of the containers that no pool makes."""
WARM_UP = 20
"""Number of commands before the first that is timed."""


class Size(msgspec.Struct, frozen=True):
    """Numbers of measurements. Rounds of ours and of swe-rex take turns."""

    rounds: int
    """Number of rounds."""
    session: int
    """Commands in an open shell, in each round."""
    fresh: int
    """Commands that are a process each, in each round."""
    over_http: int
    """Commands in an open shell over the HTTP service, in each round."""
    swerex_session: int
    """Commands of swe-rex in an open shell, in each round."""
    swerex_execute: int
    """Commands of swe-rex that are a process each, in each round."""
    warm: int
    """Starts with a warm sandbox."""
    cold: int
    """Starts from nothing."""


FULL = Size(5, 1000, 400, 200, 20, 60, 40, 20)
"""Numbers of a full run."""
QUICK = Size(2, 200, 50, 40, 5, 20, 5, 2)
"""Numbers of `--quick`."""


class Bed(msgspec.Struct, frozen=True):
    """Engine, labels, peer and sizes, which all measurements share."""

    backend: Backend
    """Container engine."""
    labels: dict[str, str]
    """Labels of the containers, by which containers that are left behind are found."""
    peer: SweRex | None
    """Client of swe-rex; None if it is left out."""
    size: Size


async def round_trips(bed: Bed) -> list[Row]:
    """Measure commands in running sandboxes, and return the rows."""
    size, peer = bed.size, bed.peer
    # Seconds of each command: in a shell of ours, as a process, in a shell over HTTP; and those of swe-rex.
    session: list[float] = []
    fresh: list[float] = []
    http: list[float] = []
    their_session: list[float] = []
    their_execute: list[float] = []
    async with (
        LocalSandbox(bed.backend, ours.SPEC, labels=bed.labels) as sandbox,
        sandbox.session() as shell,
        ours.over_http(bed.backend) as remote,
        remote.session() as remote_shell,
    ):
        await ours.session(shell, WARM_UP)
        await ours.session(remote_shell, WARM_UP)
        if peer is not None:
            await peer.start()
            await peer.open_session()
            await peer.session(1)
        for _ in range(size.rounds):
            session += await ours.session(shell, size.session)
            fresh += await ours.fresh(sandbox, size.fresh)
            http += await ours.session(remote_shell, size.over_http)
            if peer is not None:
                their_session += await peer.session(size.swerex_session)
                their_execute += await peer.execute(size.swerex_execute)
        if peer is not None:
            await peer.stop()
    return [
        *latencies("command in a session", "round_trip", session, their_session, ROUND_TRIP_MS),
        *speedup("command in a session", session, their_session, SPEEDUP),
        *latencies("fresh command", "round_trip", fresh, their_execute),
        *speedup("fresh command", fresh, their_execute),
        *latencies("command in a session, over HTTP", "round_trip", http, their_session),
    ]


async def starts(bed: Bed) -> list[Row]:
    """Measure how long it takes to get a sandbox, and return the rows."""
    # Seconds of each start from nothing: of ours, of the engine alone, and of swe-rex.
    cold: list[float] = []
    bare: list[float] = []
    theirs: list[float] = []
    # The first of each reads files that the machine has not read yet.
    await ours.cold_start(bed.backend, bed.labels)
    await ours.engine_start(bed.backend, bed.labels)
    if bed.peer is not None:
        await bed.peer.start()
        await bed.peer.stop()
    for _ in range(bed.size.cold):
        cold.append(await ours.cold_start(bed.backend, bed.labels))
        bare.append(await ours.engine_start(bed.backend, bed.labels))
        if bed.peer is not None:
            theirs.append(await bed.peer.start())
            await bed.peer.stop()
    warm = await ours.warm_starts(bed.backend, bed.size.warm)
    engine_ms = statistics.median(bare) * 1e3
    ratio = statistics.median(cold) / statistics.median(bare)
    case = "start to first command"
    return [
        *latencies(f"{case}, one ready", "start", warm, theirs, WARM_MS),
        *speedup(f"{case}, one ready", warm, theirs),
        *latencies(f"{case}, from nothing", "start", cold, theirs, bound=engine_ms),
        Row(f"{case}, from nothing", "start_ratio", "x the engine", ratio, at_most=OVER_ENGINE),
        *speedup(f"{case}, from nothing", cold, theirs),
    ]


def latencies(
    case: str,
    what: str,
    seconds: Sequence[float],
    reference: Sequence[float],
    goal_ms: float | None = None,
    bound: float | None = None,
) -> list[Row]:
    """Return rows with the median and the 99th percentile, in milliseconds.

    Args:
        case: name of the rows.
        what: beginning of the metrics' names: the thing that was timed.
        seconds: times of Flash.
        reference: times of swe-rex; empty if it was not measured.
        goal_ms: goal of the median; None: no goal.
        bound: least possible median, in milliseconds; None if it is not known.
    """
    median, p99 = milliseconds(seconds)
    other_median, other_p99 = milliseconds(reference) if reference else (None, None)
    return [
        Row(case, f"{what}_ms_median", "ms", median, other_median, at_most=goal_ms, bound=bound),
        Row(case, f"{what}_ms_p99", "ms", p99, other_p99),
    ]


def speedup(case: str, seconds: Sequence[float], reference: Sequence[float], goal: float | None = None) -> list[Row]:
    """Return a row with the ratio of the medians, swe-rex's over ours; no row if `reference` is empty."""
    if not reference:
        return []
    return [Row(case, "speedup", "x", statistics.median(reference) / statistics.median(seconds), at_least=goal)]


def milliseconds(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile in milliseconds."""
    return statistics.median(seconds) * 1e3, float(np.percentile(seconds, 99)) * 1e3


async def in_containers(url: str, with_swerex: bool, size: Size) -> list[Row]:
    """Measure on the engine at `url`. Raises RuntimeError if a container is left behind."""
    labels = {LABEL: uuid4().hex}  # a new value, by which the containers of this run are found
    async with DockerBackend(url) as backend:
        await ensure_image(backend.images)
        info = await backend.info()
        print(f"  engine   {info.name}, {info.default_runtime}, {info.cpus} cores; image {IMAGE}")
        async with _peer(backend, url, labels, with_swerex) as peer:
            bed = Bed(backend, labels, peer, size)
            rows = [*await round_trips(bed), *await starts(bed)]
        if left := await backend.containers.list(labels):
            raise RuntimeError(f"{len(left)} containers were left behind: {', '.join(each.name for each in left)}")
    return rows


@asynccontextmanager
async def _peer(backend: Backend, url: str, labels: dict[str, str], wanted: bool) -> AsyncGenerator[SweRex | None]:
    """Provide swe-rex for the time of the block; None if it is not `wanted`."""
    if not wanted:
        print("  peer     left out\n", flush=True)
        yield None
        return
    # The version of Python in the image, with which swe-rex's packages must agree.
    async with LocalSandbox(backend, ours.SPEC, labels=labels) as sandbox:
        command = ["python3", "-c", "import platform; print(platform.python_version())"]
        result = ours.checked(await sandbox.run(command, timeout=ours.COMMAND_S))
    image_python = result.stdout.decode().strip()
    async with connected(url, ours.SPEC, labels, image_python) as peer:
        print(f"  peer     {SWEREX}, its server in a container of the same image over the host's network\n", flush=True)
        yield peer


def measure(with_swerex: bool, args: Args) -> list[Row]:
    """Measure on the engine of DOCKER_HOST, or on one of this benchmark's own. `benchmarks.form.main` calls this."""
    with engine() as url:
        return anyio.run(in_containers, url, with_swerex, QUICK if args.quick else FULL)


def arguments(argv: Sequence[str]) -> tuple[bool, list[str]]:
    """Return True if swe-rex is measured too, and the arguments that `benchmarks.form.main` parses."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--without-swerex", action="store_true")
    own, rest = parser.parse_known_args(argv)
    return not own.without_swerex, rest
