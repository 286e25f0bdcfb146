"""Engines that answer wrongly after `kill -9`: what is made of it."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager, nullcontext
from typing import Any
from uuid import uuid4

import aiohttp
import anyio
import pytest
from aiohttp import web

from envs.sandbox.api import Spec
from envs.sandbox.engines.docker import DockerBackend
from envs.sandbox.engines.docker_images import PAUSES_S
from envs.sandbox.engines.machine import LayerUse, memory_bytes
from envs.sandbox.local.sandbox import LocalSandbox
from flash.errors import ConfigError, SandboxError, SandboxLostError, SandboxTimeoutError
from tests.envs.sandbox.conftest import IMAGE, room_for

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def engine(folder, answers, *, far=False, sent=None):
    """An engine that answers what `answers` has for the end of a path, one after another if it has a list; else 404.

    With `far`, it is reached by TCP, as on another machine. The bodies of `POST` requests are added to `sent`.
    """

    async def answer(request: web.Request) -> web.Response:
        if sent is not None and request.method == "POST":
            sent.append(await request.json())
        for end, found in answers.items():
            if request.path.endswith(end):
                status, body = found.pop(0) if isinstance(found, list) else found
                return web.json_response(body, status=status)
        return web.json_response({"message": "not found"}, status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await (web.TCPSite(runner, "127.0.0.1", 0) if far else web.UnixSite(runner, str(folder / "e"))).start()
        url = f"tcp://127.0.0.1:{runner.addresses[0][1]}" if far else f"unix://{folder / 'e'}"
        async with DockerBackend(url) as backend:
            yield backend
    finally:
        await runner.cleanup()


VERSION = {"/version": (200, {"ApiVersion": "1.41", "Version": "4.3.1"})}
HERE = {"/info": (200, {"MemTotal": memory_bytes()["MemTotal"]})}
ELSEWHERE = {"/info": (200, {"MemTotal": memory_bytes()["MemTotal"] + 1})}
BROKEN = {"/v1.41/containers/json": (500, {"message": "getting container from store: container not known"})}


KNOWN = [
    {"Id": "1" * 64, "Names": ["flash-a"], "State": "running", "Labels": {"flash.sandbox.box": "flash-a"}},
    {"Id": "2" * 64, "Names": ["flash-b"], "State": "created", "Labels": None},
]


async def test_one_container_that_the_engine_cannot_describe_does_not_hide_the_others(tmp_path):
    async with engine(tmp_path, {**VERSION, **BROKEN, "/libpod/containers/json": (200, KNOWN)}) as backend:
        found = await backend.containers.list({"flash.sandbox.service": ""})
    assert [(sandbox.container_id[:1], sandbox.name, sandbox.running) for sandbox in found] == [
        ("1", "flash-a", True),
        ("2", "flash-b", False),
    ]
    assert found[0].labels == {"flash.sandbox.box": "flash-a"}


@pytest.mark.integration
async def test_the_stand_in_answers_in_the_form_of_the_real_engine(tmp_path, containers):
    real, labels = containers
    created = await real.containers.create(Spec(image=IMAGE), name=f"flash-{uuid4().hex[:20]}", labels=labels)
    async with LocalSandbox(real, Spec(image=IMAGE), labels=labels) as sandbox:
        wanted = {
            "all": "true",
            "filters": json.dumps({"label": [f"{name}={value}" for name, value in labels.items()]}),
        }
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(real.url.removeprefix("unix://"))) as http:
            for path in ("containers/json", "libpod/containers/json"):
                version = "v4.0.0" if "libpod" in path else "v1.41"
                async with http.get(f"http://engine/{version}/{path}", params=wanted) as answer:
                    if "libpod" in path and answer.status == 404:
                        continue  # Docker has no such thing, which is what the stand-in's 404 says.
                    assert answer.status == 200
                    found = await answer.json()
                assert {entry["State"] for entry in found} == {entry["State"] for entry in KNOWN}
                for entry in found:
                    for name, value in KNOWN[0].items():
                        assert isinstance(entry[name], type(value)), (path, name, entry[name])
                # What the real engine says, said by the stand-in, is understood alike; Podman's order varies.
                async with engine(tmp_path, {**VERSION, "/v1.41/containers/json": (200, found)}) as copy:
                    said = [sorted(await each.containers.list(labels), key=repr) for each in (copy, real)]
                assert said[0] == said[1]
            async with http.get("http://engine/v1.41/containers/nothing/json") as answer:
                assert answer.status == 404
                assert isinstance((await answer.json())["message"], str)
        assert sandbox.state == "ready"
    await real.containers.delete(created)


async def test_an_engine_that_only_fails_is_told(tmp_path):
    async with engine(tmp_path, {**VERSION, **BROKEN}) as backend:
        with pytest.raises(SandboxLostError, match="container not known"):
            await backend.containers.list({})


async def test_an_engine_that_is_gone_is_not_said_to_refuse(tmp_path):
    async with DockerBackend(f"unix://{tmp_path / 'nothing'}") as backend:
        with pytest.raises(SandboxLostError, match="cannot be reached"):
            await backend.containers.list({})


@pytest.mark.parametrize(
    ("answer", "paused", "lives", "running"),
    [
        (409, False, False, False),
        (500, False, False, False),
        (500, False, True, True),  # the runtime failed for another reason
        (404, False, False, True),
        (204, False, False, True),
        (409, True, False, True),  # for a snapshot
    ],
)
async def test_a_container_without_a_process_has_ended_whatever_its_engine_says(
    tmp_path, answer, paused, lives, running
):
    process = await anyio.open_process(["sleep", "100"])
    try:
        if not lives:
            process.kill()
            await process.wait()
        state = {"Running": True, "Paused": paused, "Pid": process.pid, "ExitCode": 0, "OOMKilled": False}
        told = {"Id": "1", "Name": "/flash-a", "State": state, "Config": {"Labels": None}}
        answers = {**VERSION, **HERE, "/1/json": (200, told), "/1/kill": (answer, {"message": "state improper"})}
        async with engine(tmp_path, answers) as backend:
            found = await backend.containers.inspect("1", surely=True)
            assert found is not None
            assert found.running is running
            assert found.exit_code == (None if running else -1)
            assert (await backend.containers.inspect("1")).running
    finally:
        if lives:
            process.kill()
        await process.aclose()


@pytest.mark.parametrize("far", [True, False])  # without it, the socket leads to another machine, as `ssh -L` makes one
@pytest.mark.parametrize(("answer", "running"), [(409, False), (500, True), (404, True), (204, True)])
async def test_a_failure_of_an_engine_elsewhere_is_not_taken_for_the_end_of_a_container(tmp_path, answer, running, far):
    # A process of this number is not here, which says nothing of the engine's machine.
    state = {"Running": True, "Paused": False, "Pid": 1 << 30, "ExitCode": 0, "OOMKilled": False}
    described = {"Id": "1", "Name": "/flash-a", "State": state, "Config": {"Labels": None}}
    kill = {"/1/kill": (answer, {"message": "the runtime failed"})}
    async with engine(tmp_path, {**VERSION, **ELSEWHERE, "/1/json": (200, described), **kill}, far=far) as backend:
        found = await backend.containers.inspect("1", surely=True)
        assert found is not None
        assert found.running is running


async def test_the_layer_of_a_container_elsewhere_is_not_looked_for_here(tmp_path):
    (tmp_path / "layer").mkdir()
    described = {"State": {"Pid": 0}, "GraphDriver": {"Data": {"UpperDir": str(tmp_path / "layer")}}, "SizeRw": 7}
    for place, size in ((ELSEWHERE, 7), (HERE, 0)):
        async with engine(tmp_path, {**VERSION, **place, "/1/json": (200, described)}) as backend:
            assert (await backend.containers.layer("1", LayerUse(100, 100))).size == size


async def test_the_engine_measures_a_layer_whose_folder_cannot_be_entered_here(tmp_path):
    # A name that is too long: no permission keeps root out.
    described = {"State": {"Pid": 0}, "GraphDriver": {"Data": {"UpperDir": f"/{'x' * 300}"}}, "SizeRw": 7}
    async with engine(tmp_path, {**VERSION, **HERE, "/1/json": (200, described)}) as backend:
        assert (await backend.containers.layer("1", LayerUse(100, 100))).size == 7


async def test_a_podman_elsewhere_gets_no_path_of_a_file_here(tmp_path):
    podman = {"/version": (200, {"ApiVersion": "1.41", "Version": "4.3.1", "Components": [{"Name": "Podman Engine"}]})}
    for place, named in ((ELSEWHERE, False), (HERE, True)):
        sent: list[dict[str, Any]] = []
        answers = {**podman, **place, "/containers/create": (201, {"Id": "1"}), "/archive": (200, {})}
        async with engine(tmp_path, answers, sent=sent) as backend:
            await backend.containers.create(Spec(image="any"), name="flash-a", labels={})
        assert any(option.startswith("seccomp=/") for option in sent[0]["HostConfig"]["SecurityOpt"]) is named


@pytest.mark.parametrize("failures", [0, 2, 9])
async def test_a_snapshot_waits_until_a_busy_machine_has_stopped_the_processes(tmp_path, failures):
    pauses = [(500, {"message": "runc pause: exit status 1"})] * failures + [(204, None)]
    answers = {
        **VERSION,
        "/1/pause": pauses,
        "/1/unpause": (204, None),
        "/1/json": (200, {"Image": "base", "State": {}, "SizeRw": 4}),
        "/v1.41/commit": (201, {"Id": "made"}),
        "/made/json": (200, {"Size": 7}),
        "/base/json": (200, {"Size": 2}),
    }
    async with engine(tmp_path, answers) as backend:
        expected = pytest.raises(SandboxLostError, match="runc pause") if failures > len(PAUSES_S) else nullcontext()
        with expected:
            assert await backend.images.commit("1", name="copy:1", labels={}, files=None, most=100) == 5
    assert len(pauses) == max(0, failures - len(PAUSES_S))


@pytest.mark.parametrize("room", [1 << 20, (3 << 20) - 100])
async def test_a_snapshot_without_room_for_its_files_here_is_a_typed_error(tmp_path, room):
    async def files():
        for _ in range(3):
            yield b"x" * (1 << 20)

    answers = {**VERSION, "/1/json": (200, {"Config": {"Image": "base"}})}
    async with engine(tmp_path, answers) as backend:
        with room_for(room), pytest.raises(SandboxError, match="no temporary file can be written") as caught:
            await backend.images.commit("1", name="copy:1", labels={}, files=files(), most=100)
    assert type(caught.value) is SandboxError


async def test_a_sandbox_that_sends_its_files_too_slowly_is_not_taken_for_a_full_disk(tmp_path):
    async def files():
        yield b"x"
        raise SandboxTimeoutError("waited for the files")

    answers = {**VERSION, "/1/json": (200, {"Config": {"Image": "base"}})}
    async with engine(tmp_path, answers) as backend:
        with pytest.raises(SandboxTimeoutError, match="waited for the files"):
            await backend.images.commit("1", name="copy:1", labels={}, files=files(), most=100)


@pytest.mark.parametrize("url", ["engine", "/run/podman/podman.sock", "ssh://host", "unix:run/podman.sock"])
def test_an_address_that_is_no_engines_is_refused(url):
    with pytest.raises(ConfigError, match="as the engine's address, not"):
        DockerBackend(url)
