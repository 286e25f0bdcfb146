"""The agent: the first process of the sandbox, which carries out the host's calls.

As process 1 it cannot be killed from inside, and reaps orphans. If its host is gone, it stops the calls in progress,
and waits for some time for another host. Jobs, sessions and files stay.
"""

import _signal
import errno
import os

from envs.sandbox.agent.calls import OPERATIONS
from envs.sandbox.agent.command import FAILURE, RESULT, Command, kill_all
from envs.sandbox.agent.files import Write
from envs.sandbox.agent.launcher import Launcher
from envs.sandbox.agent.leftovers import descendants
from envs.sandbox.agent.loop import HostChannel, Loop
from envs.sandbox.agent.proc import CommandNumbers
from envs.sandbox.agent.process import OomCounter, find_program, now
from envs.sandbox.agent.takeover import Listener
from envs.sandbox.agent.wire import CallRefusal

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


class BoxAgent:
    """State of the agent."""

    def __init__(self, options: dict) -> None:
        self.options = options
        self.loop = Loop()
        self.env = dict(os.environ)
        self.workdir = options["workdir"]
        self.is_init = os.getpid() == 1
        self.epoch = 0
        self.numbers = CommandNumbers()
        self.children = {}
        """Command or shell of each child, by process id."""
        self.active = set()
        """Commands that are running."""
        self.calls = {}
        """Work of each call in progress, by the call's number: a command, a session's command or a write."""
        self.jobs = {}
        self.shells = {}
        self.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        # If the spec gives commands another PATH, the shells are still in the usual places.
        self.bash = find_program("bash", self.env, "/") or find_program("bash", {}, "/")
        self.shell = self.bash or find_program("sh", self.env, "/") or "/bin/sh"
        self.oom = OomCounter(options["cgroup"])
        # If the root is writable, Landlock would also refuse new files in it. The launcher is made before `protect`,
        # since it opens a file in our /proc, which `protect` closes to our own user.
        self.launcher = Launcher(self.is_init and not os.access("/", os.W_OK))
        self.protected = protect()
        self.channel = None
        self.orphaned = None
        self.listener = None

    def run(self) -> None:
        """Serve until the end of the sandbox."""
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
        _signal.set_wakeup_fd(wake_write)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGPIPE):
            _signal.signal(number, _signal.SIG_IGN)
        self.loop.watch(wake_read, lambda: self.reap(wake_read))
        self.ends = now() + self.options["life"]
        self.loop.later(self.options["life"], self.die)
        if self.options.get("address"):
            self.listener = Listener(self, self.options["address"])
        self.connect(0, 1)
        self.loop.run()

    def die(self) -> None:
        """End the agent and all its processes."""
        if not self.is_init:
            kill_all(lambda: [stat.pid for stat in descendants({os.getpid()})])
        os._exit(0)

    def connect(self, source: int, sink: int) -> None:
        """Serve this host, in place of an earlier one."""
        if self.channel is not None:
            self.channel.close()
        self.epoch += 1
        self.loop.cancel(self.orphaned)
        self.channel = HostChannel(self.loop, source, sink, self.take, self.lose)

    def lose(self, channel: HostChannel) -> None:
        """Stop the calls in progress, since the host is gone, and wait for another host."""
        if channel is not self.channel:
            return
        self.channel = None
        for call in list(self.calls):
            self.abandon(call)
        self.calls = {}
        if self.listener is None:
            self.die()
        self.orphaned = self.loop.later(self.options["orphan"], self.die)

    def reap(self, wake: int) -> None:
        """Reap ended children: our own, and orphans."""
        try:
            while os.read(wake, 512):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self.children.pop(pid, None)
            if child is not None:
                child.reaped(status, usage)

    def take(self, body: list) -> None:
        """Carry out one frame of the host: [call, operation, argument]."""
        if not isinstance(body, list) or len(body) != 3 or not isinstance(body[0], int):
            # The peer is not a host, so none of its frames can be understood.
            if self.channel is not None:
                self.channel.say_goodbye()
            return
        call, operation, argument = body
        try:
            OPERATIONS[operation](self, call, texts(argument) if isinstance(argument, dict) else argument)
        except CallRefusal as refusal:
            self.calls.pop(call, None)
            self.reply(call, FAILURE, [refusal.code, str(refusal)])
        except OSError as error:
            self.calls.pop(call, None)
            code = "limit" if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EAGAIN, errno.EMFILE) else "file"
            self.reply(call, FAILURE, [code, str(error)])
        except MemoryError:
            self.calls.pop(call, None)
            self.reply(call, FAILURE, ["limit", "the agent is out of memory"])
        except Exception as error:
            # A call with an unexpected argument must be answered too.
            self.calls.pop(call, None)
            self.reply(call, FAILURE, ["request", "{}: {}".format(type(error).__name__, error)])

    def reply(self, call: int, kind: int, body: object) -> None:
        """Send the host a frame of a call."""
        if kind in (RESULT, FAILURE):
            self.calls.pop(call, None)
        if self.channel is not None:
            self.channel.send(call, kind, body)

    def replier(self, call: int) -> object:
        """Return a function that answers this call while its host is connected."""
        epoch = self.epoch
        return lambda kind, body: self.reply(call, kind, body) if epoch == self.epoch else None

    def abandon(self, call: int) -> None:
        """Stop the work of a call whose result is not awaited any more."""
        work = self.calls.pop(call, None)
        if isinstance(work, Command):
            work.stop()
        elif isinstance(work, Write):
            work.drop()
        elif isinstance(work, tuple):
            work[0].cancel(work[1])

    def resolve(self, path: str) -> str:
        """Return a path as absolute. A relative path begins at the working directory."""
        return os.path.normpath(os.path.join(self.workdir, path)) if not path.startswith("/") else path


def texts(argument: dict) -> dict:
    """Decode the texts of an argument. They arrive as bytes, because names and commands may not be UTF-8."""
    for name in ("command", "cwd", "path"):
        if argument.get(name) is not None:
            argument[name] = os.fsdecode(argument[name])
    if "argv" in argument:
        argument["argv"] = [os.fsdecode(word) for word in argument["argv"]]
    if "env" in argument:
        argument["env"] = {os.fsdecode(name): os.fsdecode(value) for name, value in argument["env"].items()}
    return argument


def protect() -> bool:
    """Hide our memory and descriptors from our user's other processes, and adopt orphans. Returns False on failure."""
    try:
        # `_ctypes` is the base of `ctypes`, whose import takes longer than all our other imports together.
        import _ctypes

        prctl = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")
        _ctypes.call_function(prctl, (PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        return _ctypes.call_function(prctl, (PR_SET_DUMPABLE, 0, 0, 0, 0)) == 0
    except Exception:
        # Small images have no ctypes, and the library could be anything.
        return False


def main(options: dict) -> None:
    """Run the agent. The loader calls this function."""
    BoxAgent(options).run()
