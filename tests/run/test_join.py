"""Joining of a node: refusals before anything starts, and how its launcher handles ends of its loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from flash.config.load import dump
from flash.config.tree import Config
from flash.errors import ConfigError, DeadlineError, FlashError, TransportError
from flash.hub import protocol as p
from flash.hub.fleet import RunOrigin
from flash.hub.gate import Gate
from flash.hub.hub import Hub
from flash.observe.observer import MemoryObserver
from flash.observe.rundir.rundir import RunDirectory
from flash.run.processes.hub_place import HUB_FILE, HubAddress, HubPlace, hub_token, sign
from flash.run.processes.launch_state import ErrorMarker
from flash.run.processes.launcher import JoinedLoop, refuse_another
from flash.run.processes.supervisor import End, EndedProcess, Processes
from flash.transport.server import Peer, serve
from tests.run.test_launcher import make_config

pytestmark = pytest.mark.anyio

Do = Callable[[], Awaitable[int]]
"""Function that is awaited for the exit code of a node loop."""


class Told(Processes):
    """Processes of a node loop with given exit codes, one after the other. A function is awaited for its code."""

    def __init__(self, ends: Sequence[int | Do]) -> None:
        super().__init__()
        self.ends = list(ends)

    async def run(self, role: str, file: Path, *_: Any) -> list[EndedProcess]:
        """Return the next end. Replaces `Processes.run`."""
        assert await anyio.Path(file).is_file()
        end = self.ends.pop(0)
        return [EndedProcess(0, 7, end if isinstance(end, int) else await end())]


class Loops(JoinedLoop):
    """Loop of a joining node whose processes are a `Told`."""

    def __init__(self, place: HubPlace, own: Config | None, folder: Path, *ends: int | Do) -> None:
        super().__init__(place, folder, own=own)
        self.processes = Told(ends)

    async def run(self) -> End:
        """Keep the loop running to its end."""
        return await self.keep_running(anyio.Event())


class Job:
    """Run directory in which hubs may live one after the other."""

    def __init__(self, folder: Path, **cluster: Any) -> None:
        run = {"name": "run", "output_dir": str(folder)}
        self.config = make_config(run=run, cluster={"gpus_per_node": 0, "max_restarts": 2} | cluster)
        self.place = HubPlace(run_dir=str(folder / "run"))
        RunDirectory.open(self.config.run_dir, dump(self.config))

    @asynccontextmanager
    async def hub(self, given: str | None = None, **more: Any) -> AsyncGenerator[Hub]:
        """Serve a hub while the block runs, announced in the run directory. `given` is the token in hexadecimal, `more`
        are arguments of `Hub`. `at` is then its address."""
        hub = Hub(self.config, MemoryObserver(), now=anyio.current_time, origin=RunOrigin(launch="7.1"), **more)
        gate = Gate(hub, self.config)

        async def handle(peer: Peer, request: Any) -> msgspec.Struct:
            return await gate.handle(peer, request)

        directory = self.config.run_dir
        with hub_token(directory, given) as (token, file):
            async with anyio.create_task_group() as tasks:
                port = await tasks.start(
                    lambda task_status: serve(
                        *("127.0.0.1", 0, token, p.HubRequest, handle),
                        deadline=5,
                        connection_to_replace=gate.connection_to_replace,
                        on_connect=gate.arrived,
                        on_disconnect=gate.left,
                        task_status=task_status,
                    )
                )
                body = msgspec.json.encode(HubAddress("127.0.0.1", port, b""))
                (directory / HUB_FILE).write_bytes(sign(body, token, file))
                self.at = HubPlace(host="127.0.0.1", port=port)
                yield hub
                tasks.cancel_scope.cancel()
        (directory / HUB_FILE).unlink()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return a run directory without a hub, and set the variables that a launcher sets."""
    monkeypatch.delenv("FLASH_TOKEN", raising=False)
    for name in ("FLASH_LAUNCHER", "OMP_NUM_THREADS", "FLASH_IMPORT_PATH"):
        monkeypatch.setenv(name, "1")
    return Job(tmp_path)


async def refusal(launch: Loops) -> str:
    """Return the message of the FlashError with which a loop ends."""
    with pytest.raises(FlashError) as caught:
        await launch.run()
    return str(caught.value)


async def test_a_folder_without_a_hub_is_one_clear_error(job: Job, tmp_path: Path) -> None:
    assert "is no run directory" in await refusal(Loops(HubPlace(run_dir=str(tmp_path / "other")), None, tmp_path))
    assert "the job of the run was stopped, or has only just started" in await refusal(Loops(job.place, None, tmp_path))
    (job.config.run_dir / "summary.json").write_text("{}")
    assert "since the run has ended" in await refusal(Loops(job.place, None, tmp_path))


async def test_the_hub_of_a_killed_job_is_named_by_its_address(job: Job, tmp_path: Path) -> None:
    async with job.hub():
        left = {path.name: path.read_bytes() for path in job.config.run_dir.glob("hub*")}
    for name, content in left.items():
        (job.config.run_dir / name).write_bytes(content)
    words = await refusal(Loops(job.place, None, tmp_path))
    assert f"cannot connect to hub at 127.0.0.1:{job.at.port}: " in words
    assert "only nodes on its own machine can join" in words


