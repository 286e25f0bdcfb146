"""The agent: the first process of the sandbox, which carries out the host's calls.

Part of the program inside a sandbox: Python 3.6, standard library only. `envs.sandbox.engines.bundle` joins all modules
into one text, so top-level names must be unique. The loader in the sandbox calls `main`.

The *host* is the process of Flash that controls the agent. Each operation that it can call is one function of this
file, listed in `OPERATIONS`. It answers the call itself, or its command does later.
`envs.sandbox.local.agent.AgentSandbox` makes the calls.

As process 1 the agent cannot be killed from inside, and reaps orphans. If its host is gone, it stops the calls in
progress, and waits for some time for another host. Jobs, sessions and files stay. `Listener` lets a host take over that
knows the secret.
"""

import _signal
import _socket
import binascii
import errno
import os
import sys
from _operator import _compare_digest as compare_digest

from envs.sandbox.agent.command import Command, JobWaiter, descendants, kill_all
from envs.sandbox.agent.files import (
    READ_LIMIT,
    Write,
    contains,
    list_folder,
    read_file,
    receive_tree,
    remove,
    restore_tree,
    send_tree,
)
from envs.sandbox.agent.loop import HostChannel, Loop
from envs.sandbox.agent.process import CommandNumbers, Launcher, OomCounter, Stat, find_program, now
from envs.sandbox.agent.shell import Running, Shell
from envs.sandbox.agent.wire import CHUNK, CREDIT, FAILURE, PIECE, RESULT, CallRefusal

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
"""Options of the system call `prctl`: hide this process's memory; adopt orphans."""

MAX_JOBS = 1000
"""Background jobs that are remembered. The oldest ended jobs are forgotten first."""
MAX_STRANGERS = 16
"""Most connections from inside that have not yet sent the secret. Commands can open any number of them."""
SECRET_SECONDS = 5
"""Seconds that a new connection has to send the secret."""


