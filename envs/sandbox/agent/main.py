"""The agent: takes the calls of the host, and is the first process of the sandbox.

As process 1 it cannot be killed from inside, and reaps what others leave. Without a host it waits for one that takes
over, for a while; jobs, sessions and files stay, calls that were in progress are stopped.
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
    """Everything the agent knows."""

    def __init__(self, options: dict) -> None:
        self.options = options
        self.loop = Loop()
        self.env = dict(os.environ)
        self.workdir = options["workdir"]
        self.is_init = os.getpid() == 1
        self.epoch = 0
        self.numbers = CommandNumbers()
        self.children = {}
        """Process id to the command or shell that started it."""
        self.active = set()
        """Commands that run."""
        self.calls = {}
        """Number of a call in progress to the command, shell's command or write behind it."""
        self.jobs = {}
        self.shells = {}
        self.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        # Where those who ask for a sandbox give commands another PATH, the shells are still in the usual places.
        self.bash = find_program("bash", self.env, "/") or find_program("bash", {}, "/")
        self.shell = self.bash or find_program("sh", self.env, "/") or "/bin/sh"
        self.oom = OomCounter(options["cgroup"])
        # Where the root may be written to, new files in it would be refused as well. It opens a file in /proc of ours,
        # which `protect` closes to our own user.
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
        """End, and everything with us."""
        if not self.is_init:
            kill_all(lambda: [stat.pid for stat in descendants({os.getpid()})])
        os._exit(0)

    def connect(self, source: int, sink: int) -> None:
        """Serve this host; one that was served before is taken over from."""
        if self.channel is not None:
            self.channel.close()
        self.epoch += 1
        self.loop.cancel(self.orphaned)
        self.channel = HostChannel(self.loop, source, sink, self.take, self.lose)

    def lose(self, channel: HostChannel) -> None:
        """The host is gone. Calls in progress have nobody to answer to."""
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
        """Children have ended: ours, and what others left behind."""
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
        """One frame of the host: [call, operation, argument]."""
        if not isinstance(body, list) or len(body) != 3 or not isinstance(body[0], int):
            # Not a host: nothing else that it says can be understood either.
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
            # A call that we do not understand must be answered too.
            self.calls.pop(call, None)
            self.reply(call, FAILURE, ["request", "{}: {}".format(type(error).__name__, error)])

    def reply(self, call: int, kind: int, body: object) -> None:
        """Send a frame to the host that belongs to a call."""
        if kind in (RESULT, FAILURE):
            self.calls.pop(call, None)
        if self.channel is not None:
            self.channel.send(call, kind, body)

    def replier(self, call: int) -> object:
        """Answers this call as long as the host that made it is there."""
        epoch = self.epoch
        return lambda kind, body: self.reply(call, kind, body) if epoch == self.epoch else None

    def abandon(self, call: int) -> None:
        """Nobody waits for this call any more."""
        work = self.calls.pop(call, None)
        if isinstance(work, Command):
            work.stop()
        elif isinstance(work, Write):
            work.drop()
        elif isinstance(work, tuple):
            work[0].cancel(work[1])

    def resolve(self, path: str) -> str:
        """A path made absolute: relative ones begin at the working directory."""
        return os.path.normpath(os.path.join(self.workdir, path)) if not path.startswith("/") else path


def texts(argument: dict) -> dict:
    """An argument with its texts as Python's own: they come as bytes, because not every name and command is UTF-8."""
    for name in ("command", "cwd", "path"):
        if argument.get(name) is not None:
            argument[name] = os.fsdecode(argument[name])
    if "argv" in argument:
        argument["argv"] = [os.fsdecode(word) for word in argument["argv"]]
    if "env" in argument:
        argument["env"] = {os.fsdecode(name): os.fsdecode(value) for name, value in argument["env"].items()}
    return argument


def protect() -> bool:
    """Hide our memory and descriptors from other processes of the same user, and adopt orphans; False if we cannot."""
    try:
        # What `ctypes` is built on: importing all of it takes longer than everything else that we import.
        import _ctypes

        prctl = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")
        _ctypes.call_function(prctl, (PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        return _ctypes.call_function(prctl, (PR_SET_DUMPABLE, 0, 0, 0, 0)) == 0
    except Exception:
        # Small images have no ctypes; what it would be loaded from may be anything.
        return False


def main(options: dict) -> None:
    """Entry point: what the loader calls."""
    BoxAgent(options).run()
