"""A persistent bash. It reads each command as one quoted string from its input, and answers on a descriptor of its own.

Law: whatever a command prints, reads, redefines or leaves open, the answer to it is told from all others by a random
token, which the shell reads only after the command has ended, and which nobody else can read.

For that, the shell is a copy of bash that may not be read: programs run as the same user, and could otherwise open its
descriptors by their names in /proc, take the next command and its token from them, and answer in its place. Programs
that a command leaves behind are ended before the next one; jobs of the shell itself (`&`) go on.

After each command the shell writes down its state. When a command ends the shell (`exit`, `set -e`, a timeout), the
next one runs in a new shell with the state from before.
"""

import _signal
import binascii
import fcntl
import os

from envs.sandbox.agent.command import CHECK, FAILURE, GRACE, NO_SPACE, ending, kill_all, send_result
from envs.sandbox.agent.leftovers import end_leftovers
from envs.sandbox.agent.proc import Stat, tree
from envs.sandbox.agent.process import Pipe, Ring, now, send_signal, spawn, unreadable_copy, uptime
from envs.sandbox.agent.wire import CallRefusal

TELL = 199
"""The shell's descriptor for answers: above what scripts use, and below what bash moves its own to."""
PROGRAM = 198
"""The shell's descriptor for its own program, until it has begun."""
ENTER = "exec -a bash /proc/self/fd/%d --noprofile --norc -s" % PROGRAM
"""Becomes the shell."""
LEAVE = b"exec %d<&-\n" % PROGRAM
"""The shell's first command."""
BEGIN = b'_flash_status() { return "$1"; }\n_flash_set=\n'
TURN = rb"""
{ _flash=; \builtin test "${_flash_set#*v}" = "$_flash_set" || \builtin set -v; } 2>/dev/null; LINE
%s\builtin eval %s </dev/null TELL>&-; { _flash=$? _flash_set=$-; \builtin set +v; } 2>/dev/null

{ _flash=${_flash:-$?}; %s
} 2>/dev/null
""".replace(b"LINE\n", b"").replace(b"TELL", str(TELL).encode())
"""What to run, without our descriptors, and what to say when it has ended. The shell reads it as lines of its script: a
loop of ours would be ended by a stray `break`. The first empty line ends what others have written there, the second one
what the parser still waits for after a syntax error. A name is quoted against aliases. `set -v` shows nothing of it, no
token either: that is off between commands, and on again with the next one, in the line that holds it."""
SAY = r"""\builtin printf '%s\0' TOKEN "$_flash" "$PWD" >&TELL
{ \builtin declare -p; \builtin declare -f; \builtin set +o; \builtin shopt -p; \builtin umask -p
  \builtin printf '\0'; } >&TELL""".replace("TELL", str(TELL))
RESTORE = "{ builtin cd %s; builtin eval %s; } >/dev/null 2>&1"
STATE_LIMIT = 1 << 22
"""Bytes of a shell's state that are kept; one with more starts anew after a command that ended it."""
ANSWER_LIMIT = 1 << 20
"""Bytes of an exit code and a directory: what is longer is no answer."""
CODES = tuple(str(code).encode() for code in range(256))
"""Exit codes, as a shell says them."""
CLOCK_TICK = os.sysconf("SC_CLK_TCK")


class Running:
    """A command that the shell has got, or that waits for its turn."""

    def __init__(self, reply: object, request: dict) -> None:
        self.reply = reply
        self.request = request
        self.text = request["command"]
        self.rings = {"stdout": Ring(request["limit"]), "stderr": Ring(request["limit"])}
        self.token = binascii.hexlify(os.urandom(12))
        self.timed_out = False
        self.untold = False
        """The shell said something else than how it ended."""
        self.stopping = None
        self.timer = None
        self.started = now()
        self.cpu_before = 0
        self.oom_before = 0
        self.born = 0


