"""What an ended command has left behind is ended, however it comes and goes while it is looked for."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from envs.sandbox.agent.command import end_leftovers
from envs.sandbox.agent.process import Stat, processes, still_used
from envs.sandbox.agent.wire import CallRefusal

LIMIT = 20.0
"""Seconds for commands that end by themselves; long, because the machine may be busy."""

HEADLESS = r"""
import ctypes, os, platform, sys, threading, time
if "stay" not in sys.argv:
    if os.fork(): os._exit(0)
    os.setsid()
    if os.fork(): os._exit(0)
def beat():
    with open("beat", "ab", 0) as file:
        for _ in range(4000):
            file.write(b".")
            time.sleep(0.005)
threading.Thread(target=beat).start()
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)
"""
"""Its first thread ends, and so the process looks as if it had; another thread works on."""
SILENT = "a=$(wc -c <beat); sleep 0.2; test $a -gt 0 && test $a = $(wc -c <beat)"


class World:
    """Processes by number, with their parents, of which the agent is 1; after each look at it something may happen."""

    pause = 0

    def __init__(self, parents, then=()):
        self.parents, self.then = dict(parents), list(then)
        self.zombies, self.killed, self.looks = set(), [], 0

    def adopted(self):
        found = [pid for pid, parent in self.parents.items() if parent == 1]
        self.happen()
        return found

    def processes(self):
        found = [SimpleNamespace(pid=pid, parent=parent) for pid, parent in self.parents.items()]
        self.happen()
        return [stat for stat in found if stat.pid not in self.zombies]

    def number_of(self, pid):
        self.happen()

    def happen(self):
        self.looks += 1
        if self.then:
            self.then.pop(0)(self)

    def forks(self, pid, child):
        """It does, and ends: the agent gets its child."""
        if pid not in self.zombies:
            self.parents[child] = pid
            self.end(pid)

    def end(self, pid):
        self.zombies.add(pid)
        self.parents.update({child: 1 for child, parent in self.parents.items() if parent == pid})

    def send_signal(self, pids, number):
        for pid in sorted(set(pids) - self.zombies):
            self.killed.append(pid)
            self.end(pid)


def ended_by_agent(world):
    agent = SimpleNamespace(active=set(), shells={}, children={5: "a shell"})
    end_leftovers(agent, system=world)
    return world


@pytest.mark.parametrize("moment", range(9))
def test_what_forks_and_ends_while_it_is_looked_at_does_not_escape(moment):
    then = [lambda world: None] * moment + [lambda world: world.forks(10, 11)]
    world = ended_by_agent(World({5: 1, 10: 1}, then))
    assert world.parents.keys() - world.zombies == {5}
    assert world.killed in ([10], [11])


def test_a_chain_of_forks_is_followed():
    then = [lambda world, pid=pid: world.forks(pid, pid + 1) for pid in range(10, 30)]
    world = ended_by_agent(World({5: 1, 10: 1}, then))
    assert world.parents.keys() - world.zombies == {5}


def test_nothing_is_killed_where_nothing_is_left():
    assert ended_by_agent(World({5: 1, 6: 5})).killed == []


def test_a_process_has_ended_with_its_last_thread(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HEADLESS, "stay"], cwd=tmp_path) as program:
        while Stat(program.pid).state != b"Z":
            pass
        assert program.pid in {stat.pid for stat in processes()}
        program.kill()
        while not Stat(program.pid).ended():
            pass
        assert program.pid not in {stat.pid for stat in processes()}


@pytest.mark.anyio
async def test_what_goes_on_without_its_first_thread_is_ended_like_any_other(bench):
    begun = "until [ -s beat ]; do sleep 0.01; done"
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        await sandbox.write("headless.py", HEADLESS.encode())

        async def is_silent(how: str) -> None:
            assert (await sandbox.run(SILENT, timeout=LIMIT)).ok, how
            await sandbox.remove("beat")

        assert (await sandbox.run(f"python3 headless.py; {begun}", timeout=LIMIT)).ok
        await is_silent("the command has ended")
        assert (await sandbox.run("python3 headless.py stay; :", timeout=1)).timed_out
        await is_silent("the command was ended at its deadline")
        job = await sandbox.start(["python3", "headless.py", "stay"])
        assert (await sandbox.run(begun, timeout=LIMIT)).ok
        await job.signal("SIGKILL")
        assert (await job.wait(LIMIT)).signal == "SIGKILL"
        await is_silent("the job was killed")
        assert (await session.run(f"python3 headless.py; {begun}", timeout=LIMIT)).ok
        assert (await session.run(SILENT, timeout=LIMIT)).ok
        await is_silent("the command of a session has ended")
        async with sandbox.session("other") as other:
            assert (await other.run(f"python3 headless.py stay & {begun}", timeout=LIMIT)).ok
        await is_silent("the session was closed")


def test_what_cannot_be_ended_is_told():
    world = World({5: 1, 10: 1})
    world.end = lambda pid: None
    with pytest.raises(CallRefusal, match="multiplies faster"):
        ended_by_agent(world)


def test_the_id_of_an_ended_shell_is_known_only_while_a_process_of_its_session_lives():
    script = "sleep 60 >/dev/null & echo $!"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True, text=True) as shell:
        assert shell.stdout is not None
        sleeper = int(shell.stdout.readline())
    assert still_used([shell.pid]) == [shell.pid]
    os.kill(sleeper, signal.SIGKILL)
    while any(stat.pid == sleeper for stat in processes()):
        time.sleep(0.01)
    assert still_used([shell.pid]) == []
