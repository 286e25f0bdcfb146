"""Protocols of a container engine: `Backend`, with its `Containers`, `Images` and the connections to its `Agents`.

`envs.sandbox.engines.docker.DockerBackend` implements them over Docker or Podman.
`envs.sandbox.engines.fake.FakeBackend` runs the same agent as a local process without any isolation, for tests. A
`LocalSandbox` calls them for its own container, and an `EngineMaker` for the containers of a whole service.

Words: the *agent* is the program inside a container that runs commands there. The *host process* is the process of
Flash that is connected to an agent and controls it. A host process may die and another one *take over* the agent.

Every method returns within the deadline of its implementation, or raises a `SandboxError`. A method that fails or is
cancelled leaves nothing behind. `create`, `start` and `commit` are the exceptions: after an error, the container may
exist, some of its processes may run, or the image may exist, until the caller removes it by its name. If the caller
dies too, `envs.sandbox.pool.ownership.Reaper` finds it by its labels.
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
"""Label with the secret that a host process needs to take over the agent. A sandbox cannot read its own labels."""
AGENT_ADDRESS = "flash-agent"
"""Abstract socket where an agent waits for a host process that takes over. Each container has its own namespace."""
SNAPSHOT_NAME = "localhost/flash-snapshot"
"""Repository name of all snapshot images; the tag names the snapshot."""
SNAPSHOT_LABEL = "flash.snapshot"
"""Label of a snapshot image with the id of the sandbox that it was made of."""
INSTANCE_LABEL = "flash.snapshot.life"
"""Label of a snapshot image with the id of the process that made it.

Only that process can report the snapshot to the holder of the sandbox. After its end, the `Reaper` removes the images
that it did not report."""
INSTANCE = uuid4().hex
"""Id of this process, for `INSTANCE_LABEL`."""


def from_snapshot(spec: Spec) -> bool:
    """Return True if a sandbox of this spec begins with the files of a snapshot."""
    return spec.image.startswith(SNAPSHOT_NAME)


class EngineInfo(msgspec.Struct, frozen=True):
    """Properties of a container engine and of its machine, as the engine reports them. `flash sandbox doctor` prints
    them, and `EngineMaker` takes the capacity from them."""

    name: str
    """Name and version, for instance `podman 4.3.1`."""
    address: str
    """Address of the engine, such as `unix:///run/docker.sock`."""
    isolated: bool
    """False: commands run with the rights of this process and see the files and network of this machine. For tests
    only."""
    runtimes: tuple[str, ...]
    """Names of the container runtimes that a spec may ask for, such as `runsc`."""
    default_runtime: str
    """Name of the runtime for specs that ask for none; empty if the engine does not report it."""
    cpus: int
    """Number of the machine's CPUs."""
    memory: int
    """Memory of the machine in bytes."""
    here: bool
    """True if the containers run on this machine."""
    users: tuple[int, int] | None = None
    """First and last user id of the range from which each sandbox gets its own. None: the engine maps the users of
    containers to other ids, so sandboxes get none."""


class ContainerInfo(msgspec.Struct, frozen=True):
    """State of a container, as its engine reports it."""

    container_id: str
    """Id that the engine gave the container."""
    name: str
    """Name that the caller of `create` chose."""
    running: bool
    """True if the container runs."""
    labels: Mapping[str, str]
    """Labels of the container; the engine adds those of its image."""
    exit_code: int | None = None
    """Exit code of the first process, once it has ended; -1 if it is unknown."""
    oom_killed: bool = False
    """True if the engine reports that the container ended for lack of memory."""
    runtime: str = ""
    """Runtime that the container really runs under; empty if `inspect` was not asked for it."""


class Surroundings(msgspec.Struct, frozen=True):
    """Facts about a container that its agent, and the process that controls the agent, need."""

    workdir: str
    """Working directory of commands, as a path in the container."""
    cgroup: bool = False
    """True if /sys/fs/cgroup describes this sandbox alone, so that the agent can count kills for lack of memory."""
    address: str = ""
    """Abstract socket where the agent waits for a host process that takes over. Empty: none can take over."""
    files_apart: bool = False
    """True if the working directory is not in the container's layer: a snapshot then needs its files as a stream."""
    disk_enforced: bool = True
    """True if the kernel enforces the disk limit. Otherwise `LocalSandbox` measures the use, and ends the sandbox."""
    prelude: str = ""
    """Source code that runs before the agent; only tests set it."""