class Shell:
    """One session: a bash that is fed commands, and is replaced when one of them ends it."""

    def __init__(self, agent: object, name: str) -> None:
        if agent.bash is None:
            raise CallRefusal("request", "sessions need bash, which this image does not have")
        self.agent = agent
        self.name = name
        self.number = agent.numbers.new()
        self.queue = []
        self.current = None
        self.idle = {"stdout": Ring(1 << 16), "stderr": Ring(1 << 16)}
        """What background processes wrote while no command ran: given with the next command, like a terminal does."""
        self.pid = -1
        self.leaders = []
        """Every shell of this session, the present one last."""
        self.restarts = 0
        self.state = b""
        self.cwd = agent.resolve(".")
        self.status = 0
        self.answer = bytearray()
        self.settling = False
        """The answer to the last command has come, but the state after it has not."""
        self.overflowing = False
        self.closed = False
        self.ask = self.tell = None
        self.pipes = {}
        self.ends = []
        for name in ("stdout", "stderr"):
            reading, writing = os.pipe()
            self.ends.append(writing)
            self.pipes[name] = Pipe(agent.loop, reading, lambda data, name=name: self.take(name, data))
        self.start()
        agent.shells[self.name] = self

    def start(self) -> None:
        """Start a shell with the state that was written down last."""
        asks, tells = os.pipe(), os.pipe()
        # Above the numbers that the shell gets: copying one must not overwrite the next.
        tell = fcntl.fcntl(tells[1], fcntl.F_DUPFD_CLOEXEC, TELL + 1)
        files = {0: asks[0], 1: self.ends[0], 2: self.ends[1], TELL: tell}
        env = dict(self.agent.env)
        argv, begin = ["bash", "--noprofile", "--norc", "-s"], BEGIN
        # A new copy each time: a shell can make its own readable, and so that of every other one that ran the same.
        own = unreadable_copy(self.agent.bash)
        program = fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, TELL + 1) if own >= 0 else -1
        if program >= 0:
            argv[-1:], begin = ["-c", ENTER], LEAVE + BEGIN
            files[PROGRAM] = program
        try:
            cwd = self.agent.resolve(".")
            self.pid = self.agent.launcher.call(
                lambda: spawn(self.agent.bash, argv, env, cwd, files, False, self.number)
            )
        except OSError as error:
            os.close(asks[1])
            os.close(tells[0])
            self.pid = -1
            code = "limit" if error.errno in NO_SPACE else "file"
            raise CallRefusal(code, "no shell can be started: {}".format(os.strerror(error.errno)))
        finally:
            for fd in (asks[0], tells[1], tell, own, program):
                if fd >= 0:
                    os.close(fd)
        self.agent.children[self.pid] = self
        self.leaders.append(self.pid)
        self.answer = bytearray()
        self.ask, self.outgoing = asks[1], bytearray(begin)
        os.set_blocking(self.ask, False)
        self.tell = Pipe(self.agent.loop, tells[0], self.hear)
        if self.state:
            cwd = quote(self.cwd.encode("utf-8", "surrogateescape"))
            self.say(RESTORE.encode() % (cwd, quote(self.state)), b":")

    def run(self, running: Running) -> None:
        """Take a command; it waits for the ones before it."""
        if "\0" in running.text:
            raise CallRefusal("request", "a command cannot contain a zero byte")
        self.queue.append(running)
        running.timer = self.agent.loop.later(running.request["timeout"], lambda: self.give_up(running))
        self.proceed()

    def give_up(self, running: Running) -> None:
        """The commands before it took too long."""
        self.queue.remove(running)
        running.reply(FAILURE, ["busy", "the session was busy with other commands for all of the command's time"])

    def proceed(self) -> None:
        """Give the shell its next command, if it is free."""
        while self.current is None and self.queue and not self.closed:
            running = self.queue.pop(0)
            try:
                if self.pid < 0:
                    self.start()
                self.begin(running)
            except CallRefusal as refusal:
                self.agent.loop.cancel(running.timer)
                running.reply(FAILURE, [refusal.code, str(refusal)])

    def begin(self, running: Running) -> None:
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
        running.cpu_before, running.born = self.measure()
        running.timer = self.agent.loop.later(running.request["timeout"], self.expire)
        self.say(running.text.encode("utf-8", "surrogateescape"), SAY.encode().replace(b"TOKEN", running.token))

    def measure(self) -> "tuple[int, int]":
        """CPU ticks of the shell and what it waited for; the time now in ticks since the machine started."""
        try:
            ticks = Stat(self.pid).ticks
        except (OSError, ValueError, IndexError):
            ticks = 0
        return ticks, int(uptime() * CLOCK_TICK)

    def say(self, command: bytes, answer: bytes) -> None:
        """Send one command to the shell, and what to answer."""
        status = b"_flash_status %d; " % self.status if self.status else b""
        self.outgoing += TURN % (status, quote(command), answer)
        self.write()

    def write(self) -> None:
        try:
            while self.outgoing:
                del self.outgoing[: os.write(self.ask, memoryview(self.outgoing)[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing = bytearray()  # The shell is gone; its end is on the way.
        self.agent.loop.watch(self.ask, None, self.write if self.outgoing else None)

    def hear(self, data: bytes) -> None:
        """The shell answers: exit code and directory at once, its state a moment later."""
        self.answer += data
        while True:
            if self.settling:
                if not self.settle():
                    return
                continue
            if self.current is None or self.current.untold:
                self.answer = bytearray()
                return
            at = self.answer.find(self.current.token + b"\0")
            if at < 0:
                del self.answer[: -len(self.current.token) - 1]
                return
            fields = bytes(self.answer[at:]).split(b"\0", 3)
            if (len(fields) > 1 and fields[1] not in CODES) or (len(fields) < 4 and len(self.answer) > ANSWER_LIMIT):
                # A trap changes what our own commands say.
                self.current.untold = True
                self.stop(self.current)
                return
            if len(fields) < 4:
                return
            self.status = int(fields[1])
            self.cwd = fields[2].decode("utf-8", "surrogateescape")
            self.answer = bytearray(fields[3])
            self.settling = True
            self.finish({"exit_code": self.status, "signal": None})

    def settle(self) -> bool:
        """Take the state that follows an answer; False while it is not complete."""
        state, end, rest = self.answer.partition(b"\0")
        if len(state) > STATE_LIMIT:
            self.overflowing = True
            state = bytearray()
        if not end:
            self.answer = bytearray(state)
            return False
        self.state = b"" if self.overflowing else bytes(state)
        self.answer = bytearray(rest)
        self.settling = self.overflowing = False
        return True

    def take(self, name: str, data: bytes) -> None:
        """Output came: it belongs to the running command, or to what the next one will be told."""
        (self.idle if self.current is None else self.current.rings)[name].add(data)

    def finish(self, body: dict) -> None:
        """The running command has ended."""
        running = self.current
        self.agent.loop.cancel(running.timer)
        # What was written before the end is in the pipes; what comes later belongs to the background.
        for pipe in self.pipes.values():
            pipe.drain()
        self.current = None
        body.update(
            {
                "timed_out": running.timed_out,
                "oom_killed": self.agent.oom.read() > running.oom_before,
                "wall_s": now() - running.started,
                "cpu_s": max(0, self.measure()[0] - running.cpu_before) / CLOCK_TICK,
                "max_rss": 0,
                "restarts": self.restarts,
            }
        )
        send_result(running.reply, body, running.rings, False)
        self.proceed()

    def refuse(self, message: str) -> None:
        """Nobody knows how the running command has ended."""
        running, self.current = self.current, None
        self.agent.loop.cancel(running.timer)
        running.reply(FAILURE, ["request", message])
        self.proceed()

    def expire(self) -> None:
        """The running command's time is over."""
        self.current.timed_out = True
        self.stop(self.current)

    def cancel(self, running: Running) -> None:
        """Its caller is gone."""
        if running is self.current:
            self.stop(running)
        elif running in self.queue:
            self.agent.loop.cancel(running.timer)
            self.queue.remove(running)

    def stop(self, running: Running) -> None:
        """End what the running command has started, and the shell. What earlier commands left goes on."""
        if running.stopping is not None:
            return
        running.stopping = now()
        # A shell that ran on would begin the next command of its list as soon as the present one is dead.
        send_signal([self.pid], _signal.SIGSTOP)
        send_signal(self.started_by(running), _signal.SIGTERM)
        self.agent.loop.cancel(running.timer)
        self.check(running)

    def check(self, running: Running) -> None:
        """Wait for what was asked to end, but not for long."""
        if now() < running.stopping + GRACE and self.started_by(running):
            running.timer = self.agent.loop.later(CHECK, lambda: self.check(running))
            return
        kill_all(lambda: self.started_by(running))
        if self.pid > 0:
            send_signal([self.pid], _signal.SIGKILL)

    def started_by(self, running: Running) -> "list[int]":
        return [pid for pid in tree(self.pid, self.number, running.born) if pid not in self.leaders]

    def interrupt(self) -> bool:
        """SIGINT to the running command."""
        if self.current is None:
            return False
        # Stopped meanwhile: a shell that finds its child dead before its own signal comes begins the next command.
        send_signal([self.pid], _signal.SIGSTOP)
        send_signal([*self.started_by(self.current), self.pid], _signal.SIGINT)
        return True

    def reaped(self, status: int, usage: object) -> None:
        """The shell is gone: by `exit`, by a signal, or because we killed it."""
        self.tell.drain()
        self.tell.close()
        self.agent.loop.watch(self.ask)
        os.close(self.ask)
        self.pid = -1
        self.settling = self.overflowing = False
        self.restarts += 1
        self.status = 0
        if self.closed:
            self.release()
        elif self.current is not None and self.current.untold:
            self.refuse("the shell does not say how the command ended, and was replaced: a trap or option changes that")
        elif self.current is not None:
            self.finish(ending(status))

    def close(self) -> None:
        """End the shell and everything it started."""
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
            self.current = None
        for leader in self.leaders:
            kill_all(lambda leader=leader: tree(leader, self.number))
        if self.pid < 0:
            self.release()

    def release(self) -> None:
        for pipe in self.pipes.values():
            pipe.close()
        for fd in self.ends:
            os.close(fd)
        self.ends = []


def quote(text: bytes) -> bytes:
    """One word for the shell."""
    return b"'" + text.replace(b"'", b"'\\''") + b"'"
