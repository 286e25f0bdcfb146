"""A session: commands that run one after another in a bash, which is replaced when a command ends it."""

import _signal
import binascii
import os

from envs.sandbox.agent.bash import SAY, StatefulBash
from envs.sandbox.agent.command import CHECK, FAILURE, GRACE, ending, kill_all, send_result
from envs.sandbox.agent.leftovers import end_leftovers
from envs.sandbox.agent.proc import CLOCK_TICK, tree
from envs.sandbox.agent.process import Pipe, Ring, now, send_signal
from envs.sandbox.agent.wire import CallRefusal


class Running:
    """A command of a session, running or in its queue."""

    def __init__(self, shell: object, reply: object, request: dict) -> None:
        self.shell = shell
        self.reply = reply
        self.request = request
        self.text = request["command"]
        self.rings = {"stdout": Ring(request["limit"]), "stderr": Ring(request["limit"])}
        self.token = binascii.hexlify(os.urandom(12))
        self.timed_out = False
        self.untold = False
        """True if the shell's answer did not report how the command ended."""
        self.stopping = None
        self.timer = None
        self.started = now()
        self.cpu_before = 0
        self.oom_before = 0
        self.born = 0

    def give_up(self) -> None:
        """Fail: the commands before it took too long."""
        self.shell.queue.remove(self)
        self.reply(FAILURE, ["busy", "the session was busy with other commands for all of the command's time"])

    def expire(self) -> None:
        """Stop the command because its time is over."""
        self.timed_out = True
        self.stop()

    def stop(self) -> None:
        """End the shell and the processes that the command has started. Those of earlier commands go on."""
        if self.stopping is not None:
            return
        self.stopping = now()
        # Otherwise the shell would begin the next command of its list once the current one is dead.
        send_signal([self.shell.bash.pid], _signal.SIGSTOP)
        send_signal(self.started_by(), _signal.SIGTERM)
        self.shell.agent.loop.cancel(self.timer)
        self.check()

    def check(self) -> None:
        """Wait for the processes to end, for at most the grace, and then kill them."""
        if now() < self.stopping + GRACE and self.started_by():
            self.timer = self.shell.agent.loop.later(CHECK, self.check)
            return
        kill_all(self.started_by)
        if self.shell.bash.pid > 0:
            send_signal([self.shell.bash.pid], _signal.SIGKILL)

    def started_by(self) -> "list[int]":
        """Return the living processes that the command has started, without shells."""
        bash = self.shell.bash
        return [pid for pid in tree(bash.pid, bash.number, self.born) if pid not in bash.leaders]