class BoxAgent:
    """The agent's state: its host, and the commands, jobs, sessions and calls in progress."""

    def __init__(self, options: dict) -> None:
        """Prepare the agent; `run` starts it. Called once, before any program of the sandbox runs."""
        self.options = options
        """Fields of `envs.sandbox.engines.bundle.Options`."""
        self.loop = Loop()
        """Event loop, in which all functions of the agent run."""
        self.env = dict(os.environ)
        """Environment variables of commands, to which a call adds its own."""
        self.workdir = options["workdir"]
        """Working directory, at which relative paths begin."""
        self.is_init = os.getpid() == 1
        """True in a container. False in tests, where the agent is a process among others."""
        self.epoch = 0
        """Number of hosts so far, the current one included."""
        self.numbers = CommandNumbers()
        """Source of the numbers that the processes of commands carry."""
        self.children = {}
        """`Command` or `Shell` of each child, by process id; its method `reaped` is called at the child's end."""
        self.active = set()
        """`Command`s that are running, jobs included. Commands of sessions are in `shells`."""
        self.calls = {}
        """Work of each call in progress, by the call's number: a `Command`, a session's `Running` command, a `Write` or
        a `JobWaiter`. Each has a method `cancel`."""
        self.jobs = {}
        """`Command` of each background job by the job's id, also of ended jobs: at most `MAX_JOBS`."""
        self.shells = {}
        """`Shell` of each open session, by the session's name."""
        self.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        """Descriptor for the input of commands that get none."""
        # If the spec gives commands another PATH, the shells are still in the usual places.
        self.bash = find_program("bash", self.env, "/") or find_program("bash", {}, "/")
        """Path of bash, which sessions need; None if the image has none."""
        self.shell = self.bash or find_program("sh", self.env, "/") or "/bin/sh"
        """Path of the shell that runs commands given as text."""
        self.oom = OomCounter(options["cgroup"])
        """Counter of processes killed for lack of memory, which commands read at their begin and end."""
        # If the root is writable, Landlock would also refuse new files in it. The launcher is made before `protect`,
        # since it opens a file in our /proc, which `protect` closes to our own user.
        self.launcher = Launcher(self.is_init and not os.access("/", os.W_OK))
        """Starts all processes of commands."""
        self.protected = protect()
        """True if other processes of the sandbox can neither read the agent's memory nor use its descriptors."""
        self.channel = None
        """Channel to the host; None while there is no host."""
        self.orphaned = None
        """Timer that ends the agent if no host takes over in time."""
        self.listener = None
        """`Listener` for such a host; None if no host may take over."""
        self.ends = now() + options["life"]
        """Monotonic time at which the agent ends by itself. Its host normally ends the sandbox some seconds earlier."""

    def run(self) -> None:
        """Set up signals, the end of the agent's life and the listener, serve the first host, and run for ever.

        The first host is at descriptors 0 and 1: the engine connects them.
        """
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
        _signal.set_wakeup_fd(wake_write)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGPIPE):
            _signal.signal(number, _signal.SIG_IGN)
        self.loop.watch(wake_read, lambda: self.reap(wake_read))
        self.loop.later(self.ends - now(), self.die)
        if self.options.get("address"):
            self.listener = Listener(self, self.options["address"])
        self.connect(0, 1)
        self.loop.run()

    def die(self) -> None:
        """End the agent and all its processes: at the end of its life, or because no host can come any more.

        As process 1 it takes the whole container with it.
        """
        if not self.is_init:
            kill_all(lambda: [stat.pid for stat in descendants({os.getpid()})])
        os._exit(0)

    def connect(self, source: int, sink: int) -> None:
        """Serve the host whose frames come from `source` and go to `sink`, in place of an earlier one.

        `run` connects the first host. `Listener` calls this when another host has proved that it knows the secret.
        """
        if self.channel is not None:
            self.channel.close()  # This calls `lose_host`, which starts the timer that is cancelled below.
        self.epoch += 1
        self.loop.cancel(self.orphaned)
        self.channel = HostChannel(self.loop, source, sink, self.carry_out, self.lose_host)

    def lose_host(self) -> None:
        """Stop the calls in progress, since the host is gone, and wait for another host.

        `HostChannel` calls this when it is closed: its host is gone, or `connect` replaces it.
        """
        self.channel = None
        for call in list(self.calls):
            self.abandon(call)
        self.calls = {}
        if self.listener is None:
            self.die()  # No other host can ever come.
        self.orphaned = self.loop.later(self.options["orphan"], self.die)

    def reap(self, wake: int) -> None:
        """Reap ended children: our own, and orphans that the kernel gave to us.

        The loop calls this after each SIGCHLD, which writes to the descriptor `wake`.
        """
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

    def carry_out(self, body: list) -> None:
        """Carry out one frame of the host: [number of the call, operation, argument]. `HostChannel.read` calls this.

        Every error of an operation becomes the failure of its call, with a code by which the host chooses the class of
        its exception.
        """
        if not isinstance(body, list) or len(body) != 3 or not isinstance(body[0], int):
            # The peer is not a host, so none of its frames can be understood.
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
        """Send the host a frame of a call; do nothing if there is no host. A result or a failure ends the call.

        `kind` is `RESULT`, `FAILURE`, `CHUNK` or `CREDIT`.
        """
        if kind in (RESULT, FAILURE):
            self.calls.pop(call, None)
        if self.channel is not None:
            self.channel.send(call, kind, body)

    def replier(self, call: int) -> object:
        """Return a function `(kind, body)` that sends a frame of this call, as long as its host is connected.

        Commands and waiters get it, because they answer after the operation has returned. The next host numbers its
        calls from 1 again, so an answer to an earlier host would be taken for another call's.
        """
        epoch = self.epoch
        return lambda kind, body: self.reply(call, kind, body) if epoch == self.epoch else None

    def abandon(self, call: int) -> None:
        """Stop the work of a call whose result nobody waits for any more. Jobs and sessions go on.

        The host cancels a call after its deadline, and when its caller is cancelled. At the end of a host, all of its
        calls are abandoned.
        """
        work = self.calls.pop(call, None)
        if work is not None:
            work.cancel()

    def resolve(self, path: str) -> str:
        """Return a path as absolute. A relative path begins at the working directory.

        Only parts `.` and empty parts inside the path are left out, so that it stays short. The kernel decides the
        meaning of `..` after a link, and of a final slash.
        """
        if path.startswith("/"):
            return path
        *folders, last = path.split("/")
        return os.path.join(self.workdir, *[part for part in folders if part not in ("", ".")], last)


