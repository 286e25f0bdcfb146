"""Every error Flash raises on purpose.

    FlashError
    ├── ConfigError          wrong input, found before anything starts
    ├── CheckpointError      a checkpoint cannot be written or read
    ├── RunDirectoryError    metrics, samples or plots cannot be written, or another launch writes them
    ├── RecordingError       recorded batches are missing or damaged
    ├── RequeueError         SLURM requeues the job, and it gets nowhere
    ├── WeightsError         a published version is damaged or was loaded wrongly
    │   └── VersionGoneError   the trainer does not hold the version any more
    ├── ContractError        an invariant of the run was broken: a bug, the run stops
    ├── EnvError             an environment broke its interface or raised
    │   ├── PromptTooLongError  a prompt leaves no room for an answer
    │   ├── RewardError      the reward is missing, not a number, or its verifier failed
    │   └── SandboxError             a sandbox cannot do what was asked
    │       ├── SandboxStartError    it could not be made or started
    │       ├── SandboxLostError     it is gone with what was in it, or its channel broke
    │       ├── SandboxClosedError   it was closed, by its owner or by a limit on its life
    │       ├── SandboxTimeoutError  it did not answer in time (also a TimeoutError)
    │       ├── SandboxBusyError     no room for it now, or its name is taken
    │       ├── SandboxLimitError    a cap on size or number forbids it
    │       ├── SandboxFileError     a path is not what the call needs
    │       └── SandboxRefusedError  the request is wrong, or not allowed here
    ├── EngineError          an engine cannot serve a request
    │   ├── EngineRefusal    the request is wrong, and the engine well
    │   ├── PoisonError      the request has killed engines, one after the other
    │   └── EngineDeadError  an engine is gone and takes its requests with it
    ├── BreakerError         the run only fails: too many samples given up in a row
    ├── AlarmError           an alarm has stopped the run, which left a checkpoint
    └── TransportError       a peer cannot be reached, trusted or understood
        ├── PeerLostError    an established connection broke
        │   ├── IncarnationOverError  the trainer ranks that one belongs to are given up
        │   └── RanksGoneError   the trainer ranks of a node are gone, and do not start again
        ├── CollectiveError  a trainer rank lost another one in the middle of a collective
        ├── ProtocolError    a peer said what it may not, and was disconnected
        └── DeadlineError    a wait outlived its deadline (also a TimeoutError)

A message says what was wrong, what was expected and what to do; it can be sent and printed, whatever it quotes. `fatal`
tells the launcher whether a restart can help: a wrong config stays wrong, a lost peer may come back.
"""

from __future__ import annotations

import signal
from typing import ClassVar


def encodable(text: str) -> str:
    """A text without lone surrogates, which can be neither sent nor printed: bytes of a file's name that are no UTF-8
    become some in Python."""
    return text.encode("utf-8", "backslashreplace").decode()


class FlashError(Exception):
    """Base of all errors raised on purpose."""

    fatal: ClassVar[bool] = True
    """True when restarting the processes cannot help."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(encodable(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(FlashError, ValueError):
    """The input is wrong; nothing was started."""


class CheckpointError(FlashError):
    """A checkpoint could not be written or read; the previous one is untouched."""


class RunDirectoryError(FlashError):
    """The run directory cannot be written, or another launch writes it."""


class RecordingError(FlashError):
    """Recorded batches are missing or damaged."""


class RequeueError(FlashError):
    """A requeued job is stopped again and again before it has got any further."""


class WeightsError(FlashError):
    """A weight version failed its checksum or its canary."""


class VersionGoneError(WeightsError):
    """A worker of an engine requested a version so late that the trainer holds newer ones only."""


class ContractError(FlashError):
    """One of the run's own invariants does not hold."""


class EnvError(FlashError):
    """An environment raised, or returned something its interface does not allow."""


class PromptTooLongError(EnvError):
    """A prompt leaves no room for an answer."""


class RewardError(EnvError):
    """A reward is not a finite number, or its verifier failed."""


class SandboxError(EnvError):
    """A sandbox cannot do what was asked. Never a statement about the program that was to run in it."""


class SandboxStartError(SandboxError):
    """A sandbox could not be made or started; nothing of it is left."""

    fatal = False


class SandboxLostError(SandboxError):
    """A sandbox is gone without being asked to, or cannot be reached. The call may or may not have been carried out."""

    fatal = False


class SandboxClosedError(SandboxError):
    """A sandbox was closed, by its owner or because its life or its idle time was over."""


class SandboxTimeoutError(SandboxError, TimeoutError):
    """A sandbox, or a job in it, did not end a wait in time."""

    fatal = False


class SandboxBusyError(SandboxError):
    """There is no room now, or the name is taken; later it may work."""

    fatal = False


class SandboxLimitError(SandboxError):
    """More bytes, entries, processes or time than is allowed."""


class SandboxFileError(SandboxError):
    """A path does not exist, is of the wrong kind, or may not be used."""


class SandboxRefusedError(SandboxError):
    """The request is wrong, or asks for what this engine or this configuration does not give."""


class EngineError(FlashError):
    """An engine refused or failed one request."""


class EngineRefusal(EngineError):
    """A request is wrong: too long, or with a token that the model does not have. Others are served."""


class PoisonError(EngineError):
    """Engines died under a request, one after the other: it is given to no other one."""


class EngineDeadError(EngineError):
    """An engine process is gone."""

    fatal = False


class AlarmError(FlashError):
    """An alarm of `alarms.stop` was given; the run has left a checkpoint, and can be resumed."""


class BreakerError(FlashError):
    """So many samples failed in a row that going on would only waste compute."""


class TransportError(FlashError):
    """A peer cannot be reached, does not prove the token, or sends what we cannot read."""


class PeerLostError(TransportError):
    """An established connection ended."""

    fatal = False


class IncarnationOverError(PeerLostError):
    """The hub listens no more to the trainer ranks that this one has started with: it has to end."""


class RanksGoneError(PeerLostError):
    """The trainer ranks of a node are gone and do not start again, so no node loop has anything to wait for."""

    fatal = True


class CollectiveError(TransportError):
    """A collective of the trainer ranks failed: mostly the echo of another rank's end."""

    fatal = False


class ProtocolError(TransportError):
    """A peer said what no peer of this run says; its connection is closed."""


class DeadlineError(TransportError, TimeoutError):
    """A wait outlived its deadline.

    Built from what was waited for, how long, and where to look.
    """

    fatal = False

    def __init__(self, waited_for: str, seconds: float, look_at: str) -> None:
        super().__init__(f"waited {seconds:g} s for {waited_for}; look at {look_at}")


HINTS = {
    signal.SIGKILL: ", perhaps because memory ran out: see dmesg",
    signal.SIGABRT: ", perhaps as no thread could be started: see its output, `ulimit -u` and the cgroup's pids.max",
}
"""Usual causes of signals that nobody has sent on purpose. Libraries abort when a thread cannot be started."""


def how_it_ended(exit_code: int) -> str:
    """Return a phrase that says how a process has ended. An exit code below 0 is the signal that killed it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    number = -exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    return f"was killed by signal {number} ({name}){HINTS.get(number, '')}"


def error_of(name: str, message: str) -> FlashError | None:
    """The error that another process raised, by the name of its class; None where that is no class of this tree."""
    kind = globals().get(name)
    if not isinstance(kind, type) or not issubclass(kind, FlashError):
        return None
    # Past __init__, whose arguments differ between the classes and are part of the message already.
    error = kind.__new__(kind)
    error.args = (message,)
    return error
