"""Versions: which weights engines are to load, and which they have. The hub's side of the nodes' engines.

It owns no task: its methods run in the tasks of the nodes' requests, and of the trainer rank that publishes.
"""

from __future__ import annotations

import anyio

from flash.config import waits
from flash.hub import protocol as p
from flash.hub.nodes.work import Work
from flash.hub.parts import HubPart, Parts


class Versions(HubPart):
    """See the module's docstring. A node that loads is given its share of the `work` later."""

    def __init__(self, parts: Parts, work: Work) -> None:
        super().__init__(parts)
        self._work, self._shares = work, work.shares

    def published(self, version: int) -> None:
        """There is a version for all nodes to load."""
        self._progress.newest = version
        self._shares.loading(self._now())
        self._progress.send("versions")
        self._work.offer()

    async def newer(self, request: p.VersionRequest) -> p.VersionReply:
        """Give an engine the newest version. Waits for one that it does not have, at most one long poll."""
        with anyio.move_on_after(waits.long_poll_s(self._config)):
            await self._progress.until("versions", lambda: self._progress.done or self._has_newer(request))
        if not self._has_newer(request):
            return p.VersionReply(None, done=self._progress.done)
        self._fleet.given(request.node)
        return p.VersionReply(self._progress.published, done=self._progress.done)

    def _has_newer(self, request: p.VersionRequest) -> bool:
        return self._progress.reachable and self._progress.newest > request.after

    async def load_failed(self, request: p.LoadFailed) -> p.LoadFailedReply:
        """Reply whether an engine could not load because its publisher is gone, which it may notice before the hub."""

        def gone() -> bool:
            published = self._progress.published
            return (
                self._progress.done
                or not self._progress.reachable
                or published is None
                or published.incarnation != request.incarnation
            )

        with anyio.move_on_after(waits.echo_s(self._config)):
            await self._progress.until("run", gone)
        return p.LoadFailedReply(gone())

    def engines_changed(self, request: p.EngineReport) -> p.Ack:
        """A node tells of its engines."""
        self._metrics.canaries(request.engines)
        self._metrics.restarted(request.restarts)
        self._metrics.misbehaved(request.blocked_s, request.abandoned)
        self._observer.activities(request.activities)
        if self._progress.stopping != "interrupted":  # its engines may end before their node
            for note in request.notes:
                self._observer.note(note)
        before = self._fleet.versions(request.node)
        if self._fleet.report(request):
            self._progress.send("run", "engines")
            self._loaded(request.node, max(before, default=-1))
        return p.Ack()

    def _loaded(self, node: int, before: int) -> None:
        """A node has told its versions; `before` was the newest of them."""
        newest = max(self._fleet.versions(node), default=-1)
        if newest < 0:
            self._shares.away(node)
        elif newest >= self._progress.newest:
            self._shares.loaded(node)
        if newest != before:
            self._work.offer()
