"""The service against callers who should get nothing, and clients that misbehave. Slow ones: `test_security_slow`."""

from __future__ import annotations

import argparse
import io
import logging
import re
from urllib.parse import quote

import httpx
import msgspec
import pytest
from starlette.routing import Route

from envs.sandbox import cli as sandboxcli
from envs.sandbox.pool.lease import LeaseOrder
from envs.sandbox.remote.client import SandboxClient
from envs.sandbox.service.web import make_routes
from envs.sandbox.tokens import ADMIN
from flash.errors import (
    SandboxClosedError,
    SandboxError,
    SandboxFileError,
    SandboxLimitError,
    SandboxRefusedError,
)
from flash.http.connections import HttpLimits
from flash.text import OneLine
from tests.envs.sandbox.raw import bare, bearer, connected, head
from tests.envs.sandbox.services import OTHER_TOKEN, SPEC, TOKEN, running

pytestmark = pytest.mark.anyio

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "SEARCH", "get")
NOT_ENOUGH = (
    {},
    bearer("wrong" * 10),
    bearer("x"),
    {"authorization": "Bearer"},
    bearer(TOKEN[:-1]),
    bearer(f"{TOKEN}x"),
    bearer(f"{TOKEN},{TOKEN}"),
    {"authorization": TOKEN},
    {"authorization": f"Basic {TOKEN}"},
    {"x-token": TOKEN},
    {"cookie": f"token={TOKEN}"},
)
EVIL = "a\r\nset-cookie: x=1\r\n\r\n<script>"
"""A name that would be a header of its own, or a line of a log."""


def places(service, **names: str) -> list[str]:
    """Every path of the application by its own table."""
    found = []
    for route in make_routes(service):
        assert isinstance(route, Route)
        found.append(re.sub(r"{(\w+)}", lambda part: names.get(part[1], part[1]), route.path))
    return found


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_a_body_that_turns_out_to_be_none_is_one_answer_and_no_traceback(tmp_path, caplog, token):
    """Its head is being answered meanwhile."""
    data = head("POST", "/v1/sandboxes", "transfer-encoding: chunked", token=token) + b"5\r\nhello\r\np\r\n\r\n"
    async with running(tmp_path) as world, connected(world) as connection:
        await connection.stream.send(data)
        assert await connection.ended()
        assert connection.got.count(b"HTTP/1.1 ") == 1
        assert connection.got.startswith(b"HTTP/1.1 400 ")
    assert not any(record.exc_info for record in caplog.records)


