"""Errors: every error that Flash raises on purpose.

    FlashError
    ├── ConfigError          the input is wrong, and nothing was started
    ├── CheckpointError      a checkpoint cannot be written or read
    ├── RunDirectoryError    metrics, samples or plots cannot be written, or another launch writes them
    ├── RecordingError       recorded batches are missing or damaged
    ├── RequeueError         SLURM has requeued the job again and again without any progress
    ├── WeightsError         a published version is damaged or was loaded wrongly
    │   └── VersionGoneError   the trainer does not hold the version any more
    ├── ContractError        an invariant of the run does not hold: this is a bug, and the run stops
    ├── EnvError             an environment raised an error or broke its interface
    │   ├── PromptTooLongError  a prompt leaves no room for an answer
    │   ├── RewardError      the reward is missing or not a number, or its verifier failed
    │   └── SandboxError             a sandbox cannot do what was requested
    │       ├── SandboxStartError    it could not be made or started
    │       ├── SandboxLostError     it is gone with its contents, or its connection broke
    │       ├── SandboxClosedError   it was closed, by its owner or because a time limit has passed
    │       ├── SandboxTimeoutError  it did not answer in time
    │       ├── SandboxBusyError     there is no room for it now, or its name is taken
    │       ├── SandboxLimitError    a limit on size or number forbids the request
    │       ├── SandboxFileError     a path is not what the call needs
    │       └── SandboxRefusedError  the request is wrong, or not allowed here
    ├── EngineError          an engine cannot serve a request
    │   ├── EngineRefusal    the request is wrong, and the engine is well
    │   ├── PoisonError      several engines died under the same request
    │   └── EngineDeadError  an engine process is gone, and its requests with it
    ├── BreakerError         too many tasks in a row were given up, or too many groups filtered out
    ├── AlarmError           an alarm has stopped the run, which left a checkpoint
    └── TransportError       a peer cannot be reached, trusted or understood
        ├── PeerLostError    an established connection broke
        │   ├── IncarnationOverError  the hub has given up the trainer ranks that this rank belongs to
        │   └── RanksGoneError   the trainer ranks of a node are gone and will not be restarted
        ├── CollectiveError  a trainer rank lost another rank during a collective
        ├── ProtocolError    a peer sent what the protocol does not allow, and was disconnected
        └── DeadlineError    a wait took longer than its deadline

The *hub* is the process that keeps the state of a run. *Trainer ranks* are the processes that train.

A message says what was wrong, what was expected and what to do. It can always be sent and printed, even if it quotes
text that UTF-8 cannot encode. `FlashError.fatal` tells the launcher whether a restart of the processes can help: a
wrong configuration stays wrong, a lost peer may come back. If a process reports an error to another process, `error_of`
rebuilds the error there. No error is also an OSError, as a TimeoutError would be: code that expects the failure of a
file would take it for one.
"""

from __future__ import annotations

import signal
from typing import ClassVar

