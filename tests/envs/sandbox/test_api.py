"""The interfaces that every sandbox has, and the one form of a command."""

from __future__ import annotations

import inspect
import os
from argparse import Namespace
from typing import Any

import msgspec
import pytest

from envs.sandbox import api, sandbox
from envs.sandbox.api import Exec
from envs.sandbox.cli import _service_id, _spec, _warm
from envs.sandbox.engines import profiles
from envs.sandbox.text import clipped, from_wire, to_wire
from envs.sandbox.trees import TreeLimits
from flash.errors import ConfigError, SandboxRefusedError, SandboxTimeoutError
from tests.envs.sandbox.raw import bare, bearer
from tests.envs.sandbox.services import SPEC, running

INTERFACES = [
    kind
    for module in (api, sandbox)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if kind.__module__ == module.__name__
    if getattr(kind, "_is_protocol", False) or (module is sandbox and issubclass(sandbox.Sandbox, kind))
]


@pytest.mark.parametrize("interface", INTERFACES, ids=lambda interface: interface.__name__)
def test_no_interface_asks_for_more_than_six_things_of_its_own(interface):
    own = [name for name, member in vars(interface).items() if callable(member) or isinstance(member, property)]
    assert len([name for name in own if not name.startswith("_")]) <= 6, own


class Dull(sandbox.Sandbox):
    """A kind of sandbox that can do nothing."""

    sandbox_id, spec, state = "dull", SPEC, "ready"

    async def wait_ended(self) -> None: ...

    async def close(self) -> None: ...


@pytest.mark.anyio
async def test_a_kind_of_sandbox_must_have_an_identity_and_an_end_and_refuses_what_it_cannot_do(tmp_path):
    assert sandbox.Sandbox.__abstractmethods__ == {"sandbox_id", "spec", "state", "wait_ended", "close"}
    dull, file = Dull(), tmp_path / "file"
    file.write_bytes(b"")
    for name, call in {
        "run": lambda: dull.run("true", timeout=1.0),
        "start": lambda: dull.start("true"),
        "read": lambda: dull.read("f"),
        "write": lambda: dull.write("f", b""),
        "list": lambda: dull.list(),
        "remove": lambda: dull.remove("f"),
        "put_archive": lambda: dull.upload(file, "f"),
        "get_archive": lambda: dull.download("f", tmp_path / "new"),
        "snapshot": lambda: dull.snapshot(),
        "fork": lambda: dull.fork(1),
    }.items():
        with pytest.raises(SandboxRefusedError, match=f"`{name}`"):
            await call()
    for name, held in {"session": dull.session, "terminal": lambda: dull.terminal("true")}.items():
        with pytest.raises(SandboxRefusedError, match=f"`{name}`"):
            async with held():
                pass
    with pytest.raises(SandboxRefusedError, match="`stream`"):
        async for _ in dull.stream("true", timeout=1.0):
            pass


class Slow(Dull):
    """A sandbox that answers no transfer in time."""

    async def put_archive(self, path, pieces, size=None):
        raise SandboxTimeoutError("waited for it")

    async def get_archive(self, path, limits):
        raise SandboxTimeoutError("waited for it")
        yield b""


@pytest.mark.anyio
async def test_a_transfer_that_takes_too_long_is_not_taken_for_a_full_disk(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SandboxTimeoutError, match="waited for it"):
        await Slow().upload(tmp_path / "file", "f")
    with pytest.raises(SandboxTimeoutError, match="waited for it"):
        await Slow().download("f", tmp_path / "new")


@pytest.mark.anyio
async def test_a_source_that_cannot_be_uploaded_is_no_fault_of_the_sandbox(tmp_path):
    class Small(Dull):
        tree_limits = TreeLimits(entries=1)

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "full").mkdir()
    for name in "ab":
        (tmp_path / "full" / name).touch()
    for name, fault in (("missing", "No such file"), ("pipe", "neither a file"), ("full", "more than 1 entries")):
        with pytest.raises(SandboxRefusedError, match=fault):
            await Small().upload(tmp_path / name, "f")


def test_a_wrong_variable_is_refused_with_its_fault():
    for env, fault in (({"a=b": ""}, "'a=b' cannot be the name"), ({"A": "x\0"}, "'A' has a zero byte")):
        with pytest.raises(SandboxRefusedError, match=fault):
            profiles.check(api.Spec(image="any", env=env))


