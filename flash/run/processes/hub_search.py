"""Finding the hub of a run: the first one, and the next one when it is gone."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import anyio

from flash.errors import DeadlineError, FlashError, TransportError
from flash.hub import protocol as p
from flash.observe.rundir.rundir import RunDirectory
from flash.run.processes.error_marker import ErrorMarker
from flash.run.processes.hub_place import HubAddress, HubPlace
from flash.run.processes.supervisor import say
from flash.transport.client import connect
from flash.transport.frames import ReplyT, Request
from flash.waiting import deadline

ASK_S = 20.0
"""Seconds for a hub to say what its run is, before we know the run's own deadlines."""
RETRY_S = 1.0
"""Between two looks for a hub: nobody can tell us that one has started on another machine."""


async def ask(address: HubAddress, request: Request[ReplyT], seconds: float = ASK_S) -> ReplyT:
    """A hub's answer to a guest. Errors as of `connect` and `Client.call`."""
    try:
        async with connect(address.host, address.port, address.token, f"guest-{os.getpid()}", seconds) as hub:
            return await hub.call(request, seconds)
    except FlashError as error:
        if not error.fatal and not isinstance(error, DeadlineError) and address.host.startswith("127."):
            error.args = (f"{error} (only nodes on its own machine can join, unless it has a cluster.hub_host)",)
        raise


class HubSearch:
    """Looks for the hubs of one run, which come one after the other.

    Args:
        place: where they are.
        token: the value of FLASH_TOKEN.
        tells: whether people are told that one is waited for.
        silence_s: how long one that is there may be silent; None: it is asked again, as long as one is waited for.
    """

    def __init__(
        self, place: HubPlace, token: str | None, *, tells: bool = True, silence_s: float | None = None
    ) -> None:
        self._tells = tells
        self._silence_s = silence_s
        self._place = place
        self._token = token
        self._summary = 0
        """When the run's summary was written last, as of the last answer of a hub."""

    async def find(self, wait_s: float, before: p.RunReply | None = None) -> tuple[HubAddress, p.RunReply] | None:
        """The hub, and what its run is.

        Args:
            wait_s: how long one is waited for; 0 asks the one that is there.
            before: the run, if a hub of it was found earlier; then None is returned where the run has ended since.

        Raises:
            DeadlineError: no hub came, or one was silent.
            FlashError: it cannot be joined; without a time to wait also that there is none; the run has failed.
        """
        problem = told = ""
        with deadline(
            wait_s or 2 * ASK_S, f"the hub of {self._place}", lambda: f"the output of the first node ({problem})"
        ):
            while True:
                address = None
                try:
                    address = self._place.find(self._token)
                    run = await ask(address, p.RunRequest(p.dialect()), self._silence_s or ASK_S)
                    self._summary = _written(self._place)
                    return address, run
                except FlashError as error:
                    # No hub, or one that has just ended: the next one may be on its way.
                    # What answers at an old address may be anybody; what a hub says of us will not change.
                    silent = self._silence_s is not None and isinstance(error, DeadlineError)
                    if wait_s == 0 or silent or (address is not None and not isinstance(error, TransportError)):
                        raise
                    problem = str(error)
                    why = f": {problem}" if self._place.announced else ", which the first node starts"
                    if self._tells and why != told:
                        told = why
                        say(f"waiting up to {wait_s:g} s for the hub of {self._place}{why}")
                if before is not None and self._has_ended(before):
                    return None
                await anyio.sleep(RETRY_S)

    def _has_ended(self, run: p.RunReply) -> bool:
        """Whether the run directory says so. Raises FlashError: with an error."""
        if not self._place.run_dir:
            return False
        error = ErrorMarker(Path(self._place.run_dir), run.launch).message()
        if error is not None:
            raise FlashError(f"the run of {self._place} has failed: {error}")
        return _written(self._place) != self._summary


def _written(place: HubPlace) -> int:
    """When the summary of a run was written last; 0 for never."""
    with suppress(OSError):
        if place.run_dir:
            return RunDirectory(Path(place.run_dir)).summary.stat().st_mtime_ns
    return 0
