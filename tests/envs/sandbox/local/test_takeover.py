"""Another host takes a sandbox over, and its programs neither hinder that nor learn from it."""

from __future__ import annotations

from contextlib import aclosing

import anyio
import pytest

from envs.sandbox.api import Chunk
from envs.sandbox.engines.docker import takeover_environment
from envs.sandbox.local.sandbox import LocalSandbox
from flash.errors import SandboxError, SandboxLostError

pytestmark = [pytest.mark.anyio, pytest.mark.integration]

LIMIT = 20.0
CONTAINERS = pytest.mark.parametrize("kind", [pytest.param("containers")])

WATCH = r"""
import os, signal, time
print("watching", flush=True)
known = {os.getpid(), 1}
def look(pid):
    for name in ("fd/0", "mem", "environ"):
        os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_NONBLOCK))
end = time.monotonic() + 60
while time.monotonic() < end:
    for pid in {int(name) for name in os.listdir("/proc") if name.isdigit()} - known:
        for act in (lambda: os.kill(pid, signal.SIGSTOP), lambda: look(pid), lambda: os.listdir(f"/proc/{pid}/fd")):
            try:
                act()
                print("reached", flush=True)
            except OSError:
                continue
"""
"""Stops and reads every process that appears."""
PLANT = r"""
mkdir -p bin
printf '#!/bin/sh\necho planted >>/work/planted; exec /usr/bin/python3 "$@"' >bin/python3
chmod +x bin/python3
"""
RELAYS = "for p in /proc/[0-9]*; do [ $(stat -c %u $p) != 0 ] || [ $p = /proc/1 ] || echo ${p#/proc/}; done"


@CONTAINERS
@pytest.mark.parametrize("profile", ["strict", "build"])
async def test_no_program_reaches_the_process_by_which_a_host_takes_over(bench, profile):
    async with bench.sandbox(profile=profile, env={"PATH": "/work/bin:/usr/bin:/bin"}) as first:
        assert (await first.run(PLANT, timeout=LIMIT)).ok
        async with aclosing(first.stream(["/usr/bin/python3", "-c", WATCH], timeout=60)) as watching:
            assert isinstance(await anext(watching), Chunk)
            with anyio.fail_after(LIMIT):
                async with LocalSandbox(bench.backend, first.spec, adopt=first.container_id) as second:
                    pids = (await second.run(RELAYS, timeout=LIMIT)).stdout.split()
                    # The host before tries to join again, and may have one of its own.
                    assert pids
                    for pid in pids:
                        status = (await second.run(["cat", f"/proc/{int(pid)}/status"], timeout=LIMIT)).stdout
                        assert b"Uid" not in status or b"\nUid:\t0\t0\t0\t0\n" in status
                        assert b"CapEff" not in status or b"\nCapEff:\t0000000000000000\nCapBnd:\t00000" in status
                    assert not (await second.run(["test", "-e", "planted"], timeout=LIMIT)).ok


@CONTAINERS
async def test_a_sandbox_whose_programs_may_be_root_is_not_taken_over(bench):
    async with bench.sandbox(profile="compat") as first:
        assert (await first.run("true", timeout=LIMIT)).ok
        with pytest.raises(SandboxError, match="ends with the process that controls it"):
            async with LocalSandbox(bench.backend, first.spec, adopt=first.container_id):
                pass
        with anyio.fail_after(LIMIT):
            await first.wait_ended()


@CONTAINERS
async def test_a_broken_link_to_such_a_sandbox_ends_it(bench):
    async with bench.sandbox(profile="compat") as sandbox:
        sandbox._channel._link._stream._resp.connection.transport.abort()
        with anyio.fail_after(LIMIT):
            await sandbox.wait_ended()
        assert sandbox.state == "lost"


def test_the_relay_has_no_variable_of_the_sandbox_and_no_folder_that_it_can_write_to():
    env = ["PATH=/work/bin:/opt/x/bin:bin:/tmp/../tmp/b:/work:/usr/bin", "LD_PRELOAD=/work/x.so", "HOME=/work"]
    container = {"Config": {"User": "1000:1000", "Env": env, "WorkingDir": "/work"}, "HostConfig": {}}
    fixed = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert takeover_environment(container) == {"PATH": fixed, "LD_PRELOAD": "", "HOME": "/"}
    container["HostConfig"] = {"ReadonlyRootfs": True}
    assert takeover_environment(container)["PATH"] == f"{fixed}:/opt/x/bin:/usr/bin"
    for user in ("", "0", "root", "root:root", "0:0"):
        container["Config"]["User"] = user
        with pytest.raises(SandboxLostError, match="may be root"):
            takeover_environment(container)