class Link(Protocol):
    """The two byte streams to and from a container's agent. `envs.sandbox.local.channel.Channel` sends frames on it."""

    @property
    def transcript(self) -> bytes:
        """Last part of the text that the agent's process wrote to standard error, for error messages."""
        ...

    async def send(self, data: bytes) -> None:
        """Send all of `data`.

        Raises:
            SandboxLostError: the connection broke.
        """
        ...

    async def receive(self) -> bytes:
        """Wait for the next bytes; empty at the end of the stream. Raises SandboxLostError if the connection broke."""
        ...

    async def aclose(self) -> None:
        """Close this end of the connection. The agent goes on."""
        ...


class Containers(Protocol):
    """Operations on containers. Only the engine enforces the restrictions of a spec's profile."""

    async def create(self, spec: Spec, *, name: str, labels: Mapping[str, str]) -> str:
        """Create a container without starting it, and return its id.

        Args:
            spec: image, resources and profile of the sandbox.
            name: name of the container, which the caller has chosen. If the response is lost, the caller knows no id,
                and deletes the container by this name.
            labels: labels of the container, by which it is found after the caller's end.

        Raises:
            SandboxStartError: the engine failed or did not accept it.
            SandboxTimeoutError: the engine did not answer in time. The container may exist, or may still be created.
            SandboxRefusedError: the spec is wrong, or asks for something that its profile does not allow.
        """
        ...

    async def start(self, container_id: str) -> None:
        """Start the container's first process, which waits for the greeting of `envs.sandbox.engines.bundle.greet`.

        Raises:
            SandboxStartError: the container cannot be started.
            SandboxTimeoutError: the engine did not answer in time. The container may run, or may still be started.
            SandboxRefusedError: the engine did not accept the request.
        """
        ...

    async def inspect(self, container_id: str, *, runtime: bool = False, surely: bool = False) -> ContainerInfo | None:
        """Return the state of a container; None if there is no such container.

        Args:
            container_id: id of the container.
            runtime: True to also find out which runtime the container runs under.
            surely: True to have the engine ask the runtime too if it reports the container as running. An engine whose
                monitor process was killed still reports a dead container as running. This takes longer.
        """
        ...

    async def layer(self, container_id: str, most: LayerUse, *, holes: bool = False) -> LayerUse:
        """Measure the container's own layer: the files that it has written beyond its image.

        The caller enforces the disk limit with it. The result is empty if there is no container.

        Args:
            container_id: id of the container.
            most: limits of size and number of files. The measurement may stop once it exceeds one of them.
            holes: True to count the holes of files as bytes, as an archive of the layer has them.
        """
        ...

    async def list(self, labels: Mapping[str, str]) -> list[ContainerInfo]:
        """Return all containers with these labels, running or not. An empty value matches any value."""
        ...

    async def delete(self, container_id: str) -> None:
        """Kill and remove a container, given by id or by name. Does nothing if it is gone."""
        ...

    async def kill(self, container_id: str) -> None:
        """Kill all processes of a container, without removing it. Raises SandboxLostError if there is no container."""
        ...


class Images(Protocol):
    """Operations on images, and on snapshots, which are images too. `LocalSandbox.snapshot` commits, the `Reaper`
    lists and removes."""

    async def commit(
        self, container_id: str, *, name: str, labels: Mapping[str, str], files: AsyncIterator[bytes] | None, most: int
    ) -> int:
        """Save a container's files as an image. Returns its size in bytes beyond the container's own image.

        Args:
            container_id: id of the container.
            name: name of the image.
            labels: labels of the image.
            files: tar stream of the working directory if it is not part of the container's layer; None if it is.
            most: largest size of the layer in bytes, holes in files included. Applies if `files` is None.

        Raises:
            SandboxLimitError: the layer is larger than `most`.
            SandboxError: the engine failed, or did not answer in time. The image may exist, or may still be made. Or
                `files` cannot be stored until the engine takes them; their own errors pass through.
        """
        ...

    async def make(self, archive: Path, name: str) -> None:
        """Make an image from a tar archive of a root file system. `envs.sandbox.images` builds Flash's own images."""
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
        """Return the facts about this container that its agent needs. Does not ask the engine."""
        ...

    def attach(self, container_id: str) -> AbstractAsyncContextManager[Link]:
        """Connect to the first process of a container that was just started. The caller sends the greeting."""
        ...

    def take_over(self, container_id: str) -> AbstractAsyncContextManager[Link]:
        """Connect to an agent whose host process is gone, or whose link broke. The caller sends the agent's secret."""
        ...


class Backend(Protocol):
    """A container engine: its containers, images and agents."""

    @property
    def containers(self) -> Containers:
        """Operations on its containers."""
        ...

    @property
    def images(self) -> Images:
        """Operations on its images."""
        ...

    @property
    def agents(self) -> Agents:
        """Connections to the agents in its containers."""
        ...

    async def info(self) -> EngineInfo:
        """Return the properties of the engine.

        Raises:
            SandboxStartError: the engine does not answer.
        """
        ...
