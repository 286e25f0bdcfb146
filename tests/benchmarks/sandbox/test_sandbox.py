from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import aiodocker
import anyio
import pytest

from benchmarks.form import Row
from benchmarks.sandbox import engine as sandbox_engine
from benchmarks.sandbox import ours as sandbox_ours
from benchmarks.sandbox import plot as sandbox_plot
from benchmarks.sandbox import run as bench_run
from benchmarks.sandbox import swerex as sandbox_swerex
from envs.sandbox.engines.fake import FakeBackend
from envs.sandbox.local.sandbox import LocalSandbox
from flash.errors import ConfigError

LABELS = {"flash.test": "benchmark"}


def found(rows: list[Row]) -> dict[str, Row]:
    return {row.metric: row for row in rows}


# -- rows ------------------------------------------------------------------------------------------------------------


def test_latencies_are_in_milliseconds_and_the_goal_is_the_medians() -> None:
    rows = found(bench_run.latencies("a", "round_trip", [0.001, 0.002, 0.009], [0.1], goal_ms=1.0, bound=0.5))
    median, high = rows["round_trip_ms_median"], rows["round_trip_ms_p99"]
    assert (median.ours, median.reference, median.at_most, median.bound) == (2.0, 100.0, 1.0, 0.5)
    assert median.met is False
    assert high.ours == pytest.approx(8.86)
    assert high.at_most is None


def test_without_the_peer_there_is_nothing_to_compare_with() -> None:
    assert bench_run.speedup("a", [0.001], [], 50.0) == []
    assert bench_run.latencies("a", "start", [0.001], [])[0].reference is None
    [row] = bench_run.speedup("a", [0.001, 0.002, 0.009], [0.1], 50.0)
    assert (row.ours, row.met) == (50.0, True)


def test_the_command_line_leaves_the_rest_to_the_form() -> None:
    assert bench_run.arguments([]) == (True, [])
    given = ["--quick", "--without-swerex", "--json", "rows.json"]
    assert bench_run.arguments(given) == (False, ["--quick", "--json", "rows.json"])


# -- our half, on agents without containers --------------------------------------------------------------------------


@pytest.mark.anyio
async def test_sandboxes_are_timed_from_nothing_and_from_the_pool_and_all_are_removed() -> None:
    async with FakeBackend() as backend:
        assert await sandbox_ours.cold_start(backend, LABELS) > 0
        assert await sandbox_ours.engine_start(backend, LABELS) > 0
        assert len(await sandbox_ours.warm_starts(backend, 2)) == 2
        assert backend.containers.kept == {}


@pytest.mark.anyio
async def test_round_trips_are_timed_in_shells_and_by_themselves_here_and_over_http() -> None:
    async with FakeBackend() as backend:
        async with LocalSandbox(backend, sandbox_ours.SPEC, labels=LABELS) as sandbox, sandbox.session() as shell:
            assert len(await sandbox_ours.session(shell, 2)) == 2
            assert len(await sandbox_ours.fresh(sandbox, 2)) == 2
        async with sandbox_ours.over_http(backend) as remote, remote.session() as remote_shell:
            assert len(await sandbox_ours.session(remote_shell, 2)) == 2
        assert backend.containers.kept == {}


@pytest.mark.anyio
async def test_a_command_that_fails_is_no_figure() -> None:
    async with FakeBackend() as backend, LocalSandbox(backend, sandbox_ours.SPEC, labels=LABELS) as sandbox:
        with pytest.raises(RuntimeError, match="a command failed"):
            await sandbox_ours.timed(lambda: sandbox.run("exit 3", timeout=5), 1)


# -- swe-rex ---------------------------------------------------------------------------------------------------------


def test_swe_rex_gets_our_image_and_limits_and_the_hosts_network(tmp_path: Path) -> None:
    made: dict[str, Any] = sandbox_swerex.container(sandbox_ours.SPEC, LABELS, tmp_path, 4711, "secret")
    assert made["Image"] == sandbox_ours.SPEC.image
    assert made["Labels"] == LABELS
    assert made["HostConfig"]["NanoCpus"] == 10**9
    assert made["HostConfig"]["NetworkMode"] == "host"
    assert made["HostConfig"]["Binds"] == [f"{tmp_path}:/swerex:ro"]
    assert made["Cmd"][-4:] == ["--port", "4711", "--auth-token", "secret"]


