"""The images of Docker or Podman, and the snapshots of sandboxes, which are images too."""

from __future__ import annotations

import logging
import sys
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import msgspec

from envs.sandbox.engines.backend import Containers
from envs.sandbox.engines.docker_api import HTTP_FAILED, DockerApi, status_of
from envs.sandbox.engines.layers import LayerUse
from flash.errors import SandboxError, SandboxLimitError, SandboxLostError

_log = logging.getLogger(__name__)

SNAPSHOT_FILE = "/.flash-snapshot.tar"
"""Where an image keeps the working directory of the sandbox that it was made of."""
RETRY_S = 0.5
"""Seconds between two attempts to remove what must not stay."""
PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Seconds between attempts to stop the processes of a container."""


class DockerImages:
    """See the module.

    Args:
        api: of the engine.
        containers: of the engine.
        request_s: seconds for one request.
        image_s: seconds for an image to be made.
    """

    def __init__(self, api: DockerApi, containers: Containers, request_s: float, image_s: float) -> None:
        self._api = api
        self._containers = containers
        self._request_s = request_s
        self._image_s = image_s

    async def commit(
        self, container_id: str, *, name: str, labels: Mapping[str, str], files: AsyncIterator[bytes] | None, most: int
    ) -> int:
        if files is None:
            async with self._paused(container_id):
                # Engines write holes out. What is paused does not make any after this look.
                use = await self._containers.layer(container_id, LayerUse(most, sys.maxsize), holes=True)
                if use.size > most:
                    raise SandboxLimitError(
                        f"the files have {use.size} bytes or more, holes included, and the sandbox may have {most}"
                    )
                return await self._commit(container_id, name, labels)
        # The working directory is not part of the container's layer: put it into a second one, which never runs.
        image = (await self._api.json(f"containers/{container_id}/json", SandboxLostError))["Config"]["Image"]
        config = {"Image": image, "Cmd": ["/bin/sh"], "Labels": dict(labels), "HostConfig": {"NetworkMode": "none"}}
        # Named, so that it is found also when its creation was not answered.
        holder = f"flash-snapshot-{name.rpartition(':')[2]}"
        async with _in_tar(SNAPSHOT_FILE.lstrip("/"), files) as archive:
            try:
                await self._api.json(
                    "containers/create", SandboxError, method="POST", params={"name": holder}, data=config
                )
                await self._api.json(
                    f"containers/{holder}/archive",
                    SandboxError,
                    method="PUT",
                    params={"path": "/"},
                    data=archive,
                    headers={"Content-Type": "application/x-tar"},
                    timeout=self._image_s,
                )
                return await self._commit(holder, name, labels)
            finally:
                with anyio.move_on_after(self._request_s, shield=True):
                    await self._delete_at_last(holder)

    @asynccontextmanager
    async def _paused(self, container_id: str) -> AsyncGenerator[None]:
        """Nothing in it runs during the block."""
        path = f"containers/{container_id}"
        try:
            await self._pause(path)
            yield
        finally:
            # Also when it was cancelled before the engine said that it is paused, or has ended meanwhile.
            with anyio.move_on_after(self._request_s, shield=True), suppress(SandboxError):
                await self._api.json(f"{path}/unpause", SandboxLostError, method="POST")

    async def _pause(self, path: str) -> None:
        """Stop all processes of a container until they are let go on."""
        for pause_s in (*PAUSES_S, None):
            try:
                await self._api.json(f"{path}/pause", SandboxLostError, method="POST")
                return
            except SandboxLostError as error:
                # On a busy machine the kernel does not stop all of them in the moment that the runtime waits for it.
                # The runtime then lets them go on, and fails.
                if pause_s is None or status_of(error) != HTTP_FAILED:
                    raise
            await anyio.sleep(pause_s)

    async def _delete_at_last(self, name: str) -> None:
        """Remove a container, though the engine may fail meanwhile."""
        while True:
            try:
                return await self._containers.delete(name)
            except SandboxError as error:
                _log.warning("removing container %s: %s", name, error)
                await anyio.sleep(RETRY_S)

    async def _commit(self, container_id: str, name: str, labels: Mapping[str, str]) -> int:
        repository, _, tag = name.partition(":")
        made = await self._api.json(
            "commit",
            SandboxError,
            method="POST",
            params={"container": container_id, "repo": repository, "tag": tag or "latest", "pause": "false"},
            # Podman fails without a body, even an empty one.
            data={"Labels": dict(labels)},
            timeout=self._image_s,
        )
        image = await self._api.json(f"images/{made['Id']}/json", SandboxError)
        base = await self._api.json(f"containers/{container_id}/json", SandboxError)
        origin = await self._api.json(f"images/{base['Image']}/json", SandboxError)
        return max(0, int(image.get("Size") or 0) - int(origin.get("Size") or 0))

    async def make(self, archive: Path, name: str) -> None:
        repository, _, tag = name.partition(":")
        await self._api.json(
            "images/create",
            SandboxError,
            method="POST",
            params={"fromSrc": "-", "repo": repository, "tag": tag or "latest"},
            data=_pieces_of(archive),
            headers={"Content-Type": "application/x-tar"},
            timeout=self._image_s,
        )

    async def list(self, labels: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
        filters = [name if value == "" else f"{name}={value}" for name, value in labels.items()]
        params = {"filters": msgspec.json.encode({"label": filters} if filters else {}).decode()}
        found = await self._api.json("images/json", SandboxError, params=params)
        return {name: entry.get("Labels") or {} for entry in found for name in entry.get("RepoTags") or []}

    async def remove(self, name: str) -> None:
        await self._api.json(f"images/{name}", SandboxError, method="DELETE", missing=None)


async def _pieces_of(path: Path) -> AsyncIterator[bytes]:
    async with await anyio.open_file(path, "rb") as file:
        while piece := await file.read(1 << 18):
            yield piece


@asynccontextmanager
async def _in_tar(name: str, pieces: AsyncIterator[bytes]) -> AsyncGenerator[AsyncIterator[bytes]]:
    """A tar archive with one file. Its size stands before it, so it is gathered on disk first.

    When the block begins all of it is there: what fails on the way is not taken for a failure of the engine.
    """
    async with anyio.SpooledTemporaryFile[bytes](max_size=1 << 20) as spool:
        size = 0
        async for piece in pieces:
            size += await spool.write(piece)
        await spool.seek(0)

        async def archive() -> AsyncIterator[bytes]:
            header = tarfile.TarInfo(name)
            header.size, header.mode = size, 0o444
            yield header.tobuf()
            while piece := await spool.read(1 << 18):
                yield piece
            yield b"\0" * (-size % 512 + 1024)

        yield archive()
