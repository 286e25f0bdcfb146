"""Node loop of a node that has joined: it outlives hubs with its engines, and leaves in order after a signal."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import msgspec
import pytest

from flash.config.load import dump
from flash.config.tree import Config
from flash.environment.shared import sharing
from flash.environment.threaded import wrap
from flash.hub import protocol as p
from flash.hub.fleet import config_digest
from flash.hub.hub import Hub as RealHub
from flash.hub.recovery import HubState, Persistence, RecoveredState
from flash.rollout.fake_engine import FakeEngine, FakeLine
from flash.rollout.node import NodeEnvironment, RolloutNode
from flash.rollout.scheduler import HubLink
from flash.run.joined import JoinedNode
from flash.run.processes.forked import ProcessOrder
from flash.run.processes.supervisor import End
from flash.samples.journal import MemoryJournal, Replay
from flash.types import Canary, Published
from tests.rollout.test_node import CharTokenizer, Echo
from tests.run.test_join import Job

pytestmark = pytest.mark.anyio


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return a run directory without a hub."""
    monkeypatch.delenv("FLASH_TOKEN", raising=False)
    return Job(tmp_path)


class Fakes(JoinedNode):
    """Joined node with one fake engine. `step_s`: seconds of a step of its environment."""

    def __init__(self, config: Config, order: ProcessOrder, step_s: float) -> None:
        super().__init__(config, order, None)
        self._step_s = step_s
        self.line = FakeLine(lambda: FakeEngine(lambda prompt: [ord(c) for c in "yes"], 0.01))

    async def make_node(self, link: HubLink) -> RolloutNode:
        return RolloutNode(
            self._config,
            link,
            [self.line],
            CharTokenizer(),
            NodeEnvironment(lambda kind: wrap(Echo(lambda seed: self._step_s))),
            now=anyio.current_time,
            on_loss=self.lose_hub,
        )


def node_of(job: Job, step_s: float = 0.0) -> Fakes:
    """Return a node that joins the run of `job` as node 1. `step_s`: seconds of a step of its environment."""
    real = msgspec.structs.replace(job.config.env, path="envs.arithmetic:Arithmetic")
    config = msgspec.structs.replace(job.config, env=real)
    return Fakes(config, ProcessOrder(1, place=job.place, digest=config_digest(dump(job.config))), step_s)


async def joined(hub: RealHub) -> None:
    """Wait until a node has joined this hub."""
    while True:
        await anyio.sleep(0.01)
        if hub.registry.joined:
            return


async def serves(one: Fakes, hub: RealHub, version: int = 0) -> None:
    """Wait until the node's engine has this hub's version."""
    await hub.handle(p.PublishRequest(Published(version, "tcp", b"", Canary([1, 2], [-1.0]))))
    while True:
        await anyio.sleep(0.01)
        if hub.registry.joined and one.line.made and one.line.newest.version == version:
            return