async def test_no_request_without_a_valid_token_succeeds(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        every = places(world.service, id=sandbox.sandbox_id)
        assert set(every) >= {"/v1/openapi.json", "/v1/status", "/v1/sandboxes"}
        every += ["/nothing", "/", "//", "/v1/sandboxes/../status"]
        for headers in NOT_ENOUGH:
            async with bare(world, **headers) as client:
                for path in every:
                    # Every method with no token and with a wrong one; then it is known to be one gate for all.
                    for method in METHODS if headers in NOT_ENOUGH[:2] else METHODS[:1]:
                        answer = await client.request(method, f"{path}?token={TOKEN}")
                        assert answer.status_code == 401, (headers, method, path)
                        assert sandbox.sandbox_id not in answer.text
                        assert "flash-boot" not in answer.headers
        assert len(world.pool.state.leases.all()) == 1
        assert (await sandbox.run("true", timeout=10)).ok


async def test_two_tokens_in_one_request_are_refused(tmp_path):
    async with running(tmp_path) as world, bare(world) as client:
        both = [("authorization", "Bearer x"), ("authorization", f"Bearer {TOKEN}")]
        assert (await client.get("/v1/status", headers=both)).status_code == 401


async def test_a_token_reaches_only_its_own_sandboxes(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        async with SandboxClient(world.url, OTHER_TOKEN) as other:
            assert await other.list() == []
            whole = world.pool.state.hosts()[0].cpus
            full = world.pool.order(
                LeaseOrder(spec=msgspec.structs.replace(SPEC, cpus=whole), owner="admin/plan", token=ADMIN)
            )
            world.pool.state.failures.failed(SandboxError("of image private:1"), "here")
            status = await other.status()
            assert status.sandboxes == []
            assert (status.queue, status.failures) == ({"others": 1}, {"SandboxError": 1})
            assert b"private" not in msgspec.json.encode(status)
            assert (await world.client.status()).queue == {"admin/plan": 1}
            await world.pool.release(full)
            with pytest.raises(SandboxClosedError, match="there is no sandbox"):
                await other.find(sandbox.sandbox_id)
            with pytest.raises(SandboxError):
                await other.end(sandbox.sandbox_id)
            async with other.acquire(SPEC) as theirs:
                assert (await world.client.find(theirs.sandbox_id)).sandbox_id == theirs.sandbox_id
        assert (await sandbox.run("true", timeout=10)).ok


async def test_a_key_that_was_used_for_another_call_is_refused(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox, bare(world, **bearer()) as raw:
        path, keyed = f"/v1/sandboxes/{sandbox.sandbox_id}", {"idempotency-key": "k"}
        first = await raw.post(f"{path}/run", json={"command": "echo one", "timeout": 10}, headers=keyed)
        again = await raw.post(f"{path}/run", json={"command": "echo one", "timeout": 10}, headers=keyed)
        assert again.json() == first.json()
        other = await raw.post(f"{path}/run", json={"command": "echo two", "timeout": 10}, headers=keyed)
        fork = await raw.post(f"{path}/fork", json={"count": 1}, headers=keyed)
        for refused in (other, fork):
            assert (refused.status_code, refused.json()["cause"]) == (422, "SandboxRefusedError")
            assert "was used for another call" in refused.json()["detail"]


async def test_answers_are_kept_for_those_who_ask_again_but_not_without_end(tmp_path):
    spec = msgspec.structs.replace(SPEC, output_limit=1 << 23)
    async with running(tmp_path) as world, world.client.acquire(spec) as sandbox, bare(world, **bearer()) as raw:
        path = f"/v1/sandboxes/{sandbox.sandbox_id}/run"
        body = {"command": "echo >>n; head -c 6000000 /dev/zero", "timeout": 20}
        for key, carried_out in (("a", 1), ("b", 2), ("c", 3), ("c", 3), ("b", 3), ("a", 4)):
            answer = await raw.post(path, json=body, headers={"idempotency-key": key})
            assert answer.status_code == 200, answer.text
            assert (await sandbox.run("wc -l <n", timeout=10)).stdout.split() == [b"%d" % carried_out]


@pytest.mark.parametrize("image", ["9", "9179a5ee", "9179A5EE", "f" * 63, "sha256:9179a5"])
async def test_the_files_of_others_are_not_found_by_the_beginning_of_an_images_id(tmp_path, image):
    async with running(tmp_path) as world:
        with pytest.raises(SandboxRefusedError, match="give a name with its tag"):
            async with world.client.acquire(msgspec.structs.replace(SPEC, image=image)):
                pass
        for whole in ("f" * 64, "sha256:" + "f" * 64, "ada:latest", "localhost/ada", "img"):
            async with world.client.acquire(msgspec.structs.replace(SPEC, image=whole)):
                pass


async def test_paths_lead_nowhere_but_into_the_sandbox(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        async with bare(world, **bearer(TOKEN)) as client:
            for path in ("/v1/../web.py", "/v1/..%2fweb.py", "/v1/%2e%2e/web.py", "//etc/passwd", "/"):
                assert (await client.get(httpx.URL(f"http://sandboxes{path}"))).status_code == 404, path
            base = f"/v1/sandboxes/{sandbox.sandbox_id}"
            assert (await client.get(f"{base}/files", params={"path": "a\0b"})).status_code == 400
            assert (await client.get(f"{base}/files?path=a&path=b")).status_code == 400
            assert (await client.put(f"{base}/sessions/..%2f..")).status_code in (400, 404)
            assert (await client.get("/v1/sandboxes/..%2f..%2fetc")).status_code == 404
        with pytest.raises(SandboxFileError):
            await sandbox.read("nowhere")


async def test_what_a_client_sends_does_not_get_into_headers(tmp_path):
    async with (
        running(tmp_path) as world,
        world.client.acquire(SPEC) as sandbox,
        bare(world, **bearer(TOKEN)) as client,
    ):
        evil = quote(EVIL, safe="")
        every = places(world.service, id=evil, name=evil, job=evil, snapshot=evil)
        every += places(world.service, id=sandbox.sandbox_id, name=evil, job=evil, key=evil)
        for path in every:
            for method in ("GET", "PATCH"):
                answer = await client.request(method, f"http://sandboxes{path}?path={evil}")
                assert "set-cookie" not in answer.headers
                if answer.status_code >= 400:
                    assert answer.headers["content-type"] == "application/problem+json"
                    assert msgspec.json.decode(answer.content)["status"] == answer.status_code
        await sandbox.write(EVIL, b"content")
        got = await client.get(f"/v1/sandboxes/{sandbox.sandbox_id}/files", params={"path": EVIL})
        assert (got.content, got.headers["content-disposition"]) == (b"content", "attachment")
        order = {"idempotency-key": "a b;c", "content-type": "application/json"}
        answer = await client.post("/v1/sandboxes", content=b'{"spec":{"image":"any"}}', headers=order)
        assert answer.status_code == 400


@pytest.mark.parametrize(
    "line",
    ["x: y\nz: a\r\n b", "x\ny: z", "x: \0", "content-length: 1\r\ncontent-length: 2", "host: other", "x y: z"],
)
async def test_a_head_that_can_be_read_in_two_ways_is_refused(tmp_path, line):
    async with running(tmp_path) as world, connected(world) as connection:
        await connection.stream.send(head("POST", "/v1/sandboxes", "content-type: application/json", line))
        await connection.until(b"HTTP/1.1 400 ")
        assert world.pool.state.leases.all() == []


async def test_a_log_has_one_line_per_record_and_no_token(tmp_path, caplog):
    """What clients, sandboxes and images say cannot look like another record."""
    caplog.set_level(logging.DEBUG)
    async with running(tmp_path) as world, bare(world, **bearer(TOKEN)) as client:
        world.backend.faults.start = SandboxError(f"the engine says: {EVIL}\x1b[2J")
        order = msgspec.json.encode({"spec": {"image": "broken"}})
        json = {"content-type": "application/json"}
        assert (await client.post("/v1/sandboxes?wait=10", content=order, headers=json)).status_code == 201
        world.backend.faults.start = None
        await client.get(f"http://sandboxes/{quote(EVIL)}?token={TOKEN}")
        async with world.client.acquire(SPEC) as sandbox:
            await sandbox.run(["echo", EVIL], timeout=10)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLine())
    records = [record for record in caplog.records if record.name.startswith(("envs", "uvicorn"))]
    for record in records:
        handler.handle(record)
    assert any("the engine says" in record.getMessage() for record in records)
    assert len(stream.getvalue().splitlines()) == len(records)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", stream.getvalue())
    assert TOKEN not in stream.getvalue()


async def test_tokens_are_shown_nowhere(tmp_path):
    async with (
        running(tmp_path) as world,
        world.client.acquire(SPEC) as sandbox,
        bare(world, **bearer(TOKEN)) as client,
    ):
        said = await sandbox.run("cat /proc/self/environ /proc/$PPID/environ /proc/$PPID/cmdline", timeout=10)
        assert TOKEN.encode() not in said.stdout
        for path in places(world.service, id=sandbox.sandbox_id):
            for token in (TOKEN, OTHER_TOKEN):
                assert token not in (await client.get(path)).text, path


def test_no_option_takes_a_token():
    """Arguments can be read by everybody on the machine; files and the environment cannot."""
    parser = argparse.ArgumentParser()
    sandboxcli.add_sandbox(parser.add_subparsers())
    options: set[str] = set()
    todo = [parser]
    while todo:
        for action in todo.pop()._actions:
            if isinstance(action, argparse._SubParsersAction):
                todo += action.choices.values()
            options |= {option for option in action.option_strings if "token" in option or "secret" in option}
    assert options == {"--token-file"}


async def test_bodies_are_checked_and_bounded(tmp_path):
    limits = HttpLimits(body_bytes=100_000)
    async with running(tmp_path, limits=limits) as world, world.client.acquire(SPEC) as sandbox:
        base = f"/v1/sandboxes/{sandbox.sandbox_id}"
        async with bare(world, **bearer(TOKEN)) as client:

            async def endless():
                for _ in range(1000):
                    yield b"x" * 10_000

            for body in (b"x" * 200_000, endless()):
                answer = await client.put(f"{base}/files", params={"path": "f"}, content=body)
                assert answer.status_code == 413
                assert answer.headers["content-type"] == "application/problem+json"
            json = {"content-type": "application/json"}
            for body, status in (
                (b"{", 400),
                (b"[" * 90_000, 400),
                (b'{"command":"x","timeout":1,"more":2}', 400),
                (b'{"command":"x","timeout":-1}', 400),
                (b'{"command":"x","timeout":1e300}', 400),
                (b"\xff\xfe", 400),
            ):
                assert (await client.post(f"{base}/run", content=body, headers=json)).status_code == status, body[:20]
            wrong = await client.post(f"{base}/run", content=b"x", headers={"content-type": "text/plain"})
            assert wrong.status_code == 415
            assert (await client.patch(f"{base}/run")).status_code == 405
        with pytest.raises(SandboxLimitError):
            await sandbox.write("f", b"x" * 200_000)
        assert (await sandbox.run("true", timeout=10)).ok


async def test_a_damaged_or_hostile_archive_is_refused(tmp_path):
    async with (
        running(tmp_path) as world,
        world.client.acquire(SPEC) as sandbox,
        bare(world, **bearer(TOKEN)) as client,
    ):
        path = f"/v1/sandboxes/{sandbox.sandbox_id}/tree"
        answer = await client.put(path, params={"path": "t"}, content=b"no tar" * 500)
        assert (answer.status_code, answer.json()["cause"]) == (404, "SandboxFileError")


@pytest.mark.parametrize("image", ["", "x" * 256, f"any{EVIL}", "a\x1b[2Jb", "-v", "any\n", "a b"])
async def test_no_name_of_an_image_is_accepted_that_an_engine_could_not_have(tmp_path, image):
    async with running(tmp_path) as world, bare(world, **bearer(OTHER_TOKEN)) as client:
        answer = await client.post("/v1/sandboxes", json={"spec": {"image": image}})
        assert (answer.status_code, answer.json()["cause"]) == (400, "SandboxRefusedError")
        longest = await client.post("/v1/sandboxes", json={"spec": {"image": f"a/b_c.d-e:{'f' * 245}"}})
        assert longest.status_code == 201


async def test_ls_prints_one_harmless_line_for_each_sandbox(tmp_path, capsys, monkeypatch):
    """Also of a service whose host has a name that would command the terminal."""
    monkeypatch.setenv("FLASH_SANDBOX_TOKEN", TOKEN)
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        world.service.pool.state.leases.of(sandbox.sandbox_id).host = "\x1b[2Jhost\nadmin"
        arguments = argparse.Namespace(url=world.url, token_file=tmp_path / "none", ca=None)
        assert await sandboxcli._list(arguments) == 0
    assert capsys.readouterr().out == f"{sandbox.sandbox_id}  ready  admin  \\x1b[2Jhost\\nadmin  any\n"
