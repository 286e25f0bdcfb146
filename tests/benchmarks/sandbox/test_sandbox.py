from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plots import bars
from benchmarks.sandbox import run as bench_run
from benchmarks.sandbox import swerex as sandbox_swerex
from envs.sandbox.engines.fake import FakeBackend
from envs.sandbox.local.sandbox import LocalSandbox
from flash.errors import ConfigError

LABELS = {"flash.test": "benchmark"}


# -- rows ------------------------------------------------------------------------------------------------------------


def test_medians_are_in_milliseconds_and_have_the_goal() -> None:
    row = bench_run.median("a", "round_trip", [0.001, 0.002, 0.009], [0.1], goal_ms=1.0, bound=0.5)
    assert (row.metric, row.ours, row.reference, row.bound) == ("round_trip_ms_median", 2.0, 100.0, 0.5)
    assert row.met is False


# -- our half, on agents without containers --------------------------------------------------------------------------


@pytest.mark.anyio
async def test_sandboxes_are_timed_from_nothing_and_from_the_pool_and_all_are_removed() -> None:
    async with FakeBackend() as backend:
        assert await bench_run.cold_start(backend, LABELS) > 0
        assert await bench_run.engine_start(backend, LABELS) > 0
        assert len(await bench_run.warm_starts(backend, 2)) == 2
        assert backend.containers.kept == {}


@pytest.mark.anyio
async def test_round_trips_are_timed_in_shells_and_by_themselves_here_and_over_http() -> None:
    async with FakeBackend() as backend:
        async with LocalSandbox(backend, bench_run.SPEC, labels=LABELS) as sandbox, sandbox.session() as shell:
            assert len(await bench_run.session(shell, 2)) == 2
            assert len(await bench_run.fresh(sandbox, 2)) == 2
        async with bench_run.over_http(backend) as remote, remote.session() as remote_shell:
            assert len(await bench_run.session(remote_shell, 2)) == 2
        assert backend.containers.kept == {}


@pytest.mark.anyio
async def test_a_command_that_fails_is_no_figure() -> None:
    async with FakeBackend() as backend, LocalSandbox(backend, bench_run.SPEC, labels=LABELS) as sandbox:
        with pytest.raises(RuntimeError, match="a command failed"):
            await bench_run.timed(lambda: bench_run.succeed(sandbox.run("exit 3", timeout=5)), 1)


# -- swe-rex ---------------------------------------------------------------------------------------------------------


def test_swe_rex_gets_our_image_and_limits_and_the_hosts_network(tmp_path: Path) -> None:
    made: dict[str, Any] = sandbox_swerex.container(bench_run.SPEC, LABELS, tmp_path, 4711, "secret")
    assert made["Image"] == bench_run.SPEC.image
    assert made["Labels"] == LABELS
    assert made["HostConfig"]["NanoCpus"] == 10**9
    assert made["HostConfig"]["NetworkMode"] == "host"
    assert made["HostConfig"]["Binds"] == [f"{tmp_path}:/swerex:ro"]
    assert made["Cmd"][-4:] == ["--port", "4711", "--auth-token", "secret"]


def test_its_packages_must_be_for_the_images_python() -> None:
    version = "{}.{}".format(*sys.version_info[:2])
    assert sandbox_swerex.packages(f"{version}.99").parts[-2:] == (f"python{version}", "site-packages")
    with pytest.raises(ConfigError, match=r"image's 3\.6; run this benchmark with Python 3\.6"):
        sandbox_swerex.packages("3.6.1")


def test_every_package_that_is_installed_for_it_is_pinned() -> None:
    assert all("==" in requirement for requirement in sandbox_swerex.PINNED)
    assert sandbox_swerex.PINNED[0] == "swe-rex==1.4.0"


# -- the picture -----------------------------------------------------------------------------------------------------


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    rows = [
        bench_run.median("command in a session", "round_trip", [0.0004], [0.12], 1.0),
        bench_run.median("start to first command, from nothing", "start", [0.25], [1.5], bound=200.0),
    ]
    file = tmp_path / "sandbox.png"
    bars("Time", "ms", "_ms_median", names=bench_run.NAMES, log=True)(rows, file)
    assert file.read_bytes().startswith(b"\x89PNG")
