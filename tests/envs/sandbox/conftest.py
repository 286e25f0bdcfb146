"""What sandbox tests share: an engine where one answers, and a backend that must not leak.

A test that takes `bench` runs twice: on `FakeBackend`, which needs nothing, and on real containers, where it skips when
no engine answers. With FLASH_REQUIRE_CONTAINERS=1 it fails instead: CI must not skip it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import resource
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from uuid import uuid4

import anyio
import pytest

from envs.sandbox import images
from envs.sandbox.api import Spec
from envs.sandbox.engines.backend import EngineInfo
from envs.sandbox.engines.docker import DockerBackend, find_engine
from envs.sandbox.engines.fake import FakeBackend
from envs.sandbox.local.sandbox import LocalSandbox
from flash.errors import ConfigError, SandboxError
from tests.browser import missing

IMAGE = "flash-sandbox-python"
TEST_LABEL = "flash.test"
"""On every container of these tests, with a value of its own for each."""


REAL = ("local", "remote", "service")
"""Rooms whose tests start agents and servers, on the real clock."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in REAL and item.path.parent.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def engine_url() -> str:
    """The container engine of this machine, with the images that the tests need."""
    url = ""
    try:
        url = find_engine()
        if url.startswith("unix://"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(url.removeprefix("unix://"))
    except (ConfigError, OSError) as error:
        missing("CONTAINERS", f"no container engine answers: {error}")
    # Several processes may run tests on one engine; the first one makes the images.
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    with Path(tempfile.gettempdir(), f"flash-test-images-{os.getuid()}-{name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            anyio.run(_make_images, url)
        except (ConfigError, SandboxError) as error:
            missing("CONTAINERS", f"the images cannot be made: {error}")
    return url


@pytest.fixture(scope="session")
def engine_info(engine_url) -> EngineInfo:
    """The properties of the engine, for all tests: Podman takes two seconds of CPU to answer."""

    async def ask() -> EngineInfo:
        async with DockerBackend(engine_url) as engine:
            return await engine.info()

    return anyio.run(ask)


async def _make_images(url: str) -> None:
    async with DockerBackend(url) as engine:
        there = " ".join(await engine.images.list({}))
        if IMAGE not in there:
            with tempfile.TemporaryDirectory() as folder:
                archive = Path(folder) / "root.tar"
                await anyio.to_thread.run_sync(images.build, images.RECIPES[IMAGE], archive)
                await engine.images.make(archive, IMAGE)


@pytest.fixture
async def containers(engine_url, engine_info) -> AsyncIterator[tuple[DockerBackend, dict[str, str]]]:
    """The engine, and the labels by which the test's containers are known; all must be gone in the end."""
    labels = {TEST_LABEL: uuid4().hex}
    async with DockerBackend(engine_url, info=engine_info) as engine:
        yield engine, labels
        left = await engine.containers.list(labels)
        for sandbox in left:
            await engine.containers.delete(sandbox.container_id)
        snapshots = await engine.images.list(labels)
        for name in snapshots:
            await engine.images.remove(name)
        assert not left, f"leaked containers: {left}"
        assert not snapshots, f"leaked images: {snapshots}"


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes, as on a full disk."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


class Bench:
    """Makes sandboxes for a test, on one backend."""

    def __init__(self, backend, labels: dict[str, str]) -> None:
        self.backend = backend
        self.labels = labels
        self.isolated = not isinstance(backend, FakeBackend)

    def sandbox(self, **options) -> LocalSandbox:
        settings = options.pop("settings", None)
        spec = Spec(image=options.pop("image", IMAGE), **options)
        return LocalSandbox(self.backend, spec, labels=self.labels, settings=settings)

    @asynccontextmanager
    async def copy(self, sandbox: LocalSandbox) -> AsyncIterator[LocalSandbox]:
        """Another one with the same files, as the pool's forks are made."""
        snapshot = await sandbox.snapshot()
        try:
            async with LocalSandbox(self.backend, snapshot.spec, labels=self.labels) as copied:
                yield copied
        finally:
            with anyio.CancelScope(shield=True):
                await self.backend.images.remove(snapshot.spec.image)


@pytest.fixture(params=["fake", pytest.param("containers", marks=pytest.mark.integration)])
def kind(request) -> str:
    return request.param


@pytest.fixture
def _engine_if_needed(kind, request) -> EngineInfo | None:
    return request.getfixturevalue("engine_info") if kind == "containers" else None


@pytest.fixture
async def bench(kind, _engine_if_needed) -> AsyncIterator[Bench]:
    """The same test on both backends; nothing may be left of it."""
    labels = {TEST_LABEL: uuid4().hex}
    if kind == "fake":
        async with FakeBackend() as backend:
            yield Bench(backend, labels)
            assert not backend.containers.kept
            assert not backend.images.kept
        return
    async with DockerBackend(_engine_if_needed.address, info=_engine_if_needed) as engine:
        yield Bench(engine, labels)
        left = await engine.containers.list(labels)
        for sandbox in left:
            await engine.containers.delete(sandbox.container_id)
        assert not left, f"leaked containers: {left}"
