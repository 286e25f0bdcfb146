"""The operations that the host can call, one function each. A function answers its call, or its command does."""

import _signal
import binascii
import os

from envs.sandbox.agent.archives import receive_tree, restore_tree, send_tree
from envs.sandbox.agent.command import CREDIT, RESULT, Command
from envs.sandbox.agent.files import READ_LIMIT, Write, list_folder, read_file, remove
from envs.sandbox.agent.process import now
from envs.sandbox.agent.shell import Running, Shell
from envs.sandbox.agent.wire import PIECE, CallRefusal

MAX_JOBS = 1000
"""Background jobs that are remembered. The oldest ended jobs are forgotten first."""


def hello(agent: object, call: int, argument: dict) -> None:
    """Report facts about this agent, and its open sessions."""
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
    """Reply, which shows that the loop is alive."""
    agent.reply(call, RESULT, len(agent.active))


def run(agent: object, call: int, argument: dict) -> None:
    """Run a command to its end."""
    agent.calls[call] = Command(agent, agent.replier(call), argument)


def start(agent: object, call: int, argument: dict) -> None:
    """Start a job and reply with its id."""
    while len(agent.jobs) >= MAX_JOBS:
        ended = [name for name, job in agent.jobs.items() if job.ended_body is not None]
        if not ended:
            raise CallRefusal("limit", "{} jobs are running".format(MAX_JOBS))
        del agent.jobs[ended[0]]
    argument["keep"] = True
    # A random id: a sandbox that is created again counts its calls from 1.
    name = binascii.hexlify(os.urandom(6)).decode()
    agent.jobs[name] = Command(agent, lambda kind, body: None, argument)
    agent.reply(call, RESULT, name)


def find_job(agent: object, argument: dict) -> Command:
    """Return the job that a call names."""
    try:
        return agent.jobs[argument["job"]]
    except KeyError:
        raise CallRefusal("request", "there is no job {}".format(argument["job"]))


def job_poll(agent: object, call: int, argument: dict) -> None:
    """Report if a job is running, and how many bytes it has written to each stream."""
    job = find_job(agent, argument)
    agent.reply(call, RESULT, [job.ended_body is None, job.rings["stdout"].total, job.rings["stderr"].total])


def job_wait(agent: object, call: int, argument: dict) -> None:
    """Reply with the result when a job has ended."""
    job = find_job(agent, argument)
    reply = agent.replier(call)
    if job.ended_body is not None:
        job.send_result(reply)
    else:
        job.waiters.append(lambda: job.send_result(reply))


def job_signal(agent: object, call: int, argument: dict) -> None:
    """Send a signal, given by name, to the process group of a job."""
    number = getattr(_signal, argument["signal"], None)
    # Handlers are no signals: SIG_IGN has the number of SIGHUP.
    if not argument["signal"].startswith("SIG") or argument["signal"][3:4] == "_" or not isinstance(number, int):
        raise CallRefusal("request", "there is no signal {}".format(argument["signal"]))
    find_job(agent, argument).signal(number)
    agent.reply(call, RESULT, None)


def job_output(agent: object, call: int, argument: dict) -> None:
    """Reply with a range of a job's output."""
    ring = find_job(agent, argument).rings[argument["stream"]]
    offset, data = ring.part(argument["offset"], argument["limit"])
    for at in range(0, len(data), PIECE):
        agent.reply(call, 2, ["stdout", data[at : at + PIECE]])
    agent.reply(call, RESULT, [offset, ring.total])


def session_open(agent: object, call: int, argument: dict) -> None:
    """Open a session; with `again`, an open one of this name is accepted."""
    name = argument["name"]
    if name in agent.shells:
        if not argument.get("again"):
            raise CallRefusal("busy", "a session named {!r} is open".format(name))
    else:
        Shell(agent, name)
    agent.reply(call, RESULT, agent.shells[name].restarts)


def find_shell(agent: object, argument: dict) -> Shell:
    """Return the session that a call names."""
    if argument["name"] not in agent.shells:
        raise CallRefusal("gone", "there is no session named {!r}".format(argument["name"]))
    return agent.shells[argument["name"]]


def session_run(agent: object, call: int, argument: dict) -> None:
    """Run a command in a session."""
    shell = find_shell(agent, argument)
    running = Running(shell, agent.replier(call), argument)
    agent.calls[call] = (shell, running)
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
    """Reply with bytes of a file."""
    limit = min(argument["limit"], READ_LIMIT)
    data, identity = read_file(agent.resolve(argument["path"]), argument["offset"], limit)
    for at in range(0, len(data), PIECE):
        agent.reply(call, 2, ["stdout", data[at : at + PIECE]])
    agent.reply(call, RESULT, identity)


def write(agent: object, call: int, argument: dict) -> None:
    """Begin to write a file; its bytes follow."""
    agent.calls[call] = Write(agent.resolve(argument["path"]), argument["mode"], argument["append"])


def list_entries(agent: object, call: int, argument: dict) -> None:
    """Reply with the entries of a folder."""
    list_folder(agent.resolve(argument["path"]), lambda batch: agent.reply(call, 2, ["list", batch]))
    agent.reply(call, RESULT, None)


def work(agent: object, call: int, argument: dict) -> None:
    """Run one of the agent's functions on a path in a child process, since it may need much time and memory."""
    path = agent.resolve(argument["path"])
    functions = {"remove": remove, "send": send_tree, "receive": receive_tree, "restore": restore_tree}
    function = functions[argument["function"]]
    more = [argument["most"]] if "most" in argument else []
    argument["function"] = lambda: function(path, *more)
    agent.calls[call] = Command(agent, agent.replier(call), argument)


def data(agent: object, call: int, argument: bytes) -> None:
    """Take input of a command, or bytes of a file."""
    work = agent.calls.get(call)
    if isinstance(work, Write):
        work.add(argument)
        agent.reply(call, CREDIT, len(argument))
    elif isinstance(work, Command) and work.feed is not None:
        work.feed.add(argument)


def eof(agent: object, call: int, argument: bytes) -> None:
    """Take the last input or bytes."""
    work = agent.calls.get(call)
    if isinstance(work, Write):
        work.add(argument)
        work.commit()
        agent.reply(call, RESULT, None)
    elif isinstance(work, Command) and work.feed is not None:
        work.feed.add(argument, True)


def credit(agent: object, call: int, argument: int) -> None:
    """Take credit for output from the host."""
    work = agent.calls.get(call)
    if isinstance(work, Command):
        work.add_credit(argument)


def cancel(agent: object, call: int, argument: object) -> None:
    """Cancel a call whose result is no longer awaited."""
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
"""Function of each operation, by the name that the host sends."""
