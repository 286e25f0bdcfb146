"""Engines that answer wrongly after `kill -9`: what is made of it."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from envs.sandbox.engines.docker import DockerBackend
from flash.errors import ConfigError, SandboxLostError

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def engine(folder, answers):
    """An engine that answers what `answers` has for the end of a path, and 404 otherwise."""

    async def answer(request: web.Request) -> web.Response:
        for end, (status, body) in answers.items():
            if request.path.endswith(end):
                return web.json_response(body, status=status)
        return web.json_response({"message": "not found"}, status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(folder / "e")).start()
        async with DockerBackend(f"unix://{folder / 'e'}") as backend:
            yield backend
    finally:
        await runner.cleanup()


VERSION = {"/version": (200, {"ApiVersion": "1.41", "Version": "4.3.1"})}
BROKEN = {"/v1.41/containers/json": (500, {"message": "getting container from store: container not known"})}


async def test_one_container_that_the_engine_cannot_describe_does_not_hide_the_others(tmp_path):
    known = [
        {"Id": "1" * 64, "Names": ["flash-a"], "State": "running", "Labels": {"flash.sandbox.box": "flash-a"}},
        {"Id": "2" * 64, "Names": ["flash-b"], "State": "created", "Labels": None},
    ]
    async with engine(tmp_path, {**VERSION, **BROKEN, "/libpod/containers/json": (200, known)}) as backend:
        found = await backend.list({"flash.sandbox.service": ""})
    assert [(sandbox.container_id[:1], sandbox.name, sandbox.running) for sandbox in found] == [
        ("1", "flash-a", True),
        ("2", "flash-b", False),
    ]
    assert found[0].labels == {"flash.sandbox.box": "flash-a"}


async def test_an_engine_that_only_fails_is_told(tmp_path):
    async with engine(tmp_path, {**VERSION, **BROKEN}) as backend:
        with pytest.raises(SandboxLostError, match="container not known"):
            await backend.list({})


async def test_an_engine_that_is_gone_is_not_said_to_refuse(tmp_path):
    async with DockerBackend(f"unix://{tmp_path / 'nothing'}") as backend:
        with pytest.raises(SandboxLostError, match="cannot be reached"):
            await backend.list({})


@pytest.mark.parametrize("url", ["engine", "/run/podman/podman.sock", "ssh://host", "unix:run/podman.sock"])
def test_an_address_that_is_no_engines_is_refused(url):
    with pytest.raises(ConfigError, match="as the engine's address, not"):
        DockerBackend(url)