async def test_a_wrong_token_or_none_is_one_clear_error(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with job.hub(given="ab" * 32):
        assert "FLASH_TOKEN is not set" in await refusal(Loops(job.at, None, tmp_path))
        monkeypatch.setenv("FLASH_TOKEN", "cd" * 32)
        words = await refusal(Loops(job.at, None, tmp_path))
        assert "does not prove our token; it belongs to another run" in words
        assert "only nodes on its own machine can join" in words, "this may be another machine than that of the hub"
        assert "FLASH_TOKEN differs between the hosts" in await refusal(Loops(job.place, None, tmp_path))


async def test_a_node_with_another_configuration_than_the_hub_is_refused_with_the_key(job: Job, tmp_path: Path) -> None:
    train = msgspec.structs.replace(job.config.train, learning_rate=0.5)
    async with job.hub():
        words = await refusal(Loops(job.place, msgspec.structs.replace(job.config, train=train), tmp_path))
    assert words.startswith("`train.learning_rate` is 0.5 on this node and ")


async def test_a_run_at_its_end_is_not_joined(job: Job, tmp_path: Path) -> None:
    async with job.hub() as hub:
        hub.interrupt()
        assert "is at its end" in await refusal(Loops(job.place, None, tmp_path))
        assert await Loops(job.place, job.config, tmp_path).run() == 0, "a job's own node had nothing to do"


async def test_keys_that_describe_the_machine_may_differ_between_nodes(job: Job) -> None:
    mine, theirs = make_config(), make_config(cluster={"gpus_per_node": 4, "node_cpus": [3]}, run={"name": "test"})
    plain = [msgspec.to_builtins(config) for config in (mine, theirs)]
    refuse_another(*plain)
    with pytest.raises(ConfigError, match=r"`run\.name` is test on this node and other on the hub's"):
        refuse_another(plain[0], plain[1] | {"run": plain[1]["run"] | {"name": "other"}})


async def test_a_node_loop_that_dies_is_started_again_so_often_as_the_run_allows(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with job.hub():
        assert await Loops(job.place, job.config, tmp_path, -9, End.FAILED, End.OVER).run() == 0
        told = capfd.readouterr().err.splitlines()
        assert told[0].startswith("flash: the node loop (process 7) was killed by signal 9 (SIGKILL)")
        assert told[1:] == [
            "flash: the node loop of this node starts again, and the run goes on meanwhile (restart 1 of 2)",
            "flash: the node loop of this node starts again, and the run goes on meanwhile (restart 2 of 2)",
        ]
        assert await Loops(job.place, job.config, tmp_path, -9, -9, -9).run() == End.FAILED
        assert "no restart is left of cluster.max_restarts = 2" in capfd.readouterr().err
        assert await Loops(job.place, job.config, tmp_path, End.FINAL).run() == End.FINAL


async def test_a_node_waits_for_the_first_hub_and_for_the_next_one(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    ended, again = anyio.Event(), anyio.Event()

    async def first() -> int:
        """End with the loss of the hub, once `again` is set."""
        seen.append(1)
        ended.set()
        await again.wait()
        return End.WITH_PEER

    launch = Loops(job.place, job.config, tmp_path, first, End.OVER)
    codes: list[int] = []
    over = anyio.Event()

    async def run() -> None:
        """Run the loop, and keep its end."""
        codes.append(await launch.run())
        over.set()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.sleep(0.1)
            async with job.hub():
                await ended.wait()
            again.set()
            await anyio.sleep(0.1)
            async with job.hub():
                await over.wait()
    assert codes == [0]
    assert isinstance(launch.processes, Told)
    assert launch.processes.ends == []
    waits = [line for line in capfd.readouterr().err.splitlines() if "waiting up to 600 s for the hub of" in line]
    assert len(waits) == 2


async def test_a_hub_that_never_comes_is_named(job: Job, tmp_path: Path) -> None:
    own = msgspec.structs.replace(job.config, deadlines=msgspec.structs.replace(job.config.deadlines, rendezvous=0.1))
    with pytest.raises(DeadlineError) as caught:
        await Loops(job.place, own, tmp_path).run()
    words = str(caught.value)
    assert words.startswith(f"waited 0.1 s for the hub of {job.place}")
    assert "no hub runs for" in words


@pytest.mark.parametrize("how", ["in order", "with an error"])
async def test_a_node_without_its_hub_notices_that_the_run_has_ended(job: Job, tmp_path: Path, how: str) -> None:
    async def lost() -> int:
        """End with the loss of the hub, once it is gone."""
        stop.set()
        await stopped.wait()
        return End.WITH_PEER

    stop, stopped = anyio.Event(), anyio.Event()
    launch = Loops(job.place, job.config, tmp_path, lost)
    codes: list[int | str] = []

    async def run() -> None:
        """Run the loop, and keep its end or its error message."""
        if how == "in order":
            codes.append(await launch.run())
        else:
            codes.append(await refusal(launch))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            async with job.hub():
                tasks.start_soon(run)
                await stop.wait()
            if how == "in order":
                (job.config.run_dir / "summary.json").write_text("{}")
            else:
                ErrorMarker(job.config.run_dir, "7.1").write(TransportError("the end"))
            stopped.set()
    assert codes == ([0] if how == "in order" else [f"the run of {job.place} has failed: the end"])
