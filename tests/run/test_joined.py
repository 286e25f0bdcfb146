"""The node loop of a node that has joined: it outlives hubs with its engines, and leaves when it is told to."""

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
from flash.hub.hub import Hub as RealHub
from flash.hub.members import digest
from flash.rollout.fake_engine import FakeEngine, FakeLine
from flash.rollout.node import RolloutNode
from flash.run.join import Order
from flash.run.joined import Hub, Life
from flash.types import Canary, Published
from tests.rollout.test_node import CharTokenizer, Echo
from tests.run.test_join import Job

pytestmark = pytest.mark.anyio


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.delenv("FLASH_TOKEN", raising=False)
    return Job(tmp_path)


class Fakes(Life):
    """A life whose engine is a fake one."""

    def __init__(self, config: Config, order: Order) -> None:
        super().__init__(config, order, None)
        self.line = FakeLine(lambda: FakeEngine(lambda prompt: [ord(c) for c in "yes"], 0.01))

    async def make_node(self, node: int, first_engine: int, hub: Hub) -> RolloutNode:
        return RolloutNode(
            node,
            self._config,
            [self.line],
            first_engine,
            CharTokenizer(),
            lambda kind: wrap(Echo()),
            hub,
            now=anyio.current_time,
        )


def life(job: Job) -> Fakes:
    real = msgspec.structs.replace(job.config.env, path="envs.arithmetic:Arithmetic")
    config = msgspec.structs.replace(job.config, env=real)
    return Fakes(config, Order(job.place, digest(dump(job.config)), begun=0.0))


async def serves(one: Fakes, hub: RealHub) -> None:
    """Wait until the node's engine has this hub's version."""
    await hub.handle(p.PublishRequest(Published(0, "tcp", b"", Canary([1, 2], [-1.0]))))
    while True:
        await anyio.sleep(0.01)
        if hub.joined and one.line.made and one.line.newest.version == 0:
            return


async def test_its_engines_outlive_the_hub(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    one = life(job)

    async def run(all_of_it: anyio.CancelScope) -> None:
        await one.run()
        all_of_it.cancel()

    with anyio.fail_after(60):
        async with sharing("test"), anyio.create_task_group() as tasks:
            tasks.start_soon(one.heed_signals, tasks.cancel_scope)
            async with job.hub() as hub:
                tasks.start_soon(run, tasks.cancel_scope)
                await serves(one, hub)
            async with job.hub() as hub:
                await serves(one, hub)
                assert hub.joined == [1]
            os.kill(os.getpid(), signal.SIGTERM)  # while it has no hub
    assert len(one.line.made) == 1
    assert one.line.newest.closed
    out, err = capfd.readouterr()
    assert "node 1 of run: starting 1 engine" in out
    assert "node 1 of run: goes on with 1 engine" in out
    assert "is gone" in err
