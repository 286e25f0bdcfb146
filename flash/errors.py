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
    │       ├── SandboxTimeoutError  it did not answer in time (also a TimeoutError)
    │       ├── SandboxBusyError     there is no room for it now, or its name is taken
    │       ├── SandboxLimitError    a limit on size or number forbids the request
    │       ├── SandboxFileError     a path is not what the call needs
    │       └── SandboxRefusedError  the request is wrong, or not allowed here
    ├── EngineError          an engine cannot serve a request
    │   ├── EngineRefusal    the request is wrong, and the engine is well
    │   ├── PoisonError      several engines died under the same request
    │   └── EngineDeadError  an engine process is gone, and its requests with it
    ├── BreakerError         too many samples in a row were given up
    ├── AlarmError           an alarm has stopped the run, which left a checkpoint
    └── TransportError       a peer cannot be reached, trusted or understood
        ├── PeerLostError    an established connection broke
        │   ├── IncarnationOverError  the hub has given up the trainer ranks that this rank belongs to
        │   └── RanksGoneError   the trainer ranks of a node are gone and will not be restarted
        ├── CollectiveError  a trainer rank lost another rank during a collective
        ├── ProtocolError    a peer sent what the protocol does not allow, and was disconnected
        └── DeadlineError    a wait took longer than its deadline (also a TimeoutError)

A message says what was wrong, what was expected and what to do. It can be sent and printed, whatever text it quotes.
`fatal` tells the launcher whether a restart can help: a wrong configuration stays wrong, a lost peer may come back.
"""

from __future__ import annotations

import signal
from typing import ClassVar


def encodable(text: str) -> str:
    """Return a text with lone surrogates escaped, since they can be neither sent nor printed.

    Python uses them for bytes of a file's name that are not UTF-8.
    """
    return text.encode("utf-8", "backslashreplace").decode()


class FlashError(Exception):
    """Base of all errors that Flash raises on purpose."""

    fatal: ClassVar[bool] = True
    """True if restarting the processes cannot help."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(encodable(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(FlashError, ValueError):
    """The input is wrong; nothing was started."""


class CheckpointError(FlashError):
    """A checkpoint could not be written or read; the previous one is untouched."""


class RunDirectoryError(FlashError):
    """The run directory cannot be written, or another launch writes to it."""


class RecordingError(FlashError):
    """Recorded batches are missing or damaged."""


class RequeueError(FlashError):
    """A requeued job was stopped again and again before it made any progress."""


class WeightsError(FlashError):
    """A weight version failed its checksum or its canary."""


class VersionGoneError(WeightsError):
    """A worker of an engine requested a version so late that the trainer holds newer ones only."""


class ContractError(FlashError):
    """An invariant of the run does not hold. This is a bug."""


class EnvError(FlashError):
    """An environment raised, or returned something its interface does not allow."""


class PromptTooLongError(EnvError):
    """A prompt leaves no room for an answer."""


class RewardError(EnvError):
    """A reward is not a finite number, or its verifier failed."""


class SandboxError(EnvError):
    """A sandbox cannot do what was requested. It says nothing about the program that was to run in the sandbox."""


class SandboxStartError(SandboxError):
    """A sandbox could not be made or started. Nothing of it is left."""

    fatal = False


class SandboxLostError(SandboxError):
    """A sandbox has ended without a request, or cannot be reached. The call may or may not have been carried out."""

    fatal = False


class SandboxClosedError(SandboxError):
    """A sandbox was closed: by its owner, or because its lifetime or idle time has passed."""


class SandboxTimeoutError(SandboxError, TimeoutError):
    """A sandbox, or a job in it, did not answer or end in time."""

    fatal = False


class SandboxBusyError(SandboxError):
    """There is no room now, or the name is taken. Later it may work."""

    fatal = False


class SandboxLimitError(SandboxError):
    """A request needs more bytes, entries, processes or time than is allowed."""


class SandboxFileError(SandboxError):
    """A path does not exist, is of the wrong kind, or may not be used."""


class SandboxRefusedError(SandboxError):
    """The request is wrong, or this container engine or configuration does not offer what it needs."""


class EngineError(FlashError):
    """An engine refused or failed one request."""


class EngineRefusal(EngineError):
    """A request is wrong: too long, or with a token that the model does not have. The engine serves other requests."""


class PoisonError(EngineError):
    """Several engines died under the same request, one after the other. It is given to no other engine."""


class EngineDeadError(EngineError):
    """An engine process is gone."""

    fatal = False


class AlarmError(FlashError):
    """An alarm of `alarms.stop` was raised. The run has left a checkpoint and can be resumed."""


class BreakerError(FlashError):
    """Too many samples failed in a row: to continue would only waste compute."""


class TransportError(FlashError):
    """A peer cannot be reached, does not prove that it has the token, or sends what cannot be read."""


class PeerLostError(TransportError):
    """An established connection ended."""

    fatal = False


class IncarnationOverError(PeerLostError):
    """The hub has given up the trainer ranks that this rank was started with, so the rank has to end."""


class RanksGoneError(PeerLostError):
    """The trainer ranks of a node are gone and will not be restarted, so its node loop has nothing to wait for."""

    fatal = True


class CollectiveError(TransportError):
    """A collective of the trainer ranks failed, mostly because another rank has ended."""

    fatal = False


class ProtocolError(TransportError):
    """A peer sent what the protocol does not allow. Its connection is closed."""


class DeadlineError(TransportError, TimeoutError):
    """A wait took longer than its deadline.

    Args:
        waited_for: what was waited for, as a noun phrase.
        seconds: the deadline.
        look_at: where the user can find the cause.
    """

    fatal = False

    def __init__(self, waited_for: str, seconds: float, look_at: str) -> None:
        super().__init__(f"waited {seconds:g} s for {waited_for}; look at {look_at}")


SIGNAL_CAUSES: dict[int, str] = {
    signal.SIGKILL: ", perhaps because memory ran out: see dmesg",
    signal.SIGABRT: ", perhaps since no thread could be started: see its output, `ulimit -u` and the cgroup's pids.max",
}
"""Usual causes of signals that were not sent on purpose. Libraries abort if a thread cannot be started."""


def describe_exit_code(exit_code: int) -> str:
    """Return a phrase that says how a process has ended. An exit code below 0 is the signal that killed it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    number = -exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    return f"was killed by signal {number} ({name}){SIGNAL_CAUSES.get(number, '')}"


def error_of(name: str, message: str) -> FlashError | None:
    """Rebuild the error that another process raised, from the name of its class. None: there is no such class here."""
    kind = globals().get(name)
    if not isinstance(kind, type) or not issubclass(kind, FlashError):
        return None
    # __init__ is left out: its arguments differ between the classes, and are part of the message already.
    error = kind.__new__(kind)
    error.args = (message,)
    return error
