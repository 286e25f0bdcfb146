"""The truthfulness probes: each has the right answer, and leaves a sandbox and a session that still work."""

from __future__ import annotations

from contextlib import aclosing

import anyio
import pytest

from envs.sandbox.api import Chunk, Result, Spec
from envs.sandbox.engines.fake import FakeBackend
from envs.sandbox.local.sandbox import LocalSandbox
from flash.errors import SandboxBusyError, SandboxLostError

pytestmark = pytest.mark.anyio

LIMIT = 20.0
"""Seconds for commands that end by themselves; long, because the machine may be busy."""


async def works(sandbox, session=None):
    """The sandbox, and the session, answer rightly."""
    answer = await sandbox.run("echo right; exit 7", timeout=LIMIT)
    assert (answer.exit_code, answer.stdout) == (7, b"right\n")
    if session is not None:
        answer = await session.run("echo right; (exit 7)", timeout=LIMIT)
        assert (answer.exit_code, answer.stdout) == (7, b"right\n")
    return True


async def test_a_heredoc_and_the_command_after_it_are_two_commands(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        first = await session.run("cat <<END\n$((1 + 1)) lines\nEND", timeout=LIMIT)
        second = await session.run("echo after", timeout=LIMIT)
        open_one = await session.run("cat <<END\nnever closed", timeout=LIMIT)
        after = await session.run("echo still here", timeout=LIMIT)
        assert (first.exit_code, first.stdout) == (0, b"2 lines\n")
        assert (second.exit_code, second.stdout) == (0, b"after\n")
        assert open_one.stdout == b"never closed\n"
        assert (after.exit_code, after.stdout) == (0, b"still here\n")


async def test_exit_gives_its_code_and_the_session_goes_on(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        await session.run("cd /; kept=yes; say() { echo said $1; }; export OUT=1", timeout=LIMIT)
        ended = await session.run("lost=yes; exit 3", timeout=LIMIT)
        assert (ended.exit_code, ended.signal, ended.timed_out) == (3, None, False)
        assert session.restarts == 1
        after = await session.run('pwd; say $kept; echo "$lost"; env | grep ^OUT', timeout=LIMIT)
        assert after.stdout == b"/\nsaid yes\n\nOUT=1\n"
        assert after.stderr == b""


async def test_set_e_and_a_failure_give_the_failure_and_the_session_goes_on(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        failed = await session.run("set -e; false; echo never", timeout=LIMIT)
        assert (failed.exit_code, failed.stdout) == (1, b"")
        assert await works(sandbox, session)


SPOILING = (
    "readonly PWD OLDPWD IFS",
    'for i in $(seq 20000); do eval "v$i=$i"; done',
    "printf() { :; }; read() { :; }; eval() { :; }; unset() { :; }",
    "builtin() { echo no; }",
    "ulimit -v 100000; ulimit -n 10",
)
"""Commands that change their shell, each of which gets a session of its own."""


async def test_what_a_command_does_to_its_shell_costs_the_next_one_nothing(bench):
    async with bench.sandbox() as sandbox:
        for said in SPOILING:
            async with sandbox.session() as shell:
                await shell.run(said, timeout=5)
                assert (await shell.run("echo on", timeout=LIMIT)).stdout == b"on\n", said
                assert (await shell.run("exit 3", timeout=LIMIT)).exit_code == 3, said
                assert (await shell.run("echo on", timeout=LIMIT)).stdout == b"on\n", said


async def test_an_unset_variable_and_a_syntax_error_do_not_end_the_session(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        assert (await session.run("set -u; echo $nosuch", timeout=LIMIT)).exit_code != 0
        broken = await session.run("echo 'unclosed", timeout=LIMIT)
        assert broken.exit_code == 2
        assert b"unexpected EOF" in broken.stderr
        assert await works(sandbox, session)


async def test_a_break_outside_of_a_loop_skips_nothing(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        for word in ("break", "continue", "break 3", "continue 2"):
            for runner in (sandbox, session):
                answer = await runner.run(f"{word}; echo on; (exit 4)", timeout=LIMIT)
                assert (answer.exit_code, answer.stdout) == (4, b"on\n"), word
                assert b"only meaningful in a" in answer.stderr
            assert await works(sandbox, session), word


BROKEN = ("'", '"', "`", "(", ")", "{", "}", "((", "[[", "$(", "${x", "if", "for x", "case x in", "x() {", "cat <<X\na")


async def test_what_is_left_open_in_one_command_is_no_part_of_the_next(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        for text in BROKEN:
            await session.run(text, timeout=LIMIT)
            assert await works(sandbox, session), text


async def test_the_status_of_a_command_is_seen_by_the_next(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        assert (await session.run("(exit 42)", timeout=LIMIT)).exit_code == 42
        assert (await session.run("echo $?", timeout=LIMIT)).stdout == b"42\n"


async def test_a_hundred_megabytes_of_output_are_cut_in_the_middle(bench):
    command = "echo begin; head -c 100000000 /dev/zero; echo end; echo complaint >&2"
    async with bench.sandbox(output_limit=1 << 16) as sandbox, sandbox.session() as session:
        for runner in (sandbox, session):
            answer = await runner.run(command, timeout=60)
            assert answer.exit_code == 0
            assert len(answer.stdout) == 1 << 16
            assert answer.stdout.startswith(b"begin\n\0")
            assert answer.stdout.endswith(b"\0end\n")
            assert answer.stdout_truncated
            assert (answer.stderr, answer.stderr_truncated) == (b"complaint\n", False)
        assert await works(sandbox, session)


async def test_output_like_a_frame_or_an_answer_is_output(bench):
    """Frames of the agent, its greeting, tokens and prompts, on every descriptor that a command has."""
    frames = (
        r"printf '\000\000\000\012\377\377\377\377\223\001\000\300PS1=$ SHELLPS1PREFIX\n0123456789abcdef python 00\n'"
    )
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        for runner in (sandbox, session):
            answer = await runner.run(f"{frames}; {frames} >&2; exec 9>&1; {frames} >&9", timeout=LIMIT)
            assert answer.exit_code == 0
            assert answer.stdout.count(b"SHELLPS1PREFIX") == 2
            assert answer.stderr.count(b"\xff\xff\xff\xff") == 1
        forged = "for fd in /proc/$$/fd/*; do printf 'aaaa\\0000\\0/\\0x\\000' > $fd; done 2>/dev/null; (exit 5)"
        assert (await session.run(forged, timeout=LIMIT)).exit_code == 5
        assert await works(sandbox, session)
        forged = "for fd in /proc/$$/fd/*; do printf 'aaaa' > $fd; done 2>/dev/null; (exit 5)"
        assert (await session.run(forged, timeout=LIMIT)).exit_code == 5
        assert await works(sandbox, session)


async def test_a_command_that_ignores_sigterm_is_killed_in_time_with_what_it_wrote(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        for runner in (sandbox, session):
            answer = await runner.run("trap '' TERM; echo part; while true; do sleep 1; done", timeout=0.5)
            assert answer.timed_out
            assert answer.exit_code is None
            assert answer.signal == "SIGKILL"
            assert answer.stdout == b"part\n"
        assert await works(sandbox, session)


async def test_a_timeout_gives_time_to_clean_up_and_then_kills_the_whole_group(bench):
    async with bench.sandbox() as sandbox:
        polite = await sandbox.run("trap 'echo bye; exit 9' TERM; echo hi; sleep 300 & wait", timeout=0.5)
        assert (polite.timed_out, polite.exit_code, polite.stdout) == (True, 9, b"hi\nbye\n")
        await sandbox.run("sleep 301 & setsid sleep 302 & (setsid sleep 303 &) ; sleep 304", timeout=0.5)
        left = await sandbox.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=LIMIT)
        assert not [n for n in range(300, 305) if f"sleep {n}".encode() in left.stdout]


async def test_two_concurrent_commands_of_a_session_run_one_after_the_other(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        answers = {}

        async def ask(name: str) -> None:
            answers[name] = await session.run(f"echo {name}; sleep 0.1; echo {name}", timeout=LIMIT)

        async with anyio.create_task_group() as tasks:
            for name in ("one", "two", "three"):
                tasks.start_soon(ask, name)
        for name, answer in answers.items():
            assert answer.stdout == f"{name}\n{name}\n".encode()


async def test_commands_outside_of_sessions_run_at_the_same_time(bench):
    async with bench.sandbox() as sandbox:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: sandbox.run("while [ ! -e b ]; do sleep 0.01; done; touch a", timeout=LIMIT))
            answer = await sandbox.run("touch b; while [ ! -e a ]; do sleep 0.01; done; echo met", timeout=LIMIT)
        assert answer.stdout == b"met\n"


async def test_a_command_that_never_gets_its_turn_is_answered_in_its_time(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: session.run("sleep 3", timeout=LIMIT))
        await anyio.sleep(0.2)
        with pytest.raises(SandboxBusyError, match="busy with other commands"):
            await session.run("echo late", timeout=0.3)


async def test_bytes_that_are_no_text_come_as_they_are(bench):
    everything = bytes(range(256))
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        await sandbox.write("bytes", everything)
        assert await sandbox.read("bytes") == everything
        for runner in (sandbox, session):
            assert (await runner.run("cat bytes; cat bytes >&2", timeout=LIMIT)).stdout == everything
        assert (await sandbox.run(["cat"], stdin=everything, timeout=LIMIT)).stdout == everything
        name = b"\xff\xfe".decode("utf-8", "surrogateescape")
        assert (await sandbox.run(["printf", "%s", name], timeout=LIMIT)).stdout == b"\xff\xfe"


async def test_a_background_child_that_holds_the_pipe_does_not_hold_the_answer(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        answer = await sandbox.run("sleep 300 & echo started", timeout=LIMIT)
        assert (answer.exit_code, answer.stdout, answer.timed_out) == (0, b"started\n", False)
        assert answer.wall_s < LIMIT
        answer = await session.run("sleep 300 & echo started", timeout=LIMIT)
        assert (answer.exit_code, answer.stdout) == (0, b"started\n")
        assert (await session.run("kill %1 && wait %1; echo $?", timeout=LIMIT)).stdout == b"143\n"


@pytest.mark.parametrize("jump", [86400.0 * 365, -86400.0 * 365])
async def test_a_jump_of_the_clock_changes_no_deadline(jump, monkeypatch):
    prelude = f"import time\n_real = time.time\ntime.time = lambda: _real() + {jump} * (_real() % 2 > 1)\n"
    monkeypatch.setattr("time.time", lambda: 0.0)
    async with FakeBackend(prelude=prelude) as backend, LocalSandbox(backend, Spec(image="any")) as sandbox:
        answer = await sandbox.run("sleep 1.2; echo done", timeout=LIMIT)
        assert (answer.stdout, answer.timed_out) == (b"done\n", False)
        assert 1.0 < answer.wall_s < LIMIT
        assert (await sandbox.run("sleep 100", timeout=0.3)).timed_out


async def test_a_killed_agent_ends_every_call_and_the_sandbox_says_that_it_is_lost(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        errors = []

        async def expect_loss(call) -> None:
            with pytest.raises(SandboxLostError) as error:
                await call
            errors.append(error.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expect_loss, sandbox.run("sleep 100", timeout=200))
            tasks.start_soon(expect_loss, session.run("sleep 100", timeout=200))
            await anyio.sleep(0.3)
            await bench.backend.containers.kill(sandbox.container_id)
        assert len(errors) == 2
        await sandbox.wait_ended()
        assert sandbox.state == "lost"
        for call in (sandbox.run("true", timeout=1), session.run("true", timeout=1), sandbox.read("x")):
            with pytest.raises(SandboxLostError, match=r"exit code|removed"):
                await call


@pytest.mark.parametrize("kind", [pytest.param("containers", marks=pytest.mark.integration)])
class TestOnlyInContainers:
    """Probes that would hurt this machine."""

    async def test_the_agent_cannot_be_killed_from_inside(self, bench):
        async with bench.sandbox() as sandbox:
            for attack in (
                "kill -9 1",
                "kill -9 -1",
                "kill -STOP 1; kill -TERM 1; kill -SEGV 1",
                "pkill -9 python3; true",
            ):
                await sandbox.run(attack, timeout=LIMIT)
                assert await works(sandbox)

    async def test_a_fork_bomb_is_stopped_and_forgotten(self, bench):
        async with bench.sandbox(pids=64) as sandbox:
            answer = await sandbox.run(":(){ :|:& };:; sleep 60", timeout=2)
            assert answer.timed_out or answer.exit_code is not None
            assert await works(sandbox)
            async with sandbox.session() as session:
                await session.run("bomb() { bomb | bomb & }; bomb; sleep 60", timeout=2)
            assert await works(sandbox)

    async def test_a_fork_bomb_in_sessions_of_its_own_is_stopped_as_well(self, bench):
        loop = "while True:\n  try:\n    if os.fork() == 0: os.setsid()\n  except OSError: time.sleep(.01)"
        bomb = f"import os, time\n{loop}"
        async with bench.sandbox(pids=64) as sandbox:
            answer = await sandbox.run(["python3", "-c", bomb], timeout=1)
            assert answer.timed_out
            assert await works(sandbox)
            left = await sandbox.run("ls -d /proc/[0-9]* | wc -l", timeout=LIMIT)
            assert int(left.stdout) < 10

    async def test_a_memory_bomb_is_killed_and_named(self, bench):
        async with bench.sandbox(memory_mib=64) as sandbox, sandbox.session() as session:
            bomb = "python3 -c 'x = bytearray(200 << 20)'"
            for runner in (sandbox, session):
                answer = await runner.run(bomb, timeout=LIMIT)
                assert answer.oom_killed
                assert answer.signal == "SIGKILL" or answer.exit_code == 137
            answer = await sandbox.run("python3 -c 'x = bytearray(8 << 20)'", timeout=LIMIT)
            assert (answer.exit_code, answer.oom_killed) == (0, False)
            assert answer.max_rss > 8 << 20
            assert await works(sandbox, session)

    async def test_files_in_memory_are_limited(self, bench):
        async with bench.sandbox(disk_mib=8) as sandbox:
            answer = await sandbox.run("head -c 20000000 /dev/zero > big", timeout=LIMIT)
            assert answer.exit_code != 0
            assert b"No space left" in answer.stderr
            assert await works(sandbox)


async def test_streamed_output_comes_as_it_is_written_and_whole(bench):
    async with bench.sandbox(output_limit=1024) as sandbox:
        chunks, result = bytearray(), None
        command = "echo first; while [ ! -e go ]; do sleep 0.01; done; head -c 3000000 /dev/zero; echo last >&2"
        async with aclosing(sandbox.stream(command, timeout=60)) as stream:
            async for item in stream:
                if isinstance(item, Result):
                    result = item
                elif item.stream == "stdout":
                    if not chunks:
                        assert item == Chunk("stdout", b"first\n")
                        await sandbox.write("go", b"")
                    chunks += item.data
        assert result is not None
        assert result.exit_code == 0
        assert len(chunks) == 3000006


async def test_a_path_of_the_spec_is_where_commands_look_for_programs(bench):
    async with bench.sandbox(env={"PATH": "/nowhere"}) as sandbox, sandbox.session() as session:
        for runner in (sandbox, session):
            answer = await runner.run('echo "$PATH"; ls', timeout=LIMIT)
            assert (answer.exit_code, answer.stdout) == (127, b"/nowhere\n")
            assert (await runner.run("/bin/ls", timeout=LIMIT)).ok
