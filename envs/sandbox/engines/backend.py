"""What a sandbox needs of a container engine: a `Backend`, which has `Containers`, `Images` and the way to `Agents`.

It is implemented by `envs.sandbox.engines.docker.DockerBackend` over Docker or Podman, and by
`envs.sandbox.engines.fake.FakeBackend`, which runs the same agent as a local process without any isolation, for tests.
Which class an address means is decided in `envs.sandbox.engines.engine`.

Every method answers within the deadline of its implementation, or raises a `SandboxError`; none leaves anything behind
when it fails or is cancelled, except `create`, whose container is found by its labels.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import msgspec

from envs.sandbox.api import Spec
from envs.sandbox.engines.layers import LayerUse

AGENT_SECRET = "flash.agent.secret"
"""Label with what a host must know to take over the sandbox. Labels cannot be read from inside."""
AGENT_ADDRESS = "flash-agent"
"""Abstract socket on which an agent waits for a host that takes over; each container has a namespace for its own."""
SNAPSHOT_NAME = "localhost/flash-snapshot"
"""Name of the images that snapshots are; the tag tells them apart."""
SNAPSHOT_LABEL = "flash.snapshot"
"""On snapshots, with the sandbox that they were made of."""
INSTANCE_LABEL = "flash.snapshot.life"
"""On snapshots, with the process that made them: it alone could tell of them."""
INSTANCE = uuid4().hex
"""This process, as that label says it."""


def from_snapshot(spec: Spec) -> bool:
    """Whether a sandbox of this spec begins with the files of another one."""
    return spec.image.startswith(SNAPSHOT_NAME)


class EngineInfo(msgspec.Struct, frozen=True):
    """What a container engine says of itself and of its machine."""

    name: str
    """For instance `podman 4.3.1`."""
    address: str
    """Where it answers."""
    isolated: bool
    """False: commands run with the rights of this process, as files and network of this machine. For tests only."""
    runtimes: tuple[str, ...]
    """Names of the container runtimes that a spec may ask for."""
    default_runtime: str
    cpus: int
    memory: int
    """Bytes."""
    here: bool
    """Its containers run on this machine."""
    users: tuple[int, int] | None = None
    """First and last user that sandboxes get, one for each; None: the engine's own users are mapped to others."""


class ContainerInfo(msgspec.Struct, frozen=True):
    """How one container stands, as its engine says."""

    container_id: str
    name: str
    running: bool
    labels: Mapping[str, str]
    exit_code: int | None = None
    """Exit code of its first process, once that has ended; -1 if nobody recorded it."""
    oom_killed: bool = False
    """The engine says that it ended for want of memory."""
    runtime: str = ""
    """What it really runs under; empty when not asked for."""


class Surroundings(msgspec.Struct, frozen=True):
    """What an agent, and its host, have to know of where it runs."""

    workdir: str
    cgroup: bool = False
    """/sys/fs/cgroup is about this sandbox alone."""
    address: str = ""
    """Abstract socket on which the agent can wait for a host that takes over."""
    files_apart: bool = False
    """The working directory is no part of the container's layer: a snapshot needs it as a stream."""
    disk_enforced: bool = True
    """The kernel keeps the disk limit; otherwise the host looks after it."""
    prelude: str = ""
    """Source that runs before the agent, in tests."""


class Link(Protocol):
    """The two byte streams to and from a container's agent."""

    @property
    def transcript(self) -> bytes:
        """The end of what its process wrote to standard error."""
        ...

    async def send(self, data: bytes) -> None:
        """Raises SandboxLostError when it broke."""
        ...

    async def receive(self) -> bytes:
        """What came; empty at the end."""
        ...

    async def aclose(self) -> None: ...


class Containers(Protocol):
    """Making, finding and removing containers."""

    async def create(self, spec: Spec, *, name: str, labels: Mapping[str, str]) -> str:
        """Make a container, and give its id. Raises SandboxStartError, SandboxRefusedError."""
        ...

    async def start(self, container_id: str) -> None:
        """Start its first process, which waits for a greeting. Raises SandboxStartError."""
        ...

    async def inspect(self, container_id: str, *, runtime: bool = False, surely: bool = False) -> ContainerInfo | None:
        """Return the state of a container; None if there is no such container.

        Args:
            container_id: which container.
            runtime: also find out which runtime it runs under.
            surely: where the engine says that it runs, have the engine ask the runtime, too. This takes longer.
        """
        ...

    async def layer(self, container_id: str, most: LayerUse, *, holes: bool = False) -> LayerUse:
        """Measure its own layer, as `layer_use`; the measurement may end once it exceeds `most`.

        The result is empty when there is no container.
        """
        ...

    async def list(self, labels: Mapping[str, str]) -> list[ContainerInfo]:
        """All that carry these labels, running or not; an empty value stands for any."""
        ...

    async def delete(self, container_id: str) -> None:
        """Kill and remove it. Nothing when it is gone already."""
        ...

    async def kill(self, container_id: str) -> None:
        """Kill everything in it, without removing it."""
        ...


class Images(Protocol):
    """Images, and snapshots, which are images too."""

    async def commit(
        self, container_id: str, *, name: str, labels: Mapping[str, str], files: AsyncIterator[bytes] | None, most: int
    ) -> int:
        """Keep a container's files as an image, and give its size in bytes beyond the one that it came from.

        Args:
            container_id: whose.
            name: of the image.
            labels: of the image.
            files: a tar stream of the working directory, when that is not part of the container's layer.
            most: bytes that its layer may have otherwise, holes in files included. Raises SandboxLimitError.
        """
        ...

    async def make(self, archive: Path, name: str) -> None:
        """Make an image of a root file system."""
        ...

    async def list(self, labels: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
        """Names of the images with these labels, and all their labels."""
        ...

    async def remove(self, name: str) -> None:
        """Remove it. Nothing when it is gone already."""
        ...


class Agents(Protocol):
    """The way to the agents of containers."""

    def surroundings(self, container_id: str, spec: Spec) -> Surroundings:
        """Where the agent of this container runs."""
        ...

    def attach(self, container_id: str) -> AbstractAsyncContextManager[Link]:
        """A link to the first process of a container that was just started."""
        ...

    def take_over(self, container_id: str) -> AbstractAsyncContextManager[Link]:
        """A new link to an agent whose host is gone, after which the agent expects its secret."""
        ...


class Backend(Protocol):
    """A container engine."""

    @property
    def containers(self) -> Containers: ...

    @property
    def images(self) -> Images: ...

    @property
    def agents(self) -> Agents: ...

    async def info(self) -> EngineInfo:
        """What it is. Raises SandboxStartError when it does not answer."""
        ...
