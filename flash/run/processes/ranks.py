"""Trainer ranks of a machine, and how their launcher starts and ends them.

Each trainer rank is a process that trains a part of every batch. All trainer ranks between two restarts are an
*incarnation*. Rank 0 opens a store in which all ranks meet, and the hub gives the store's address to the other ranks.

When a rank of any machine dies or hangs, the incarnation of all ranks is over, and the hub reports that to the
launchers. A rank may then be blocked in a collective (an operation of all ranks), or hang itself, so its launcher kills
it. All ranks restart, each on its own machine, and report to the hub as the next incarnation.
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
from flash.run.processes.hub_place import TOKEN_VARIABLE, HubPlace
from flash.run.processes.rendezvous import HubSearch
from flash.run.processes.supervisor import End, EndedProcess, SupervisedPart, describe, judge, say
from flash.transport.client import connect

EXIT_S = 2.0
"""Seconds that ranks have to exit by themselves after the hub is gone, or after they caused the end of their
incarnation. Ranks that exit by themselves print an error message that explains more than a kill."""
POLL_S = 0.05
"""Seconds between two checks if these ranks have exited."""
RANKS_FAILED = "the trainer ranks have failed"
"""Reason for the end of the run if neither a process nor the hub has an error message."""
RETRY_S = 1.0
"""Seconds before `Ranks.watch_hub` searches for the hub again after a failed search."""


async def run_ranks(
    part: SupervisedPart, role: Literal["trainer", "sft"], config: Config, node: int, file: Path, restarts: int
) -> list[EndedProcess]:
    """Start the trainer ranks of a node as processes of `part`, and wait until all have ended. Returns their results.

    Args:
        part: the part that supervises the ranks; of a run, or of `flash sft`.
        role: role of the processes: "trainer" in a run, "sft" for `flash sft`.
        config: the run's configuration.
        node: number of the machine in its job.
        file: file from which the ranks read the configuration.
        restarts: number of counted restarts.
    """
    here = range(config.cluster.trainer_ranks_on(node))
    # torchrun sets the same variables, and libraries read them.
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
    """Part with the trainer ranks of one machine. It starts them, and kills ranks of an incarnation that is over.

    Args:
        config: the run's configuration.
        node: number of the machine in its job.
        file: file from which the ranks read the configuration.
        place: place of the hub.
        prints: True to print a line while the hub is searched for. False if a node loop of this machine prints it.
    """

    def __init__(self, config: Config, node: int, file: Path, place: HubPlace, *, prints: bool = False) -> None:
        super().__init__(config, "the trainer ranks start again", failure=RANKS_FAILED)
        self._run_config = config
        """The configuration, which is never None here."""
        self.node = node
        """Number of the machine in its job."""
        self._name = f"messenger-{node}"
        """Name of this launcher as a peer of the hub."""
        self._file = file
        self._place = place
        self._prints = prints
        self.hub_came = anyio.Event()
        """Set when a hub is found. `keep_running` waits for the next hub with a new event."""

    async def keep_running(self, ending: anyio.Event) -> End:
        """Keep the ranks running. Extends `SupervisedPart.keep_running`; `Launch` calls this once.

        Ranks that have ended in order start again if a hub starts after that. Such a hub replaces a hub that was killed
        between the end of its ranks and its own end. The new hub has the last version, but no process holds the weights
        of that version, so it waits for ranks.
        """
        while True:
            end = await super().keep_running(ending)
            # Without a shared run directory, this host cannot learn that the run is over. So ranks on a host other than
            # the hub's do not start again.
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

    async def run_once(self, restarts: int) -> tuple[End, list[str]]:
        """Run all ranks of this machine once. Implements `SupervisedPart.run_once`."""
        ended = await run_ranks(self, "trainer", self._run_config, self.node, self._file, restarts)
        end, silent = await judge(ended, self.processes.killed, self.ending)
        if end == End.FAILED and not silent and not self._place.announced:
            return End.WITH_PEER, []  # the ranks have failed because the hub has ended, which reports its own end
        # `judge` does not count ranks that were killed. But these ranks hung by themselves, so the restart must count.
        if end == End.WITH_PEER and self.hung:
            return End.FAILED, []
        first = self.node * self._run_config.cluster.trainer_ranks
        return end, [describe(f"trainer rank {first + one.local}", one) for one in silent]

    async def watch_hub(self, on_silence: Callable[[str], object]) -> None:
        """Watch the hub, and end processes of an incarnation that is over. Return when the run is over.

        A task of `Launch` beside `keep_running`. The launcher connects to the hub as a *messenger*, a peer that only
        asks for news about ranks. On the hub's own machine, `on_silence` is called with the reason if the hub does not
        answer for deadlines.hub, or is not found for deadlines.rendezvous. Only there can the hub be killed.

        Consumes news about the ranks. Waits for the hub, and then for the next hubs. Ends processes.

        Raises:
            FlashError: on a machine other than the hub's: there is no hub, or the run has failed.
        """
        first, deadlines = self.node == 0, self._run_config.deadlines
        silence_s = deadlines.hub if first else None
        search = HubSearch(self._place, os.environ.get(TOKEN_VARIABLE), prints=self._prints, silence_s=silence_s)
        run: p.RunReply | None = None
        while True:
            try:
                found = await search.find(deadlines.rendezvous, run)
            except FlashError as error:
                if not first:
                    raise
                if isinstance(error, DeadlineError):
                    on_silence(str(error))
                await anyio.sleep(RETRY_S)  # without a message, because the node loop reports the reason
                continue
            if found is None:
                return
            hub, run = found
            self.hub_came.set()
            living: list[int] = []  # process ids of this machine's ranks in the present incarnation
            try:
                async with connect(hub.host, hub.port, hub.token, self._name, deadlines.hub) as caller:
                    after = -1  # number of the last news; −1: none yet, so the hub replies at once
                    while True:
                        news = await caller.call(p.RanksRequest(self.node, after), deadlines.hub)
                        if news.number != after:
                            after, living = news.number, news.living
                            await self.end_incarnation(news)
            except FlashError as error:  # the hub has ended, and with it the incarnations of its ranks; or it hangs
                if isinstance(error, DeadlineError):
                    on_silence(str(error))
                await anyio.sleep(EXIT_S)
                self.processes.kill(living)

    async def send_to_hub(self, message: p.Fatal | p.Interrupt) -> bool:
        """Send the hub the error of this machine's ranks, or an interrupt. Both end the run.

        `Launch` calls this when the ranks have failed for good, or after a signal. Returns True if a connection to the
        hub was made. The caller then leaves the end of the run to the hub.
        """
        connected, deadlines = False, self._run_config.deadlines
        with suppress(FlashError):  # the hub may end before it replies
            hub = self._place.find(os.environ.get(TOKEN_VARIABLE))
            async with connect(hub.host, hub.port, hub.token, self._name, deadlines.request) as caller:
                connected = True
                await caller.call(message, deadlines.request)
        return connected

    async def end_incarnation(self, news: p.RanksReply) -> None:
        """End the processes of an incarnation that is over, as `news` from the hub names them.

        `news.ended` are the process ids of the ranks of such an incarnation on this machine. `news.causes` are the ids
        among them that caused its end. Processes that caused the end get EXIT_S seconds to exit by themselves, and are
        then killed as hanging. Their restart counts, because their own failure ended them. All other processes are
        killed at once. `news.missing` is a sentence about ranks that have never connected to the hub; else empty.
        """
        causes = self.processes.pids & set(news.causes)
        self.processes.kill(set(news.ended) - causes)
        with anyio.move_on_after(EXIT_S):
            while causes & self.processes.pids:  # noqa: ASYNC110 - a process cannot notify us of its end
                await anyio.sleep(POLL_S)
        hanging = causes & self.processes.pids
        self._failure = news.missing or RANKS_FAILED
        for pid in sorted(hanging):
            why = f"waited for others, and is killed: {news.missing}" if news.missing else "hangs, and is killed"
            say(f"process {pid} of the trainer ranks {why}")
        self.kill_hanging(hanging)


async def _then_cancel(event: anyio.Event, tasks: TaskGroup) -> None:
    """Cancel the tasks when an event is set."""
    await event.wait()
    tasks.cancel_scope.cancel()