class Shell:
    """A session: a shell with a queue of commands."""

    def __init__(self, agent: object, name: str) -> None:
        if agent.bash is None:
            raise CallRefusal("request", "sessions need bash, which this image does not have")
        self.agent = agent
        self.name = name
        self.number = agent.numbers.new()
        self.queue = []
        self.current = None
        self.idle = {"stdout": Ring(1 << 16), "stderr": Ring(1 << 16)}
        """Output of background processes while no command ran. The next command gets it, like in a terminal."""
        self.restarts = 0
        self.closed = False
        self.pipes = {}
        self.ends = []
        for name in ("stdout", "stderr"):
            reading, writing = os.pipe()
            self.ends.append(writing)
            self.pipes[name] = Pipe(agent.loop, reading, lambda data, name=name: self.take(name, data))
        self.bash = StatefulBash(agent, self, self.ends)
        self.bash.start()
        agent.shells[self.name] = self

    def run(self, running: Running) -> None:
        """Queue a command. It waits for the earlier ones."""
        if "\0" in running.text:
            raise CallRefusal("request", "a command cannot contain a zero byte")
        self.queue.append(running)
        running.timer = self.agent.loop.later(running.request["timeout"], running.give_up)
        self.proceed()

    def proceed(self) -> None:
        """Give the shell its next command, if it is idle."""
        while self.current is None and self.queue and not self.closed:
            running = self.queue.pop(0)
            try:
                if self.bash.pid < 0:
                    self.bash.start()
                self.begin(running)
            except CallRefusal as refusal:
                self.agent.loop.cancel(running.timer)
                running.reply(FAILURE, [refusal.code, str(refusal)])

    def begin(self, running: Running) -> None:
        """Give a command to the shell."""
        end_leftovers(self.agent, self)
        self.current = running
        self.agent.loop.cancel(running.timer)
        running.started = now()
        running.oom_before = self.agent.oom.read()
        running.rings, waiting = self.idle, running.rings
        self.idle = {"stdout": Ring(1 << 16), "stderr": Ring(1 << 16)}
        for name, ring in waiting.items():
            ring.add(running.rings[name].content())
        running.rings = waiting
        running.cpu_before, running.born = self.bash.measure()
        running.timer = self.agent.loop.later(running.request["timeout"], running.expire)
        self.bash.token = running.token
        self.bash.say(running.text.encode("utf-8", "surrogateescape"), SAY.encode().replace(b"TOKEN", running.token))

    def take(self, name: str, data: bytes) -> None:
        """Add output to the running command, or keep it for the next one."""
        (self.idle if self.current is None else self.current.rings)[name].add(data)

    def finish(self, body: dict) -> None:
        """Reply with the result of the running command."""
        running = self.current
        self.agent.loop.cancel(running.timer)
        # The output before the end is in the pipes; later output belongs to background processes.
        for pipe in self.pipes.values():
            pipe.drain()
        self.current = self.bash.token = None
        body.update(
            {
                "timed_out": running.timed_out,
                "oom_killed": self.agent.oom.read() > running.oom_before,
                "wall_s": now() - running.started,
                "cpu_s": max(0, self.bash.measure()[0] - running.cpu_before) / CLOCK_TICK,
                "max_rss": 0,
                "restarts": self.restarts,
            }
        )
        send_result(running.reply, body, running.rings, False)
        self.proceed()

    def untold(self) -> None:
        """Stop the running command: the shell's answer does not report how it ended."""
        self.current.untold = True
        self.current.stop()

    def refuse(self, message: str) -> None:
        """Fail the running command, whose end is unknown."""
        running, self.current = self.current, None
        self.agent.loop.cancel(running.timer)
        running.reply(FAILURE, ["request", message])
        self.proceed()

    def cancel(self, running: Running) -> None:
        """Stop a command whose caller is gone, or take it out of the queue."""
        if running is self.current:
            running.stop()
        elif running in self.queue:
            self.agent.loop.cancel(running.timer)
            self.queue.remove(running)

    def interrupt(self) -> bool:
        """Send SIGINT to the running command. Returns False if there is none."""
        if self.current is None:
            return False
        # Stopped meanwhile: a shell that finds its child dead before its own signal arrives begins the next command.
        send_signal([self.bash.pid], _signal.SIGSTOP)
        send_signal([*self.current.started_by(), self.bash.pid], _signal.SIGINT)
        return True

    def reaped(self, status: int, usage: object) -> None:
        """Clean up after the shell's end: by `exit`, by a signal, or because we killed it."""
        self.bash.gone()
        self.restarts += 1
        if self.closed:
            self.release()
        elif self.current is not None and self.current.untold:
            self.refuse("the shell does not say how the command ended, and was replaced: a trap or option changes that")
        elif self.current is not None:
            self.finish(ending(status))

    def close(self) -> None:
        """End the shell and every process that it started."""
        if self.closed:
            return
        self.closed = True
        self.agent.shells.pop(self.name, None)
        for running in self.queue:
            self.agent.loop.cancel(running.timer)
            running.reply(FAILURE, ["gone", "the session was closed"])
        self.queue = []
        if self.current is not None:
            self.agent.loop.cancel(self.current.timer)
            self.current.reply(FAILURE, ["gone", "the session was closed"])
            self.current = self.bash.token = None
        for leader in self.bash.leaders:
            kill_all(lambda leader=leader: tree(leader, self.number))
        if self.bash.pid < 0:
            self.release()

    def release(self) -> None:
        """Close the pipes of a closed session."""
        for pipe in self.pipes.values():
            pipe.close()
        for fd in self.ends:
            os.close(fd)
        self.ends = []
