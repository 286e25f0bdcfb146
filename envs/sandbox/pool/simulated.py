"""Simulated engine, for tests: its sandboxes cost only time on the event loop's clock.

`SimulatedMaker` behaves like an engine under a `LocalHost`: it starts sandboxes after a while, lists and removes them,
and fails on request. A `SimulatedSandbox` answers `run` after the seconds that its command names (`sleep 3`), and
supports snapshots; it refuses every other request.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import uuid4

import anyio
import msgspec

from envs.sandbox.api import Command, Result, Snapshot, Spec, State
from envs.sandbox.engines.backend import INSTANCE, INSTANCE_LABEL, SNAPSHOT_LABEL, SNAPSHOT_NAME
from envs.sandbox.engines.machine import MachineLoad
from envs.sandbox.pool.admission import Demand
from envs.sandbox.pool.host import Container
from envs.sandbox.sandbox import Sandbox
from flash.errors import SandboxClosedError, SandboxLostError, SandboxStartError

REMOVE_S = 0.05
"""Seconds in which a container is removed or adopted."""


class SimulatedMaker:
    """A `Maker` whose containers are entries of a dict."""

    def __init__(self, whole: Demand, *, start_s: float = 0.1) -> None:
        """Create an engine of capacity `whole`, on which a sandbox starts in `start_s` seconds."""
        self.sandboxes: dict[str, SimulatedSandbox] = {}
        """Sandboxes by container id."""
        self.snapshots: dict[str, Mapping[str, str]] = {}
        """Labels of the snapshots by name."""
        self.down = False
        """True if the engine does not answer."""
        self.frozen = False
        """True if the process that uses the engine is dead: its later calls have no effect."""
        self.bad_images: set[str] = set()
        """Images whose sandboxes do not start."""
        self.measured: MachineLoad | None = None
        """Load that the machine reports."""
        self.most = 0
        """Highest number of containers that existed at the same time."""
        self.made = 0
        """Number of containers created so far."""
        self._whole = whole
        self._start_s = start_s

    async def capacity(self) -> Demand:
        """Return the resources given at the creation."""
        await self._answer(0.0)
        return self._whole

    def load(self) -> MachineLoad | None:
        """Return the load that a test has set."""
        return self.measured

    async def make(self, spec: Spec, sandbox_id: str, labels: Mapping[str, str]) -> Sandbox:
        """Start a sandbox. Its container exists after the first half of the start time, as with a real engine.

        Raises SandboxStartError for an image in `bad_images`, and if the engine does not answer.
        """
        await self._answer(self._start_s / 2)
        # Real engines also merge the labels of the image into those of the container.
        made = SimulatedSandbox(self, sandbox_id, spec, {**self.snapshots.get(spec.image, {}), **labels})
        self.sandboxes[made.container_id] = made
        self.made += 1
        self.most = max(self.most, len(self.sandboxes))
        await self._answer(self._start_s / 2)
        if spec.image in self.bad_images:
            del self.sandboxes[made.container_id]
            raise SandboxStartError(f"{spec.image} does not start")
        return made

    async def adopt(self, container: Container, spec: Spec) -> Sandbox:
        """Return the sandbox of a container that still exists; its state stays the same.

        Raises SandboxLostError if the container is gone.
        """
        await self._answer(REMOVE_S)
        if container.id not in self.sandboxes:
            raise SandboxLostError(f"container {container.id} is gone")
        return self.sandboxes[container.id]

    async def containers(self) -> list[Container]:
        """Return all containers and snapshots."""
        await self._answer(0.0)
        listed = [Container(id, sandbox.labels, sandbox.running) for id, sandbox in self.sandboxes.items()]
        return listed + [Container(name, labels, running=False, image=True) for name, labels in self.snapshots.items()]

    async def remove(self, id: str, *, image: bool) -> None:
        """Remove a snapshot or a container. A sandbox whose container is removed from outside is lost."""
        await self._answer(REMOVE_S)
        if image:
            self.snapshots.pop(id, None)
        elif (sandbox := self.sandboxes.pop(id, None)) is not None:
            sandbox.end("lost")

    async def _answer(self, seconds: float) -> None:
        """Wait as long as the engine would work (`seconds`), and raise SandboxStartError if it does not answer."""
        await anyio.sleep(seconds)
        if self.down or self.frozen:
            raise SandboxStartError("the engine does not answer")


class SimulatedSandbox(Sandbox):
    """A sandbox in which only time passes."""

    def __init__(self, maker: SimulatedMaker, sandbox_id: str, spec: Spec, labels: Mapping[str, str]) -> None:
        """Create a sandbox that is ready. `labels` are those of its container, which `maker` lists."""
        self.labels = labels
        self.container_id = uuid4().hex
        """Id of the container at the simulated engine."""
        self.running = True
        """True if the container was started."""
        self._maker = maker
        self._id = sandbox_id
        """Id of the sandbox, which is also the name of its container."""
        self._spec = spec
        self._state: State = "ready"
        self._ended = anyio.Event()

    @property
    def sandbox_id(self) -> str:
        return self._id

    @property
    def spec(self) -> Spec:
        return self._spec

    @property
    def state(self) -> State:
        return self._state

    def end(self, state: State) -> None:
        """End the sandbox, in this state unless it has another final state already."""
        if self._state == "ready":
            self._state = state
        self._ended.set()

    def crash(self) -> None:
        """Kill the container."""
        self._maker.sandboxes.pop(self.container_id, None)
        self.end("lost")

    async def run(
        self,
        command: Command,
        *,
        timeout: float,
        patience: float | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Result:
        """Sleep for `sleep SECONDS`; any other command takes no time. It ends at `timeout` as if it were killed.

        Raises SandboxLostError or SandboxClosedError if the sandbox has ended, or ends meanwhile.
        """
        words = command.split() if isinstance(command, str) else list(command)
        seconds = float(words[1]) if words[:1] == ["sleep"] else 0.0
        self._check()
        with anyio.move_on_after(min(seconds, timeout)):
            await self._ended.wait()
        self._check()
        late = seconds > timeout
        return Result(
            exit_code=None if late else 0,
            signal="SIGKILL" if late else None,
            timed_out=late,
            oom_killed=False,
            stdout=b"",
            stderr=b"",
            stdout_truncated=False,
            stderr_truncated=False,
            wall_s=min(seconds, timeout),
            cpu_s=0.0,
            max_rss=0,
        )

    async def wait_ended(self) -> None:
        await self._ended.wait()

    async def snapshot(self) -> Snapshot:
        """Return a new image that starts like the sandbox's own."""
        self._check()
        name = f"{SNAPSHOT_NAME}:{uuid4().hex[:20]}"
        self._maker.snapshots[name] = {**self.labels, SNAPSHOT_LABEL: self.sandbox_id, INSTANCE_LABEL: INSTANCE}
        return Snapshot(name, msgspec.structs.replace(self._spec, image=name), 0)

    async def close(self) -> None:
        """Remove the container, and wait until it is gone. Does nothing if `SimulatedMaker.frozen` is set.

        Raises SandboxStartError if the engine is `down`; the sandbox has ended then, but its container stays.
        """
        if self._maker.frozen:
            return
        if self._state == "ready":
            self._state = "closed"
        try:
            await self._maker.remove(self.container_id, image=False)
        finally:
            self._ended.set()

    def _check(self) -> None:
        """Raise the error of a call to a sandbox that has ended."""
        if self._state == "lost":
            raise SandboxLostError(f"sandbox {self._id} is gone")
        if self._state == "closed":
            raise SandboxClosedError(f"sandbox {self._id} is closed")