def test_its_packages_must_be_for_the_images_python() -> None:
    version = "{}.{}".format(*sys.version_info[:2])
    assert sandbox_swerex.packages(f"{version}.99").parts[-2:] == (f"python{version}", "site-packages")
    with pytest.raises(ConfigError, match=r"image's 3\.6; .* `--without-swerex`"):
        sandbox_swerex.packages("3.6.1")


def test_every_package_that_is_installed_for_it_is_pinned() -> None:
    assert all("==" in requirement for requirement in sandbox_swerex.PINNED)
    assert sandbox_swerex.PINNED[0] == "swe-rex==1.4.0"


@pytest.mark.anyio
@pytest.mark.integration
async def test_its_client_is_asked_line_by_line_and_its_end_is_noticed(tmp_path: Path) -> None:
    client = "import sys\nfor line in sys.stdin:\n  if 'execute' in line: break\n  print([0.5, 0.25], flush=True)"
    async with await anyio.open_process([sys.executable, "-c", client], stderr=None) as process:
        docker = aiodocker.Docker(url="http://localhost:1")
        peer = sandbox_swerex.SweRex(docker, process, sandbox_ours.SPEC, LABELS, tmp_path)
        assert await peer.session(2) == [0.5, 0.25]
        with pytest.raises(RuntimeError, match="client ended without an answer"):
            await peer.execute(1)
        await docker.close()


# -- the engine ------------------------------------------------------------------------------------------------------


def test_an_engine_that_is_named_is_used_and_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///somewhere")
    monkeypatch.setenv("PATH", str(tmp_path))  # without Podman, of which it would be told
    with sandbox_engine.engine() as url:
        assert url == "unix:///somewhere"


def test_without_an_engine_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="podman and runc not found: `apt-get install"), sandbox_engine.engine():
        pytest.fail("there is no engine")


SLOW_PODMAN = """#!{python}
import socket, sys, time
if "rm" in sys.argv:
    time.sleep(60)
if "service" in sys.argv:
    server = socket.socket(socket.AF_UNIX)
    server.bind(sys.argv[-1].removeprefix("unix://"))
    server.listen()
    while True:
        connection, _ = server.accept()
        connection.recv(64)
        connection.sendall(b"HTTP/1.0 200 OK")
        connection.close()
"""
"""A `podman` whose service answers, and whose removal of containers takes a minute."""


def test_an_engine_is_cleaned_up_although_its_containers_are_not_removed_in_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    podman = tmp_path / "podman"
    podman.write_text(SLOW_PODMAN.format(python=sys.executable))
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    engine = sandbox_engine.PodmanEngine(command_s=5.0)
    try:
        engine.open()
        assert engine.folder.exists()
    finally:
        engine.close()
    assert not engine.folder.exists()


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("podman") is None or os.geteuid() != 0, reason="needs Podman, and root")
def test_an_own_engine_ends_with_its_block_also_on_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    sockets: list[Path] = []

    def interrupted() -> None:
        with sandbox_engine.engine() as url:
            sockets.append(Path(url.removeprefix("unix://")))
            assert sockets[0].is_socket()
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not sockets[0].parent.exists()


# -- the picture -----------------------------------------------------------------------------------------------------

SESSION = Row("command in a session", "round_trip_ms_median", "ms", 0.4, 120.0, at_most=1.0)
HTTP = Row("command in a session, over HTTP", "round_trip_ms_median", "ms", 2.0, 120.0)
NOTHING = Row("start to first command, from nothing", "start_ms_median", "ms", 250.0, 1500.0, bound=200.0)


def test_each_group_of_bars_has_the_systems_that_were_measured() -> None:
    first, last = sandbox_plot.groups([SESSION, HTTP, NOTHING, Row("crowd", "sandboxes_per_s", "1/s", 4.0)])
    assert list(first.ms.values()) == [0.4, 2.0, 120.0]
    assert first.goal_ms == 1.0
    assert list(last.ms) == ["Flash", "the engine alone", "swe-rex 1.4.0"]


@pytest.mark.parametrize(("ms", "text"), [(0.414, "0.41 ms"), (12.4, "12 ms"), (121.0, "121 ms"), (1534.0, "1.5 s")])
def test_times_are_shown_with_few_digits(ms: float, text: str) -> None:
    assert sandbox_plot.shown(ms) == text


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "sandbox.png"
    sandbox_plot.draw([SESSION, HTTP, NOTHING], file)
    assert file.read_bytes().startswith(b"\x89PNG")