def test_warm_sandboxes_have_an_image_and_a_number():
    assert _warm("localhost:5000/a:b=2") == (api.Spec(image="localhost:5000/a:b"), 2)
    for text, fault in (("a b=2", "'a b' cannot be the name of an image"), ("a=-1", "expected IMAGE=NUMBER")):
        with pytest.raises(ConfigError, match=fault):
            _warm(text)


def test_a_service_keeps_its_id_and_never_begins_with_an_empty_one(tmp_path):
    first = _service_id(tmp_path)
    assert first
    assert _service_id(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == ["service"]
    (tmp_path / "service").write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        _service_id(tmp_path)


def test_a_command_keeps_bytes_that_are_no_text_on_its_way():
    name = os.fsdecode(b"\xff")
    sent = Exec(command=["cat", name], timeout=1.0, env={name: name}, cwd=name)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.converted(to_wire)), type=Exec)
    assert received.converted(from_wire) == msgspec.structs.replace(sent, command=["cat", name])


@pytest.mark.anyio
async def test_a_command_without_a_timeout_cannot_be_waited_for(tmp_path):
    missing: Any = None
    async with running(tmp_path) as world, world.client.acquire(SPEC) as remote, world.pool.acquire(SPEC) as leased:
        for each in (remote, leased):
            with pytest.raises(SandboxRefusedError, match="a timeout is a number of seconds"):
                await each.run("true", timeout=missing)
            with pytest.raises(SandboxRefusedError, match="a timeout is a number of seconds"):
                async for _ in each.stream("true", timeout=missing):
                    pass
            async with each.session() as session:
                with pytest.raises(SandboxRefusedError, match="a timeout is a number of seconds"):
                    await session.run("true", timeout=missing)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"timeout": float("nan")}, "number of seconds, above 0 .* not nan"),
        ({"timeout": float("inf")}, "not inf"),
        ({"timeout": "5"}, "not '5'"),
        ({"timeout": True}, "not True"),
        ({"timeout": -1.0}, "not -1.0"),
        ({"env": {"PATH": ...}}, "'PATH' is Ellipsis"),
        ({"env": {"PATH": None}}, "'PATH' is None"),
        ({"env": {3: "x"}}, "3 is 'x'"),
        ({"env": {"A=B": "x"}}, "'A=B' cannot be the name"),
        ({"command": []}, "at least one word"),
        ({"command": ["ls", 3]}, "at least one word"),
        ({"command": None}, "a command is text"),
    ],
)
def test_a_command_that_no_agent_could_run_is_refused_where_it_is_made(wrong, says):
    with pytest.raises(SandboxRefusedError, match=says):
        Exec(**{"command": "true", "timeout": 1.0, **wrong})


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("run", {"command": "true"}, "missing required field `timeout`"),
        ("stream", {"command": "true"}, "missing required field `timeout`"),
        ("jobs", {"command": "cat", "stdin": "eA=="}, "a job has no `stdin`"),
        ("run", {"command": "true", "timeout": 0}, "Expected `float` > 0.0"),
        ("run", {"command": "true", "timeout": 1, "cwd": ""}, "length >= 1"),
        ("run", {"command": "true", "timeout": 1, "more": 1}, "unknown field `more`"),
    ],
)
async def test_the_service_refuses_a_command_that_lacks_or_has_what_it_may_not(tmp_path, path, body, says):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox, bare(world, **bearer()) as client:
        answer = await client.post(f"/v1/sandboxes/{sandbox.sandbox_id}/{path}", json=body)
        assert answer.status_code == 400
        assert says in answer.json()["detail"]
        assert answer.json()["cause"] == "SandboxRefusedError"


@pytest.mark.parametrize(("option", "value"), [("cpus", 0.0), ("memory", -1), ("runtime", "-")])
def test_a_wrong_value_of_a_sandbox_is_reported_with_its_option(option, value):
    given = {"image": "x", "profile": "strict", "cpus": 1.0, "memory": 512, "network": "none", "runtime": None}
    with pytest.raises(ConfigError, match=f"at `--{option}`"):
        _spec(Namespace(**{**given, option: value}))


@pytest.mark.parametrize("most", range(6))
def test_a_clipped_text_shows_no_more_than_its_halves(most):
    first, _, last = clipped("abcdef", most).split("\n")
    half = most // 2
    assert (first, last) == ("abcdef"[:half], "abcdef"[6 - half :])
