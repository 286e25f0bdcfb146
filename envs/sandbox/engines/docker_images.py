"""DockerImages: images of Docker or Podman, and snapshots of sandboxes, which are images too.

`DockerBackend` makes it. `LocalSandbox.snapshot` commits images here, `envs.sandbox.images` makes Flash's own ones, and
`envs.sandbox.pool.ownership.Reaper` removes snapshots without an owner.
"""

from __future__ import annotations

import logging
import sys
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import msgspec

from envs.sandbox.agent.files import SNAPSHOT_FILE
from envs.sandbox.engines.backend import Containers
from envs.sandbox.engines.docker_api import HTTP_FAILED, DockerApi, status_of
from envs.sandbox.engines.machine import LayerUse
from flash.errors import SandboxError, SandboxLimitError, SandboxLostError

_log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Seconds between two attempts to remove a container that must not stay."""
PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Seconds between attempts to pause the processes of a container."""


class DockerImages:
    """Images of Docker or Podman: the `Images` of `DockerBackend`, whose docstrings describe the methods."""

    def __init__(self, api: DockerApi, containers: Containers, request_s: float, image_s: float) -> None:
        """Create the operations on one engine's images.

        Args:
            api: requests to the engine.
            containers: operations on containers of the same engine.
            request_s: seconds that the engine has for one request.
            image_s: seconds that the engine has to make an image.
        """
        self._api = api
        self._containers = containers
        self._request_s = request_s
        self._image_s = image_s

    async def commit(
        self, container_id: str, *, name: str, labels: Mapping[str, str], files: AsyncIterator[bytes] | None, most: int
    ) -> int:
        """Save a container's files as an image, as `Images.commit` says.

        Without `files`, the container is paused meanwhile, so that the files belong to one moment. With `files`, the
        working directory is in memory and no part of the container's layer. Then its archive goes into a second
        container, which never runs, and the image is made of that one.

        Raises:
            SandboxLimitError: without `files`, the layer has more than `most` bytes.
            SandboxError: the engine failed, or there is no room for the archive here; or an error of `files`.
        """
        if files is None:
            async with self._paused(container_id):
                # Measured with holes, since engines write them out. A paused container can make no new ones after this.
                use = await self._containers.layer(container_id, LayerUse(most, sys.maxsize), holes=True)
                if use.size > most:
                    raise SandboxLimitError(
                        f"the files have {use.size} bytes or more, holes included, and the sandbox may have {most}"
                    )
                return await self._commit(container_id, name, labels)
        image = (await self._api.json(f"containers/{container_id}/json", SandboxLostError))["Config"]["Image"]
        config = {"Image": image, "Cmd": ["/bin/sh"], "Labels": dict(labels), "HostConfig": {"NetworkMode": "none"}}
        # The container has a name, so that it can be removed also if the response to its creation was lost.
        holder = f"flash-snapshot-{name.rpartition(':')[2]}"
        try:
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
                        await self._delete_until_gone(holder)
        except OSError as error:  # The disk of temporary files is full.
            raise SandboxError(f"no temporary file can be written for the snapshot: {error}") from error

    @asynccontextmanager
    async def _paused(self, container_id: str) -> AsyncGenerator[None]:
        """Pause a container's processes for the time of the block, so that `commit` gets files of one moment.

        Raises SandboxError if they cannot be paused.
        """
        path = f"containers/{container_id}"
        try:
            await self._pause(path)
            yield
        finally:
            # Also if this was cancelled before the engine confirmed the pause, or if the container has ended meanwhile.
            with anyio.move_on_after(self._request_s, shield=True), suppress(SandboxError):
                await self._api.json(f"{path}/unpause", SandboxLostError, method="POST")

    async def _pause(self, path: str) -> None:
        """Pause all processes of the container at the API's `path` (`containers/ID`). Retries while the runtime fails.

        Raises the last SandboxLostError after the pauses of `PAUSES_S`; another error, such as a timeout, at once.
        """
        for pause_s in (*PAUSES_S, None):
            try:
                await self._api.json(f"{path}/pause", SandboxLostError, method="POST")
                return
            except SandboxLostError as error:
                # On a busy machine the kernel does not freeze all processes within the time that the runtime waits. The
                # runtime then thaws them and fails.
                if pause_s is None or status_of(error) != HTTP_FAILED:
                    raise
            await anyio.sleep(pause_s)

    async def _delete_until_gone(self, name: str) -> None:
        """Remove a container. Retries until the engine succeeds; the caller bounds the time."""
        while True:
            try:
                return await self._containers.delete(name)
            except SandboxError as error:
                _log.warning("removing container %s: %s", name, error)
                await anyio.sleep(RETRY_S)

    async def _commit(self, container_id: str, name: str, labels: Mapping[str, str]) -> int:
        """Make an image of a container. Returns the bytes by which it is larger than the container's own image.

        `name` is REPOSITORY:TAG. Raises SandboxError; the engine may still make the image after a timeout.
        """
        repository, _, tag = name.partition(":")
        made = await self._api.json(
            "commit",
            SandboxError,
            method="POST",
            # Without a pause by the engine, which would not retry: `commit` pauses a running container itself.
            params={"container": container_id, "repo": repository, "tag": tag or "latest", "pause": "false"},
            # Podman fails if the request has no body.
            data={"Labels": dict(labels)},
            timeout=self._image_s,
        )
        image = await self._api.json(f"images/{made['Id']}/json", SandboxError)
        base = await self._api.json(f"containers/{container_id}/json", SandboxError)
        origin = await self._api.json(f"images/{base['Image']}/json", SandboxError)
        return max(0, int(image.get("Size") or 0) - int(origin.get("Size") or 0))

    async def make(self, archive: Path, name: str) -> None:
        """Import a tar archive of a root file system as an image.

        Args:
            archive: path of the archive on this machine, which is sent to the engine in pieces.
            name: name of the image, REPOSITORY or REPOSITORY:TAG; without a registry, whose port has a colon too.
        """
        repository, _, tag = name.partition(":")
        await self._api.json(
            "images/create",
            SandboxError,
            method="POST",
            # "-": the archive is the body of the request. Otherwise the engine would download it.
            params={"fromSrc": "-", "repo": repository, "tag": tag or "latest"},
            data=_pieces_of(archive),
            headers={"Content-Type": "application/x-tar"},
            timeout=self._image_s,
        )

    async def list(self, labels: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
        """Return the labels of the images that have `labels`, by each name of the image. "" matches any value."""
        filters = [name if value == "" else f"{name}={value}" for name, value in labels.items()]
        params = {"filters": msgspec.json.encode({"label": filters} if filters else {}).decode()}
        found = await self._api.json("images/json", SandboxError, params=params)
        return {name: entry.get("Labels") or {} for entry in found for name in entry.get("RepoTags") or []}

    async def remove(self, name: str) -> None:
        """Remove an image, if it exists. Raises SandboxError if the engine fails, or while a container uses it."""
        await self._api.json(f"images/{name}", SandboxError, method="DELETE", missing=None)


async def _pieces_of(path: Path) -> AsyncIterator[bytes]:
    """Yield the content of a file in pieces."""
    async with await anyio.open_file(path, "rb") as file:
        while piece := await file.read(1 << 18):
            yield piece


@asynccontextmanager
async def _in_tar(name: str, pieces: AsyncIterator[bytes]) -> AsyncGenerator[AsyncIterator[bytes]]:
    """Build a tar archive with one file, for the time of the block, and yield it in pieces.

    The header contains the size, so all pieces are collected first, on disk if they are large.
    """
    async with anyio.SpooledTemporaryFile[bytes](max_size=1 << 20) as spool:
        size = 0
        async for piece in pieces:
            size += await spool.write(piece)
        await spool.seek(0)

        async def archive() -> AsyncIterator[bytes]:
            """Yield the header, the content, and the padding and end of the archive."""
            header = tarfile.TarInfo(name)
            header.size, header.mode = size, 0o444
            yield header.tobuf()
            while piece := await spool.read(1 << 18):
                yield piece
            # A file fills whole blocks of 512 bytes. Two empty blocks end the archive.
            yield b"\0" * (-size % 512 + 1024)

        yield archive()
