"""Search for the hub of a run: for the first one, and for the next one after a hub has ended."""

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
"""Seconds in which a hub has to describe its run, while the deadlines of the run are not known yet."""
RETRY_S = 1.0
"""Seconds between two searches for a hub. A hub that starts on another machine cannot notify this process."""


async def ask(address: HubAddress, request: Request[ReplyT], seconds: float = ASK_S) -> ReplyT:
    """Send one request to a hub as a guest, and return the reply. Raises the errors of `connect` and `Client.call`."""
    try:
        async with connect(address.host, address.port, address.token, f"guest-{os.getpid()}", seconds) as hub:
            return await hub.call(request, seconds)
    except FlashError as error:
        if not error.fatal and not isinstance(error, DeadlineError) and address.host.startswith("127."):
            error.args = (f"{error} (only nodes on its own machine can join, unless it has a cluster.hub_host)",)
        raise


class HubSearch:
    """Search for the hubs of one run, of which there is at most one at a time.

    Args:
        place: place of the hubs.
        token: the value of FLASH_TOKEN; None if it is not set.
        tells: True to print a line when the search has to wait.
        silence_s: seconds after which a hub that does not answer ends the search with an error. None: the search tries
            again until its own time is over.
    """

    def __init__(
        self, place: HubPlace, token: str | None, *, tells: bool = True, silence_s: float | None = None
    ) -> None:
        self._tells = tells
        self._silence_s = silence_s
        self._place = place
        self._token = token
        self._summary = 0
        """Time of the last change of the run's summary when a hub last answered, as `_written` returns it."""

    async def find(self, wait_s: float, before: p.RunReply | None = None) -> tuple[HubAddress, p.RunReply] | None:
        """Wait for the hub. Returns its address and its description of the run.

        Args:
            wait_s: seconds to wait for a hub; 0: ask once, without a retry.
            before: the run, if its hub was found before. Then None is returned if the run has ended since.

        Raises:
            DeadlineError: no hub was found in time, or the hub did not answer.
            FlashError: this process cannot join the hub; or the run has failed; or, if `wait_s` is 0, there is no hub.
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
                    # Without an address the search goes on: there is no hub, or it has just ended, and the next one may
                    # be about to start. It also goes on after a TransportError, because any process may answer at an
                    # old address. Other errors are the hub's own answer, which would not change.
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
        """Return True if the run directory shows that the run has ended. Raises FlashError if the run has failed."""
        if not self._place.run_dir:
            return False
        error = ErrorMarker(Path(self._place.run_dir), run.launch).message()
        if error is not None:
            raise FlashError(f"the run of {self._place} has failed: {error}")
        return _written(self._place) != self._summary


def _written(place: HubPlace) -> int:
    """Return the time at which the summary of a run was last written, in nanoseconds; 0 if there is none."""
    with suppress(OSError):
        if place.run_dir:
            return RunDirectory(Path(place.run_dir)).summary.stat().st_mtime_ns
    return 0
