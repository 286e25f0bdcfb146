"""Images without Python get the honest subset: what works is right, what does not is refused by name."""

from __future__ import annotations

import pytest

from flash.errors import SandboxFileError, SandboxLimitError, SandboxLostError, SandboxRefusedError
from tests.envs.sandbox.conftest import MINIMAL_IMAGE

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("kind", [pytest.param("containers", marks=pytest.mark.integration)]),
]

LIMIT = 30.0


async def test_commands_are_told_as_they_were(bench):
    async with bench.sandbox(image=MINIMAL_IMAGE, output_limit=1024) as sandbox:
        assert sandbox.hello.kind == "shell"
        answer = await sandbox.run("echo out; echo err >&2; exit 3", timeout=LIMIT)
        assert (answer.exit_code, answer.stdout, answer.stderr) == (3, b"out\n", b"err\n")
        assert (await sandbox.run(["echo", "a  b", "$HOME"], timeout=LIMIT)).stdout == b"a  b $HOME\n"
        told = await sandbox.run("pwd; echo $X; cat", cwd="/tmp", env={"X": "it's"}, stdin=b"\0\xff", timeout=LIMIT)
        assert told.stdout == b"/tmp\nit's\n\0\xff"
        big = await sandbox.run("head -c 100000000 /dev/zero; echo END 0 0 0 0 >&2", timeout=60)
        assert (big.exit_code, len(big.stdout), big.stdout_truncated) == (0, 1024, True)
        assert (big.stderr, big.stderr_truncated) == (b"END 0 0 0 0\n", False)
        assert (await sandbox.run("sleep 300 & echo started", timeout=LIMIT)).stdout == b"started\n"
        slow = await sandbox.run("trap '' TERM; echo part; sleep 301 & while true; do sleep 1; done", timeout=1)
        assert (slow.timed_out, slow.exit_code, slow.stdout) == (True, 137, b"part\n")
        assert b"sleep 30" not in (await sandbox.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=LIMIT)).stdout
        await sandbox.run("kill -9 -1; kill -9 1; echo on", timeout=LIMIT)
        assert (await sandbox.run("echo on", timeout=LIMIT)).stdout == b"on\n"


async def test_output_that_nobody_read_is_not_told_as_the_next_command_s(bench):
    async with bench.sandbox(image=MINIMAL_IMAGE) as sandbox:
        held = "exec 3<>/tmp/.flash-agent/o; setsid sleep 300 & sleep 1"
        await sandbox.run(f"kill -9 -1; {held}; echo unread", timeout=LIMIT)
        answer = await sandbox.run("echo on", timeout=LIMIT)
        assert (answer.exit_code, answer.stdout) == (0, b"on\n")


async def test_files_are_read_and_written(bench):
    data = bytes(range(256)) * 1000
    async with bench.sandbox(image=MINIMAL_IMAGE) as sandbox:
        await sandbox.write("deep/file", data, mode=0o600)
        assert await sandbox.read("deep/file") == data
        assert await sandbox.read("deep/file", offset=250, limit=10) == data[250:260]
        await sandbox.write("deep/file", b"more", append=True)
        assert await sandbox.read("deep/file", offset=len(data)) == b"more"
        for path in ("missing", "deep", "/dev/zero"):
            with pytest.raises(SandboxFileError):
                await sandbox.read(path)


async def test_what_a_shell_cannot_do_is_refused(bench, tmp_path):
    async with bench.sandbox(image=MINIMAL_IMAGE) as sandbox:
        with pytest.raises(SandboxRefusedError, match="no Python"):
            async with sandbox.session():
                pass
        with pytest.raises(SandboxRefusedError, match="no Python"):
            await sandbox.start("true")
        with pytest.raises(SandboxRefusedError, match="no Python"):
            await sandbox.list()
        assert (await sandbox.run("echo on", timeout=LIMIT)).stdout == b"on\n"


async def test_where_there_is_no_room_no_command_seems_to_have_succeeded(bench):
    async with bench.sandbox(image=MINIMAL_IMAGE) as sandbox:
        commands = ["head -c 1000000000 /dev/zero >/tmp/x; echo out", "echo on", "true " + "x" * 9000]
        for command in commands:
            with pytest.raises(SandboxLimitError, match="no room for the command or its output"):
                await sandbox.run(command, timeout=60)
        assert (await sandbox.run("rm /tmp/x", timeout=LIMIT)).ok
        assert (await sandbox.run("echo on", timeout=LIMIT)).stdout == b"on\n"


async def test_a_short_command_is_answered_at_once(bench):
    async with bench.sandbox(image=MINIMAL_IMAGE) as sandbox:
        assert sorted([(await sandbox.run("exit 3", timeout=LIMIT)).wall_s for _ in range(5)])[2] < 0.5


async def test_a_command_that_answers_for_the_agent_deceives_nobody(bench):
    """It can write where the agent does. Then its sandbox is lost: no other command gets that answer."""
    async with bench.sandbox(image=MINIMAL_IMAGE) as sandbox:
        forged = "for fd in /proc/1/fd/*; do printf 'END 0 0 3 0\\nyes' >$fd; done 2>/dev/null; exit 5"
        for command, right in ((forged, 5), ("exit 6", 6), ("exit 7", 7)):
            try:
                answer = await sandbox.run(command, timeout=LIMIT)
            except SandboxLostError:
                continue
            assert (answer.exit_code, answer.stdout) == (right, b"")


STAYS = """
(setsid sh -c '
while true; do
  echo forged
  for out in /tmp/.flash-agent/o /proc/1/fd/1; do [ -e $out ] && echo forged >$out; done
  for p in $(pidof sleep); do kill -9 $p; done
done' >/dev/null 2>&1 &)
sleep 0.3 & wait
"""
"""Detaches itself, writes where the next command's output goes, and ends what that runs."""


async def test_what_a_command_leaves_behind_does_not_answer_for_the_next(bench):
    async with bench.sandbox(image=MINIMAL_IMAGE) as sandbox:
        for number in range(5):
            await sandbox.run(STAYS, timeout=LIMIT)
            answer = await sandbox.run(f"sleep 0.3; echo mine; exit {number}", timeout=LIMIT)
            assert (answer.exit_code, answer.stdout) == (number, b"mine\n")
        assert b"forged" not in (await sandbox.run("cat /proc/[0-9]*/cmdline", timeout=LIMIT)).stdout


async def test_a_command_reads_neither_the_memory_nor_the_descriptors_of_the_shell_that_runs_it(bench):
    async with bench.sandbox(image=MINIMAL_IMAGE) as sandbox:
        look = "ls /proc/1/fd; cat /proc/1/environ; head -c 1 /proc/1/mem; echo x >/proc/1/fd/1; ls -A /tmp"
        answer = await sandbox.run(look, timeout=LIMIT)
        assert answer.stdout == b".flash-agent\n"
        assert answer.stderr.count(b"ermission denied") >= 3
