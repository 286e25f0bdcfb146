"""SandboxContainer: the container of one sandbox.

It is created or found, watched, and removed even if its engine fails meanwhile.
"""

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
"""Seconds between attempts to reach the engine or the agent again: the first pause, and the longest one."""
LOOK_SHARE = 10
"""Pause between two measurements of a layer, in multiples of the time that the last one took."""
LATE_LOOKS = 6
"""Number of removals of a container whose creation was not answered in time. An engine that was suspended and continues
may create the container during the first removal, or after it."""


class SandboxContainer:
    """The container of one sandbox.

    Args:
        backend: the engine.
        spec: the kind of sandbox.
        name: name of the container; None: a new name.
        labels: labels by which the container is found when this process is gone.
        adopt: id of a running container to take over; None: create one.
    """

    def __init__(
        self, backend: Backend, spec: Spec, name: str | None, labels: Mapping[str, str] | None, adopt: str | None
    ) -> None:
        self._backend = backend
        self._spec = spec
        self._removals = 1
        self.adopted = adopt is not None
        self.id = adopt or ""
        """Id that the engine gave the container; empty before it exists."""
        self.name = name or f"flash-{uuid4().hex[:20]}"
        self.labels = dict(labels or {})
        """Labels as given, or those of the container that was taken over. Snapshots get them too, so that they are
        found in the same way."""
        self.secret = secrets.token_hex(32)
        """Secret with which a host proves to the agent that it may take over."""

    async def begin(self) -> None:
        """Create and start the container, or find the one to take over. Raises SandboxError."""
        await (self._find() if self.adopted else self._make())

    async def _make(self) -> None:
        """Create and start the container.

        The creation is shielded from cancellation. Otherwise its container could not be found again.
        """
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
        """Read the state of the container to take over."""
        found = await self._backend.containers.inspect(self.id)
        if found is None or not found.running or AGENT_SECRET not in found.labels:
            raise SandboxLostError(f"container {self.id[:20]} does not run, or is no sandbox")
        self.name, self.secret = found.name, found.labels[AGENT_SECRET]
        # The engine lists the labels of the image among those of the container.
        own = (AGENT_SECRET, SNAPSHOT_LABEL, INSTANCE_LABEL)
        self.labels = {name: value for name, value in found.labels.items() if name not in own}

    async def why_gone(self) -> str:
        """Return why the container does not run. The text is empty while it runs.

        It is also empty while the engine cannot be reached, because the container may still run.
        """
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
        """Wait until the container's layer exceeds `most`, and return its use. Few engines can enforce such a limit."""
        while True:
            begun = anyio.current_time()
            # An engine that cannot be reached is ignored: the calls over the link notice when the sandbox is gone.
            with suppress(SandboxError):
                use = await self._backend.containers.layer(self.id, most)
                if use.over(most):
                    return use
            # Measuring a large layer takes long. The pause keeps the share of the time in which it occupies a thread
            # small.
            await anyio.sleep(max(look_s, LOOK_SHARE * (anyio.current_time() - begun)))

    async def remove(self) -> None:
        """Remove the container, with retries while the engine fails. Uses the name if the creation was not answered."""
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
