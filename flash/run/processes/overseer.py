"""Who oversees the processes of an agent: says which have failed, and which of the trainer ranks hang.

A rank ends by itself when its life is over, also in the middle of a collective; one that is stopped, or stuck where no
thread of it runs, does not, and for torchrun it lives. The hub knows which processes belong to a life that is over, and
says so to each node's agent, whose children they are.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from flash.config.tree import Config
from flash.errors import FlashError
from flash.foreign.torch import LINGER_S, Ended
from flash.hub import protocol as p
from flash.run.processes.rendezvous import RETRY_S, hub_place
from flash.run.processes.token import VARIABLE
from flash.transport.blocking import BlockingClient

Tell = Callable[[Sequence[Ended], int], bool]
"""Is told which processes have failed, and how many restarts are left; whether the next one counts."""


class Overseer:
    """Of a node loop: no process of it counts as hanging."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def hanging(self, processes: Collection[int]) -> Collection[int]:
        """None of these."""
        return ()

    def failed(self, ended: Sequence[Ended], restarts_left: int) -> bool:
        """Say so."""
        return self._tell(ended, restarts_left)


class RanksOverseer(Overseer):
    """Of the trainer ranks of a node: those that are still there a while after their lives hang.

    Threads may share it.

    Args:
        tell: as of `Overseer`.
        now: gives seconds.
    """

    def __init__(self, tell: Tell, now: Callable[[], float]) -> None:
        super().__init__(tell)
        self._now = now
        self._lock = threading.Lock()
        self._over: dict[int, float] = {}
        """When we were told that the life of a process is over."""

    def over(self, processes: Iterable[int]) -> None:
        """The life of these is over."""
        with self._lock:
            for process in processes:
                self._over.setdefault(process, self._now())

    def living(self, processes: Iterable[int]) -> None:
        """These have a hub."""
        with self._lock:
            for process in processes:
                self._over.pop(process, None)

    def hanging(self, processes: Collection[int]) -> Collection[int]:
        """Those that have had the time to end by themselves; each is named once."""
        with self._lock:
            self._over = {process: since for process, since in self._over.items() if process in processes}
            late = [process for process, since in self._over.items() if self._now() - since > LINGER_S]
            for process in late:
                self._over[process] = math.inf
        for process in late:
            sys.stderr.write(f"flash: process {process} of the trainer ranks hangs, and is killed\n")
            sys.stderr.flush()
        return late

    def listen(self, config: Config) -> None:
        """Begin to hear from the hub, in a thread that lasts as long as this process."""
        threading.Thread(target=self._listen, args=(config,), name="flash-ranks", daemon=True).start()

    def _listen(self, config: Config) -> None:
        """Consumes news of the ranks. Waits for the hub, and for the next ones. Produces processes that may hang."""
        known = set[int]()
        token, node = os.environ.get(VARIABLE), int(os.environ["FLASH_NODE_RANK"])
        name = f"messenger-{node}"
        while True:
            try:
                hub = hub_place(config, os.environ).find(token)
                with BlockingClient(hub.host, hub.port, hub.token, name, config.deadlines.connect) as caller:
                    after = -1
                    while True:
                        news = caller.call(p.RanksRequest(node, after), timeout=math.inf)
                        after, known = news.number, set(news.living)
                        # A number may be given again.
                        self.over(set(news.ended) - known)
                        self.living(known)
            except FlashError:
                # No hub, or it has ended, and with it the lives of its ranks.
                self.over(known)
                known = set()
                time.sleep(RETRY_S)