import msgspec

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for bytes that it cannot decode. The bytes are no JSON or msgpack of the expected type,
hold text that is not UTF-8, or hold lists that nest too deeply."""


def advice_for_extra(extra: str) -> str:
    """Return how to install the packages of an extra of Flash, for the error message about a missing package.

    The result is a clause without a full stop. An extra is an optional set of packages, such as `view`. Only
    `flash install` brings torch and vLLM, which the extras `train` and `vllm` need, in the builds for this machine.
    """
    if extra in ("train", "vllm"):
        return "`flash install` installs all packages"
    return f"`flash install` installs all packages, and the extra `{extra}` of Flash's wheel only those for this"


def encodable(text: str) -> str:
    """Return a text in which lone surrogates are escaped, because they can be neither sent nor printed.

    Python has such characters in a file's name, for bytes that are not UTF-8.
    """
    return text.encode("utf-8", "backslashreplace").decode()


class FlashError(Exception):
    """Base of all errors that Flash raises on purpose."""

    fatal: ClassVar[bool] = True
    """True if a restart of the processes cannot help."""

    def __init__(self, *args: object) -> None:
        """Keep the arguments as Exception does, but with lone surrogates in texts escaped (`encodable`)."""
        super().__init__(*(encodable(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(FlashError, ValueError):
    """The configuration or another input is wrong; nothing was started."""


class CheckpointError(FlashError):
    """A checkpoint could not be written or read. The previous checkpoint is unchanged."""


class RunDirectoryError(FlashError):
    """A file of a run, or another output file, cannot be read or written, or another launch writes to the run
    directory."""


class RecordingError(FlashError):
    """Recorded batches are missing or damaged."""


class RequeueError(FlashError):
    """SLURM has requeued a job again and again, and each time it was stopped before it made any progress."""


class WeightsError(FlashError):
    """A version of the weights has a wrong checksum, or gives wrong log-probs for the canary, a short fixed text."""


class VersionGoneError(WeightsError):
    """A worker of an engine requested a version of the weights so late that the trainer holds only newer versions."""


class ContractError(FlashError):
    """An invariant of the run does not hold. This is a bug of Flash, and the run stops."""


class EnvError(FlashError):
    """An environment raised an error, or returned something that its interface does not allow."""


class PromptTooLongError(EnvError):
    """A prompt leaves no room for an answer."""


class RewardError(EnvError):
    """A reward is not a finite number, or its verifier failed."""


class SandboxError(EnvError):
    """A sandbox cannot do what was requested. An error of the program that runs in the sandbox is not this error."""


class SandboxStartError(SandboxError):
    """A sandbox could not be made or started. No part of it is left."""

    fatal = False


class SandboxLostError(SandboxError):
    """A sandbox has ended without a request, or cannot be reached. The call may or may not have been carried out."""

    fatal = False


class SandboxClosedError(SandboxError):
    """A sandbox was closed: by its owner, or because its lifetime or idle time has passed."""


class SandboxTimeoutError(SandboxError):
    """A sandbox, or a job in it, did not answer or end in time."""

    fatal = False


class SandboxBusyError(SandboxError):
    """There is no room for the sandbox now, or its name is taken. A later request may succeed."""

    fatal = False


class SandboxLimitError(SandboxError):
    """A request needs more bytes, entries, processes or time than is allowed."""


class SandboxFileError(SandboxError):
    """A path in a sandbox does not exist, is of the wrong kind, or may not be used."""


class SandboxRefusedError(SandboxError):
    """The request to a sandbox is wrong, or its container engine or configuration does not support the request."""


class EngineError(FlashError):
    """An engine refused one request, or failed to serve it."""


class EngineRefusal(EngineError):
    """A request is wrong: too long, or with a token that the model does not have. The engine serves other requests."""


class PoisonError(EngineError):
    """Several engines died under the same request, one after the other. The request is given to no other engine."""


class EngineDeadError(EngineError):
    """An engine process has ended, and its requests with it."""

    fatal = False


class AlarmError(FlashError):
    """An alarm was raised whose reaction is `stop` (`alarms.reactions`). The run has left a checkpoint and can be
    resumed."""


class BreakerError(FlashError):
    """Too many tasks or groups failed in a row, so the run stops: to continue would only waste compute."""


class TransportError(FlashError):
    """A peer cannot be reached, cannot prove that it has the run's token, or sends data that cannot be read."""


class PeerLostError(TransportError):
    """An established connection has ended."""

    fatal = False


class IncarnationOverError(PeerLostError):
    """The hub has given up the trainer ranks that this rank was started with, so the rank has to end."""


class RanksGoneError(PeerLostError):
    """The trainer ranks of a node are gone and will not be restarted, so its node loop has nothing to wait for."""

    fatal = True


class CollectiveError(TransportError):
    """A collective (an operation that all trainer ranks do together) failed, mostly because a rank has ended."""

    fatal = False


class ProtocolError(TransportError):
    """A peer sent a message that the protocol does not allow. Its connection is closed."""


class DeadlineError(TransportError):
    """A wait took longer than its deadline.

    Args:
        waited_for: noun phrase for the awaited event.
        seconds: the deadline, counted from the beginning of the wait.
        look_at: where the user can find the cause.
    """

    fatal = False

    def __init__(self, waited_for: str, seconds: float, look_at: str) -> None:
        super().__init__(f"waited {seconds:g} s for {waited_for}; look at {look_at}")


SIGNAL_CAUSES: dict[int, str] = {
    signal.SIGKILL: ", perhaps because memory ran out: see dmesg",
    signal.SIGABRT: ", perhaps since no thread could be started: see its output, `ulimit -u` and the cgroup's pids.max",
}
"""Usual causes of signals that were not sent on purpose, as ends of a sentence. Many libraries abort the process if
they cannot start a thread."""


def describe_exit_code(exit_code: int) -> str:
    """Return a phrase that says how a process has ended. An exit code of −n means that signal n has killed it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    number = -exit_code
    # Some real-time signals have no name.
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    return f"was killed by signal {number} ({name}){SIGNAL_CAUSES.get(number, '')}"


def error_of(name: str, message: str) -> FlashError | None:
    """Rebuild an error that another process raised, from the name of its class and its message.

    So callers catch it by its type, like an error of their own process. Returns None if this module has no class of
    this name that is a FlashError.
    """
    kind = globals().get(name)
    if not isinstance(kind, type) or not issubclass(kind, FlashError):
        return None
    # `__init__` is not called: its arguments differ between the classes, and the message contains them already.
    error = kind.__new__(kind)
    error.args = (message,)
    return error