class Listener:
    """Waits on an abstract socket for hosts that take over, after the agent's own host is gone or has lost its link.

    The address is bound before any command runs, so that no command can take it.
    """

    def __init__(self, agent: object, address: str) -> None:
        """Bind the abstract socket `address` and listen. `agent` is the `BoxAgent`, whose method `run` makes this."""
        self.agent = agent
        self.strangers = 0
        """Connections of programs of the sandbox that have not sent the secret yet."""
        self.socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        self.socket.bind("\0" + address)
        self.socket.listen(8)
        self.socket.setblocking(False)
        agent.loop.watch(self.socket.fileno(), self.accept)

    def accept(self) -> None:
        """Accept a connection, and let it take over if it sends the secret within `SECRET_SECONDS`.

        For a new host, the engine starts a process in the container, and that process connects here. Programs of the
        sandbox can connect as well; the number of their connections is limited. The loop calls this.
        """
        try:
            # Not with the module `socket`, whose import takes as long as the start of Python.
            fd = self.socket._accept()[0]
            connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fd)
        except OSError:
            return
        inside = not from_outside(connection)
        if inside and self.strangers >= MAX_STRANGERS:
            connection.close()
            return
        secret = self.agent.options["secret"].encode()
        connection.setblocking(False)
        got = bytearray()

        def prove() -> None:
            """Read bytes, and compare them with the secret when there are as many. If they are equal, connect the host.

            The loop calls this when bytes arrive. Other bytes, or the end of the connection before, close it.
            """
            try:
                # No byte after the secret: the first frame of the host may follow at once.
                piece = connection.recv(len(secret) - len(got))
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            got.extend(piece)
            if piece and len(got) < len(secret):
                return
            self.agent.loop.cancel(timer)
            self.strangers -= inside
            self.agent.loop.watch(connection.fileno())
            if compare_digest(bytes(got), secret):
                fd = os.dup(connection.fileno())
                connection.close()
                self.agent.connect(fd, fd)
            else:
                connection.close()

        def give_up() -> None:
            """Close a connection that did not send the secret in time. The timer calls this; `prove` cancels it."""
            self.strangers -= inside
            self.agent.loop.watch(connection.fileno())
            connection.close()

        self.strangers += inside  # True counts as 1, False as 0.
        timer = self.agent.loop.later(SECRET_SECONDS, give_up)
        self.agent.loop.watch(connection.fileno(), prove)


def from_outside(connection: object) -> bool:
    """Return True if the peer was started by the engine: its parent is not a process of the sandbox.

    Only connections of other peers are limited, so that commands cannot keep a host out. A command cannot fake this:
    a process of the sandbox that loses its parent becomes our child.
    """
    # Process id, user id and group id, with 4 bytes each. A process outside our namespace is seen as 0.
    peer = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    try:
        return Stat(int.from_bytes(peer[:4], sys.byteorder)).parent == 0
    except (OSError, ValueError, IndexError):
        return False