async def test_the_engines_of_a_node_outlive_the_hub(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    one = node_of(job)

    async def run(all_of_it: anyio.CancelScope) -> None:
        """Run the node, and cancel everything at its end."""
        await one.run()
        all_of_it.cancel()

    with anyio.fail_after(60):
        async with sharing("test"), anyio.create_task_group() as tasks:
            tasks.start_soon(one.handle_signals, tasks.cancel_scope)
            async with job.hub() as hub:
                tasks.start_soon(run, tasks.cancel_scope)
                await serves(one, hub)
            async with job.hub() as hub:
                await serves(one, hub)
                assert hub.registry.joined == [1]
                out = await said(capfd, "node 1 of run: goes on with 1 engine, and 0 of the ")
            os.kill(os.getpid(), signal.SIGTERM)  # while it has no hub
    assert len(one.line.made) == 1
    assert one.line.newest.closed
    assert "node 1 of run: starting 1 engine" in out
    assert "starting engines" not in out, "the first line about its seconds comes after some of them"


async def test_a_node_whose_hub_ends_while_the_engines_start_says_when_it_makes_samples(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    one, begun, loaded = node_of(job), anyio.Event(), anyio.Event()

    class Loading(FakeEngine):
        """Engine whose start lasts until `loaded` is set."""

        async def start(self) -> None:
            begun.set()
            await loaded.wait()

    one.line = FakeLine(lambda: Loading(lambda prompt: [ord(c) for c in "yes"], 0.01))
    with anyio.fail_after(60):
        async with sharing("test"), anyio.create_task_group() as tasks:
            async with job.hub():
                tasks.start_soon(one.run)
                await begun.wait()
            async with job.hub() as hub:
                await joined(hub)
                loaded.set()
                await serves(one, hub)
                out = await said(capfd, "node 1 makes samples after ")
            tasks.cancel_scope.cancel()
    assert out.count("node 1 of run: starting 1 engine") == 2
    assert "goes on" not in out


@pytest.mark.slow
async def test_a_node_delivers_the_samples_of_one_hub_to_the_next_hub(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    one, journal = node_of(job, step_s=2.0), MemoryJournal()

    async def run(all_of_it: anyio.CancelScope) -> None:
        """Run the node, and cancel everything at its end."""
        await one.run()
        all_of_it.cancel()

    with anyio.fail_after(60):
        async with sharing("test"), anyio.create_task_group() as tasks:
            tasks.start_soon(one.handle_signals, tasks.cancel_scope)
            async with job.hub(
                persistence=Persistence(journal=journal), recovered=RecoveredState(None, {0}, hub_number=1)
            ) as hub:
                tasks.start_soon(run, tasks.cancel_scope)
                await serves(one, hub)
                out = await lent(hub)
                events = list(journal.events)  # a hub that is killed notices no end of a connection
            replay = Replay(None, 0)
            for event in events:
                replay.apply(event)
            buffer = replay.state(0)
            assert buffer is not None
            state = HubState(0, buffer, journal=0)
            async with job.hub(
                recovered=RecoveredState(state, {0}, hub_number=2), persistence=Persistence(journal=journal)
            ) as hub:
                await serves(one, hub)
                await said(capfd, f"1 engine, and {len(out)} of the {len(out)} samples that it had in hand")
                await all_home(hub, out)
                assert hub.samples.ledger.retried == {}, "something was given out again"
                hub.samples.check()
            os.kill(os.getpid(), signal.SIGTERM)  # while it has no hub


@pytest.mark.slow
async def test_a_node_that_leaves_is_not_started_again_if_its_hub_is_lost_meanwhile(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    one, ends, ended = node_of(job, step_s=30.0), list[End](), anyio.Event()

    async def run() -> None:
        """Run the node, and keep its end."""
        ends.append(await one.run())
        ended.set()

    with anyio.fail_after(60):
        async with sharing("test"), anyio.create_task_group() as tasks:
            tasks.start_soon(one.handle_signals, tasks.cancel_scope)
            async with job.hub() as hub:
                tasks.start_soon(run)
                await serves(one, hub)
                await lent(hub)
                os.kill(os.getpid(), signal.SIGTERM)
                await said(capfd, "this node takes no more work")
            await ended.wait()
            tasks.cancel_scope.cancel()
    assert ends == [End.OVER]


async def lent(hub: RealHub) -> list[int]:
    """Wait until a node has leases, and return their numbers."""
    while True:
        await anyio.sleep(0.5)
        if hub.samples.leases.out:
            return [member.lease_id for member in hub.samples.leases.out.values()]


async def all_home(hub: RealHub, leases: list[int]) -> None:
    """Wait until each of these leases has been answered with a result."""
    while True:
        await anyio.sleep(0.01)
        if not any(map(hub.samples.leases.out.__contains__, leases)):
            return


async def said(capfd: pytest.CaptureFixture[str], words: str) -> str:
    """Wait until the node prints `words` to standard output or error. Returns all that was printed until then."""
    text = ""
    while True:
        await anyio.sleep(0.01)
        text += "".join(capfd.readouterr())
        if words in text:
            return text


async def test_a_node_whose_engines_are_newer_than_the_next_hub_starts_again(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    one, ends, ended = node_of(job), list[End](), anyio.Event()

    async def run() -> None:
        """Run the node, and keep its end."""
        ends.append(await one.run())
        ended.set()

    with anyio.fail_after(60):
        async with sharing("test"), anyio.create_task_group() as tasks:
            async with job.hub() as hub:
                tasks.start_soon(run)
                await serves(one, hub, version=1)
            async with job.hub():
                await ended.wait()
    assert ends == [End.WITH_PEER]
    assert one.line.newest.closed
    assert "the run has gone back to version 0: this node starts again" in capfd.readouterr().out
