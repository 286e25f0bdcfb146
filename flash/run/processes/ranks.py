"""The trainer ranks of a machine, as their launcher keeps them.

They meet in a store that rank 0 opens, and of which the hub tells the others. The hub also says whose incarnation is
over: since another rank is gone, on whatever machine, or since one hangs. A rank may be held by a collective then, or
hang itself, so that its launcher ends it. All ranks start again, each on its own machine, and come to the hub as the
next incarnation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import anyio
from anyio.abc import TaskGroup

from flash.config.tree import Config
from flash.errors import DeadlineError, FlashError
from flash.hub import protocol as p
from flash.run.processes.forked import PASSIVE, ProcessOrder, ranks_server
from flash.run.processes.hub_place import HubPlace
from flash.run.processes.hub_search import HubSearch
from flash.run.processes.supervisor import End, EndedProcess, SupervisedPart, describe, judge, say
from flash.run.processes.token import VARIABLE
from flash.transport.client import connect

LOST_S = 2.0
"""Seconds in which ranks end by themselves whose hub is gone, or by which their incarnation has ended: they may be
about to, and their own end tells more than ours."""
LOOK_S = 0.05
"""Between two looks whether they have."""
RANKS_FAILED = "the trainer ranks have failed"
"""The reason for the end of a run where no process had an error message."""
RETRY_S = 1.0
"""Before the hub is looked for again."""


async def run_ranks(
    part: SupervisedPart, role: Literal["trainer", "sft"], config: Config, node: int, file: Path, restarts: int
) -> list[EndedProcess]:
    """Start the trainer ranks of a node as processes of this part, and wait until all have ended."""
    here = range(config.cluster.trainer_ranks_on(node))
    # As torchrun names them: libraries look there.
    variables = [
        {
            "RANK": str(node * config.cluster.trainer_ranks + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(config.trainer_world_size),
            "LOCAL_WORLD_SIZE": str(len(here)),
            PASSIVE: os.environ.get(PASSIVE, "passive"),
        }
        for local in here
    ]
    part.processes.fork_from(ranks_server())
    return await part.processes.run(role, file, [ProcessOrder(node, restarts, local) for local in here], variables)


class Ranks(SupervisedPart):
    """See the module's docstring.

    Args:
        config: the run.
        node: the number of the machine in its job.
        file: what they read the configuration from.
        place: where the hub is.
        tells: whether people are told that the hub is waited for; else a node loop does.
    """

    def __init__(self, config: Config, node: int, file: Path, place: HubPlace, *, tells: bool = False) -> None:
        super().__init__(config, "the trainer ranks start again", failed=RANKS_FAILED)
        self._run = config
        self.node = node
        self._name = f"messenger-{node}"
        self._file = file
        self._place = place
        self._tells = tells
        self.hub_came = anyio.Event()
        """Set when a hub is found; `keep` waits for the next one with a new event."""

    async def keep(self, ending: anyio.Event) -> End:
        """As of `SupervisedPart`. Ranks that have left in order start again for a hub that starts after that.

        Such a hub was killed between the goodbye of the ranks and its own end. It has the last version, of which nobody
        holds the weights any more, and would wait for ranks. Where hosts share no run directory nobody can tell that
        the run is over, and ranks of another host than the hub's do not start again.
        """
        while True:
            end = await super().keep(ending)
            if end != End.OVER or ending.is_set() or (self.node > 0 and not self._place.run_dir):
                return end
            self.hub_came = anyio.Event()
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(_then_cancel, ending, waiting)
                await self.hub_came.wait()
                waiting.cancel_scope.cancel()
            if ending.is_set():
                return end
            say("the hub has started again at the end of the run: so do the trainer ranks")

    async def once(self, restarts: int) -> tuple[End, list[str]]:
        """As of `SupervisedPart`."""
        ended = await run_ranks(self, "trainer", self._run, self.node, self._file, restarts)
        end, silent = await judge(ended, self.processes.killed, self.ending)
        if end == End.FAILED and not silent and not self._place.announced:
            return End.WITH_PEER, []  # they have ended with the hub, whose end is told
        if end == End.WITH_PEER and self.hung:
            return End.FAILED, []
        first = self.node * self._run.cluster.trainer_ranks
        return end, [describe(f"trainer rank {first + one.local}", one) for one in silent]

    async def heed_hub(self, on_silence: Callable[[str], object]) -> None:
        """End the processes whose incarnation is over; returns when the run is.

        Of a hub that is silent for deadlines.hub, or does not come for deadlines.rendezvous, its own machine is told,
        and what it was waited for.

        Consumes news of the ranks. Waits for the hub, and for the next ones. Produces ends of processes.

        Raises:
            FlashError: on another machine than the hub's: there is no hub, or the run has failed.
        """
        first, deadlines = self.node == 0, self._run.deadlines
        silence_s = deadlines.hub if first else None
        search = HubSearch(self._place, os.environ.get(VARIABLE), tells=self._tells, silence_s=silence_s)
        run: p.RunReply | None = None
        while True:
            try:
                found = await search.find(deadlines.rendezvous, run)
            except FlashError as error:
                if not first:
                    raise
                if isinstance(error, DeadlineError):
                    on_silence(str(error))
                await anyio.sleep(RETRY_S)  # the node loop says why
                continue
            if found is None:
                return
            hub, run = found
            self.hub_came.set()
            living: list[int] = []
            try:
                async with connect(hub.host, hub.port, hub.token, self._name, deadlines.hub) as caller:
                    after = -1
                    while True:
                        news = await caller.call(p.RanksRequest(self.node, after), deadlines.hub)
                        if news.number != after:
                            after, living = news.number, news.living
                            await self.hear(news)
            except FlashError as error:  # it has ended, and with it the incarnations of its ranks, or it is to end
                if isinstance(error, DeadlineError):
                    on_silence(str(error))
                await anyio.sleep(LOST_S)
                self.processes.kill(living)

    async def tell_hub(self, message: p.Fatal | p.Interrupt) -> bool:
        """Whether there was a hub that heard it."""
        heard, deadlines = False, self._run.deadlines
        with suppress(FlashError):  # the hub's answer may be its end
            hub = self._place.find(os.environ.get(VARIABLE))
            async with connect(hub.host, hub.port, hub.token, self._name, deadlines.connect) as caller:
                heard = True
                await caller.call(message, deadlines.request)
        return heard

    async def hear(self, news: p.RanksReply) -> None:
        """End the processes whose incarnation is over.

        The restart of a process that caused the end counts, since it has not ended with another one.
        """
        causes = self.processes.pids & set(news.causes)
        self.processes.kill(set(news.ended) - causes)
        with anyio.move_on_after(LOST_S):
            while causes & self.processes.pids:  # noqa: ASYNC110 - nobody tells that one has ended
                await anyio.sleep(LOOK_S)
        hanging = causes & self.processes.pids
        self._failed = news.missing or RANKS_FAILED
        for pid in sorted(hanging):
            why = f"waited for others, and is killed: {news.missing}" if news.missing else "hangs, and is killed"
            say(f"process {pid} of the trainer ranks {why}")
        self.kill_hanging(hanging)


async def _then_cancel(event: anyio.Event, tasks: TaskGroup) -> None:
    await event.wait()
    tasks.cancel_scope.cancel()
