"""Protocols of a container engine: `Backend`, with its `Containers`, `Images` and the connections to its `Agents`.

They are implemented by `envs.sandbox.engines.docker.DockerBackend` over Docker or Podman, and by
`envs.sandbox.engines.fake.FakeBackend`, which runs the same agent as a local process without any isolation, for tests.
`envs.sandbox.engines.docker` chooses the class for an address.

Every method returns within the deadline of its implementation, or raises a `SandboxError`. A method that fails or is
cancelled leaves nothing behind, except `create`, whose container is found by its labels.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import msgspec

from envs.sandbox.api import Spec
from envs.sandbox.engines.machine import LayerUse

AGENT_SECRET = "flash.agent.secret"
"""Label with the secret that a host needs to take over the sandbox. A sandbox cannot read its own labels."""
AGENT_ADDRESS = "flash-agent"
"""Abstract socket on which an agent waits for a host that takes over. Each container has its own namespace for it."""
SNAPSHOT_NAME = "localhost/flash-snapshot"
"""Repository name of all snapshot images; the tag names the snapshot."""
SNAPSHOT_LABEL = "flash.snapshot"
"""Label of a snapshot image with the id of the sandbox that it was made of."""
INSTANCE_LABEL = "flash.snapshot.life"
"""Label of a snapshot image with the id of the process that made it. Only that process can report the snapshot."""
INSTANCE = uuid4().hex
"""Id of this process, for `INSTANCE_LABEL`."""


def from_snapshot(spec: Spec) -> bool:
    """Return True if a sandbox of this spec begins with the files of a snapshot."""
    return spec.image.startswith(SNAPSHOT_NAME)


class EngineInfo(msgspec.Struct, frozen=True):
    """Properties of a container engine and of its machine, as the engine reports them."""

    name: str
    """Name and version, for instance `podman 4.3.1`."""
    address: str
    """Address of the engine."""
    isolated: bool
    """False: commands run with the rights of this process and see the files and network of this machine. For tests
    only."""
    runtimes: tuple[str, ...]
    """Names of the container runtimes that a spec may ask for."""
    default_runtime: str
    cpus: int
    memory: int
    """Memory of the machine in bytes."""
    here: bool
    """True if the containers run on this machine."""
    users: tuple[int, int] | None = None
    """First and last user id for sandboxes that get one of their own; None: the engine maps users of containers to
    others."""


class ContainerInfo(msgspec.Struct, frozen=True):
    """State of a container, as its engine reports it."""

    container_id: str
    name: str
    running: bool
    labels: Mapping[str, str]
    exit_code: int | None = None
    """Exit code of the first process, once it has ended; -1 if it is unknown."""
    oom_killed: bool = False
    """True if the engine reports that it ended for lack of memory."""
    runtime: str = ""
    """Runtime that the container really runs under; empty if it was not asked for."""


class Surroundings(msgspec.Struct, frozen=True):
    """Environment of an agent, which the agent and its host need to know."""

    workdir: str
    cgroup: bool = False
    """True if /sys/fs/cgroup describes this sandbox alone."""
    address: str = ""
    """Abstract socket on which the agent waits for a host that takes over; empty: no host can."""
    files_apart: bool = False
    """True if the working directory is not in the container's layer: a snapshot then needs its files as a stream."""
    disk_enforced: bool = True
    """True if the kernel enforces the disk limit; otherwise the host measures the use."""
    prelude: str = ""
    """Source code that runs before the agent, in tests."""


class Link(Protocol):
    """The two byte streams to and from a container's agent."""

    @property
    def transcript(self) -> bytes:
        """Last part of the text that the agent's process wrote to standard error."""
        ...

    async def send(self, data: bytes) -> None:
        """Send all of `data`.

        Raises:
            SandboxLostError: the connection broke.
        """
        ...

    async def receive(self) -> bytes:
        """Wait for the next bytes; empty at the end of the stream."""
        ...

    async def aclose(self) -> None: ...


class Containers(Protocol):
    """Operations on containers."""

    async def create(self, spec: Spec, *, name: str, labels: Mapping[str, str]) -> str:
        """Create a container and return its id.

        Raises:
            SandboxStartError: the engine failed or did not accept it.
            SandboxRefusedError: the spec is wrong, or asks for something that its profile does not allow.
        """
        ...

    async def start(self, container_id: str) -> None:
        """Start the container's first process, which waits for a greeting.

        Raises:
            SandboxStartError: the container cannot be started.
        """
        ...

    async def inspect(self, container_id: str, *, runtime: bool = False, surely: bool = False) -> ContainerInfo | None:
        """Return the state of a container; None if there is no such container.

        Args:
            container_id: the container.
            runtime: also find out which runtime it runs under.
            surely: if the engine reports it as running, also have the engine ask the runtime. This takes longer.
        """
        ...

    async def layer(self, container_id: str, most: LayerUse, *, holes: bool = False) -> LayerUse:
        """Measure the container's own layer, as `layer_use` does. The measurement may stop once it exceeds `most`.

        The result is empty if there is no container.
        """
        ...

    async def list(self, labels: Mapping[str, str]) -> list[ContainerInfo]:
        """Return all containers with these labels, running or not. An empty value matches any value."""
        ...

    async def delete(self, container_id: str) -> None:
        """Kill and remove a container. Does nothing if it is gone."""
        ...

    async def kill(self, container_id: str) -> None:
        """Kill all processes of a container, without removing it."""
        ...


class Images(Protocol):
    """Operations on images, and on snapshots, which are images too."""

    async def commit(
        self, container_id: str, *, name: str, labels: Mapping[str, str], files: AsyncIterator[bytes] | None, most: int
    ) -> int:
        """Save a container's files as an image. Returns its size in bytes beyond the container's own image.

        Args:
            container_id: the container.
            name: name of the image.
            labels: labels of the image.
            files: tar stream of the working directory, if that is not part of the container's layer.
            most: otherwise the largest size of the layer in bytes, holes in files included.

        Raises:
            SandboxLimitError: the layer is larger than `most`.
        """
        ...

    async def make(self, archive: Path, name: str) -> None:
        """Make an image from a tar archive of a root file system."""
        ...

    async def list(self, labels: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
        """Return the names of the images with these labels, each with all its labels."""
        ...

    async def remove(self, name: str) -> None:
        """Remove an image. Does nothing if it is gone."""
        ...


class Agents(Protocol):
    """Connections to the agents of containers."""

    def surroundings(self, container_id: str, spec: Spec) -> Surroundings:
        """Return the environment in which the agent of this container runs."""
        ...

    def attach(self, container_id: str) -> AbstractAsyncContextManager[Link]:
        """Connect to the first process of a container that was just started."""
        ...

    def take_over(self, container_id: str) -> AbstractAsyncContextManager[Link]:
        """Connect to an agent whose host is gone. The agent then expects its secret."""
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
        """Return the properties of the engine.

        Raises:
            SandboxStartError: the engine does not answer.
        """
        ...
