"""Sandboxes: containers with a shell, files and background jobs, for code that nobody has read.

`open_sandboxes` gives out sandboxes of this machine's engine, or of a service as `SandboxClient` does. Each is a
`Sandbox`; who needs only a part of it asks for `Commands`, `Shells`, `Files`, `Snapshots` or `Lifecycle`. Names are
loaded when they are first used: importing this package imports neither an engine's client nor a web server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envs.sandbox.api import (
        Chunk,
        Exec,
        FileInfo,
        Job,
        JobStatus,
        Output,
        Result,
        Session,
        Snapshot,
        Spec,
        Terminal,
    )
    from envs.sandbox.open import Location, open_sandboxes
    from envs.sandbox.remote.client import SandboxClient
    from envs.sandbox.sandbox import Commands, Files, Lifecycle, Sandbox, SandboxProvider, Shells, Snapshots
    from flash.errors import (
        SandboxBusyError,
        SandboxClosedError,
        SandboxError,
        SandboxFileError,
        SandboxLimitError,
        SandboxLostError,
        SandboxRefusedError,
        SandboxStartError,
        SandboxTimeoutError,
    )

__all__ = [
    # what is asked for, and what comes back
    "Spec",
    "Exec",
    "Result",
    "Chunk",
    "JobStatus",
    "Output",
    "FileInfo",
    "Snapshot",
    # a sandbox, and its parts
    "Sandbox",
    "Commands",
    "Shells",
    "Files",
    "Snapshots",
    "Lifecycle",
    "Session",
    "Job",
    "Terminal",
    # where sandboxes come from
    "SandboxProvider",
    "Location",
    "open_sandboxes",
    "SandboxClient",
    # what goes wrong
    "SandboxError",
    "SandboxRefusedError",
    "SandboxStartError",
    "SandboxBusyError",
    "SandboxLostError",
    "SandboxClosedError",
    "SandboxTimeoutError",
    "SandboxLimitError",
    "SandboxFileError",
]

_ELSEWHERE = {
    "Location": "envs.sandbox.open",
    "open_sandboxes": "envs.sandbox.open",
    "SandboxClient": "envs.sandbox.remote.client",
} | dict.fromkeys(
    ("Sandbox", "SandboxProvider", "Commands", "Shells", "Files", "Snapshots", "Lifecycle"), "envs.sandbox.sandbox"
)
"""Modules of the names that are neither of `envs.sandbox.api` nor errors."""


def __getattr__(name: str) -> Any:
    """A public name, from its module."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "flash.errors" if name.endswith("Error") else _ELSEWHERE.get(name, "envs.sandbox.api")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
