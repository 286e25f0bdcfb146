"""The container of one sandbox: made or found, looked after, and removed whatever its engine does meanwhile."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import anyio
import anyio.lowlevel

from envs.sandbox.api import Spec
from envs.sandbox.engines.backend import AGENT_SECRET, INSTANCE_LABEL, SNAPSHOT_LABEL, Backend
from envs.sandbox.engines.layers import LayerUse
from flash.errors import SandboxError, SandboxLostError, SandboxRefusedError, SandboxTimeoutError

_log = logging.getLogger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0
"""Seconds between attempts to reach the engine or the agent again."""
LOOK_SHARE = 10
"""Pause between two measurements of a layer, in multiples of the time that the last one took."""
LATE_LOOKS = 6
"""How often a container is removed whose creation was not answered in time: an engine that was stopped and goes on
creates it beside the first removal, or after it."""


class SandboxContainer:
    """See the module.

    Args:
        backend: the engine.
        spec: what is wanted.
        name: a new one by default.
        labels: by which it is found when this process is gone.
        adopt: id of a running container, instead of making one.
    """

    def __init__(
        self, backend: Backend, spec: Spec, name: str | None, labels: Mapping[str, str] | None, adopt: str | None
    ) -> None:
        self._backend = backend
        self._spec = spec
        self._removals = 1
        self.adopted = adopt is not None
        self.id = adopt or ""
        """The engine's; empty before it exists."""
        self.name = name or f"flash-{uuid4().hex[:20]}"
        self.labels = dict(labels or {})
        """As given, or those of the container that was found: what is made of it has to be found like it."""
        self.secret = secrets.token_hex(32)
        """By which its agent knows a host."""

    async def begin(self) -> None:
        """Have it run. Raises SandboxError."""
        await (self._find() if self.adopted else self._make())

    async def _make(self) -> None:
        """Create and start the container. A creation is not cut off: its container could not be found again."""
        runtime = self._spec.runtime
        if runtime is not None and runtime not in (info := await self._backend.info()).runtimes:
            raise SandboxRefusedError(
                f"{info.name} has no runtime {runtime!r}, only {', '.join(info.runtimes) or 'its default'}"
            )
        labels = {**self.labels, AGENT_SECRET: self.secret}
        with anyio.CancelScope(shield=True):
            try:
                self.id = await self._backend.containers.create(self._spec, name=self.name, labels=labels)
            except SandboxTimeoutError:
                self._removals = LATE_LOOKS
                raise
        await anyio.lowlevel.checkpoint()
        await self._backend.containers.start(self.id)
        if runtime is not None:
            found = await self._backend.containers.inspect(self.id, runtime=True)
            if found is None or Path(found.runtime).name != runtime:
                raise SandboxRefusedError(
                    f"the engine runs the sandbox under {found.runtime if found else 'nothing'!r} instead of "
                    f"{runtime!r}; Podman takes its runtime from containers.conf"
                )

    async def _find(self) -> None:
        """The container that is to be taken over."""
        found = await self._backend.containers.inspect(self.id)
        if found is None or not found.running or AGENT_SECRET not in found.labels:
            raise SandboxLostError(f"container {self.id[:20]} does not run, or is no sandbox")
        self.name, self.secret = found.name, found.labels[AGENT_SECRET]
        # The image's labels are among its own.
        own = (AGENT_SECRET, SNAPSHOT_LABEL, INSTANCE_LABEL)
        self.labels = {name: value for name, value in found.labels.items() if name not in own}

    async def why_gone(self) -> str:
        """Return why it does not run; empty while it runs, and while the engine cannot be reached: it may well run."""
        try:
            found = await self._backend.containers.inspect(self.id, surely=True)
        except SandboxError:
            return ""
        if found is None:
            return "its container was removed by somebody else"
        memory = ", for want of memory" if found.oom_killed else ""
        if found.running:
            return ""
        code = "an exit code that nobody recorded" if found.exit_code == -1 else f"exit code {found.exit_code}"
        return f"its container ended with {code}{memory}"

    async def wait_layer_over(self, most: LayerUse, look_s: float) -> LayerUse:
        """Return once its layer has more than `most`: engines can seldom enforce that."""
        while True:
            begun = anyio.current_time()
            # Callers that use the link learn whether the sandbox is gone.
            with suppress(SandboxError):
                use = await self._backend.containers.layer(self.id, most)
                if use.over(most):
                    return use
            # A large layer takes long to measure: it may keep a thread busy for a small share of the time only.
            await anyio.sleep(max(look_s, LOOK_SHARE * (anyio.current_time() - begun)))

    async def remove(self) -> None:
        """Remove it, though the engine may fail meanwhile; by name when its creation was not answered."""
        pause = FIRST_PAUSE
        while True:
            try:
                await self._backend.containers.delete(self.id or self.name)
                self._removals -= 1
                if self._removals <= 0:
                    return
            except SandboxError as error:
                _log.warning("removing container %s: %s", self.name, error)
            await anyio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)