def texts(argument: dict) -> dict:
    """Decode the texts in the argument of an operation, in place, and return it.

    Texts arrive as bytes, because names and commands may not be UTF-8.
    """
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

        prctl = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # 2: RTLD_NOW
        _ctypes.call_function(prctl, (PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        return _ctypes.call_function(prctl, (PR_SET_DUMPABLE, 0, 0, 0, 0)) == 0
    except Exception:
        # Small images have no ctypes, and the library could be anything.
        return False


def main(options: dict) -> None:
    """Run the agent for ever. The loader calls this function. `options` are the fields of the host's `Options`."""
    BoxAgent(options).run()


def hello(agent: object, call: int, argument: dict) -> None:
    """Report facts about this agent, and its open sessions, as the host's `envs.sandbox.engines.bundle.Hello`.

    Each host calls this first, also after a takeover. `writable` is about the working directory, and `life` is the
    number of seconds until the agent ends by itself.
    """
    agent.reply(
        call,
        RESULT,
        {
            "uid": os.getuid(),
            "workdir": agent.workdir,
            "bash": agent.bash is not None,
            "writable": os.access(agent.workdir, os.W_OK | os.X_OK),
            "protected": agent.protected,
            "life": agent.ends - now(),
            "sessions": sorted(agent.shells),
        },
    )


def ping(agent: object, call: int, argument: object) -> None:
    """Reply with the number of running commands. The reply shows the host that the agent's loop is alive."""
    agent.reply(call, RESULT, len(agent.active))


def run(agent: object, call: int, argument: dict) -> None:
    """Run a command to its end. `Command.reaped` sends the result, and `Command` explains the argument."""
    agent.calls[call] = Command(agent, agent.replier(call), argument)


def start(agent: object, call: int, argument: dict) -> None:
    """Start a job and reply with its id. At `MAX_JOBS` jobs, the oldest ended one is forgotten.

    `Command` explains the argument. Raises CallRefusal if all these jobs are running.
    """
    while len(agent.jobs) >= MAX_JOBS:
        ended = [name for name, job in agent.jobs.items() if job.ended_body is not None]
        if not ended:
            raise CallRefusal("limit", "{} jobs are running".format(MAX_JOBS))
        del agent.jobs[ended[0]]
    argument["job"] = True  # `Command` then keeps the result, and does not send it.
    # A random id, so that no job of this sandbox is taken for a job of the sandbox that it replaces.
    name = binascii.hexlify(os.urandom(6)).decode()
    agent.jobs[name] = Command(agent, lambda kind, body: None, argument)
    agent.reply(call, RESULT, name)


def find_job(agent: object, argument: dict) -> Command:
    """Return the job that a call names. Raises CallRefusal if there is none, or if it was forgotten."""
    try:
        return agent.jobs[argument["job"]]
    except KeyError:
        raise CallRefusal("request", "there is no job {}".format(argument["job"]))


def job_poll(agent: object, call: int, argument: dict) -> None:
    """Report if a job is running, and how many bytes it has written to each stream."""
    job = find_job(agent, argument)
    agent.reply(call, RESULT, [job.ended_body is None, job.rings["stdout"].total, job.rings["stderr"].total])


def job_wait(agent: object, call: int, argument: dict) -> None:
    """Reply with the result of a job, at once if it has ended, else at its end."""
    job = find_job(agent, argument)
    reply = agent.replier(call)
    if job.ended_body is not None:
        job.send_result(reply)
    else:
        agent.calls[call] = JobWaiter(job, reply)


def job_signal(agent: object, call: int, argument: dict) -> None:
    """Send a signal, given by name, to the process group of a job. Raises CallRefusal for an unknown name or job."""
    number = getattr(_signal, argument["signal"], None)
    # Handlers are no signals: SIG_IGN has the number of SIGHUP.
    if not argument["signal"].startswith("SIG") or argument["signal"][3:4] == "_" or not isinstance(number, int):
        raise CallRefusal("request", "there is no signal {}".format(argument["signal"]))
    find_job(agent, argument).signal(number)
    agent.reply(call, RESULT, None)


def job_output(agent: object, call: int, argument: dict) -> None:
    """Reply with a range of a job's output: at most `limit` bytes from `offset` on, of the stream `stream`.

    The result has the offset at which the bytes begin (see `Ring.part`), and the bytes written to the stream so far.
    The pieces are always labelled `stdout`: a call asks for one stream, and the host knows for which.
    """
    ring = find_job(agent, argument).rings[argument["stream"]]
    offset, data = ring.part(argument["offset"], argument["limit"])
    for at in range(0, len(data), PIECE):
        agent.reply(call, CHUNK, ["stdout", data[at : at + PIECE]])
    agent.reply(call, RESULT, [offset, ring.total])


def session_open(agent: object, call: int, argument: dict) -> None:
    """Open a session, and reply with the number of its restarts, which is 0.

    `Shell` adds itself to `agent.shells`. Raises CallRefusal if the name is in use, or the shell cannot be started.
    """
    name = argument["name"]
    if name in agent.shells:
        raise CallRefusal("busy", "a session named {!r} is open".format(name))
    agent.reply(call, RESULT, Shell(agent, name).restarts)


def find_shell(agent: object, argument: dict) -> Shell:
    """Return the session that a call names. Raises CallRefusal if it is not open."""
    if argument["name"] not in agent.shells:
        raise CallRefusal("gone", "there is no session named {!r}".format(argument["name"]))
    return agent.shells[argument["name"]]


def session_run(agent: object, call: int, argument: dict) -> None:
    """Run a command in a session, after the session's earlier commands. `Shell.finish` sends the result.

    The argument has the `name` of the session, and the fields that `Running` explains.
    """
    shell = find_shell(agent, argument)
    running = Running(shell, agent.replier(call), argument)
    agent.calls[call] = running
    shell.run(running)


def session_interrupt(agent: object, call: int, argument: dict) -> None:
    """Interrupt the running command like ctrl-C. Replies True if there is one."""
    agent.reply(call, RESULT, find_shell(agent, argument).interrupt())


def session_close(agent: object, call: int, argument: dict) -> None:
    """Close a session and end its processes. Does nothing if it is not open."""
    if argument["name"] in agent.shells:
        agent.shells[argument["name"]].close()
    agent.reply(call, RESULT, None)


def read(agent: object, call: int, argument: dict) -> None:
    """Reply with a range of bytes of a file, and with values that identify the file, as `read_file` returns them.

    The argument has `path`, and `offset` and `limit` in bytes; a `limit` above `READ_LIMIT` is lowered.
    """
    limit = min(argument["limit"], READ_LIMIT)
    data, identity = read_file(agent.resolve(argument["path"]), argument["offset"], limit)
    for at in range(0, len(data), PIECE):
        agent.reply(call, CHUNK, ["stdout", data[at : at + PIECE]])
    agent.reply(call, RESULT, identity)


def write(agent: object, call: int, argument: dict) -> None:
    """Begin to write a file. Its bytes follow with the operation `data`, and the last ones with `eof`.

    `eof` sends the result. The argument has the `path`, `mode` and `append` that `Write` explains.
    """
    agent.calls[call] = Write(agent.resolve(argument["path"]), argument["mode"], argument["append"])


def list_entries(agent: object, call: int, argument: dict) -> None:
    """Reply with the entries of the folder `path`, in chunks of many entries. Each entry is as `describe` makes it."""
    list_folder(agent.resolve(argument["path"]), lambda batch: agent.reply(call, CHUNK, ["list", batch]))
    agent.reply(call, RESULT, None)


def work(agent: object, call: int, argument: dict) -> None:
    """Run one of the agent's functions on a path in a child process, since it may need much time and memory.

    The child's standard input or output carries the archive of `receive` and `send`. `most`, only for `send`, is the
    most bytes that the files of the tree may have. The working directory is never removed: later commands begin there,
    and the call raises CallRefusal.
    """
    path = agent.resolve(argument["path"])
    if argument["function"] == "remove" and contains(path, agent.workdir):
        raise CallRefusal("file", "{}: is or contains the working directory".format(path))
    functions = {"remove": remove, "send": send_tree, "receive": receive_tree, "restore": restore_tree}
    function = functions[argument["function"]]
    more = [argument["most"]] if "most" in argument else []
    # `Command` takes a function instead of a program for a worker.
    argument["function"] = lambda: function(path, *more)
    agent.calls[call] = Command(agent, agent.replier(call), argument)


def data(agent: object, call: int, argument: bytes) -> None:
    """Take input for the command of a call, or bytes for the file of a call. Dropped if the call has ended."""
    target = agent.calls.get(call)
    if isinstance(target, Write):
        target.add(argument)
        agent.reply(call, CREDIT, len(argument))
    elif isinstance(target, Command) and target.feed is not None:
        target.feed.add(argument)  # It gives the credit when the command has read the bytes.


def eof(agent: object, call: int, argument: bytes) -> None:
    """Take the last input for a command, or the last bytes of a file, which is then moved into its place.

    Dropped if the call has ended. A file that cannot be completed fails its call.
    """
    target = agent.calls.get(call)
    if isinstance(target, Write):
        target.add(argument)
        target.commit()
        agent.reply(call, RESULT, None)
    elif isinstance(target, Command) and target.feed is not None:
        target.feed.add(argument, True)


def credit(agent: object, call: int, argument: int) -> None:
    """Let a command send `argument` more bytes of streamed output: the host has taken as many."""
    target = agent.calls.get(call)
    if isinstance(target, Command):
        target.add_credit(argument)


def cancel(agent: object, call: int, argument: object) -> None:
    """Cancel the call with this number: nobody waits for its result any more. No frame answers this."""
    agent.abandon(call)


OPERATIONS = {
    "hello": hello,
    "ping": ping,
    "run": run,
    "start": start,
    "job_poll": job_poll,
    "job_wait": job_wait,
    "job_signal": job_signal,
    "job_output": job_output,
    "session_open": session_open,
    "session_run": session_run,
    "session_interrupt": session_interrupt,
    "session_close": session_close,
    "read": read,
    "write": write,
    "list": list_entries,
    "work": work,
    "data": data,
    "eof": eof,
    "credit": credit,
    "cancel": cancel,
}
"""Function of each operation, by the name that the host sends.

Its arguments are the `BoxAgent`, the number of the call, and the argument that the host sent: mostly a dict, which has
gone through `texts`. A CallRefusal or OSError that it raises becomes the failure of the call."""
