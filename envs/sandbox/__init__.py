"""Sandboxes: containers with a shell, files and background jobs, in which untrusted code runs.

`open_sandboxes` provides sandboxes of this machine's engine or of a service; `SandboxClient` is the client of a
service. Each is a `Sandbox`. A function that needs only one part of it takes `Commands`, `Shells`, `Files`, `Snapshots`
or `Lifecycle`. Names are imported when they are first used, so importing this package imports neither an engine's
client nor a web server.
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
    # requests and results
    "Spec",
    "Exec",
    "Result",
    "Chunk",
    "JobStatus",
    "Output",
    "FileInfo",
    "Snapshot",
    # a sandbox and its parts
    "Sandbox",
    "Commands",
    "Shells",
    "Files",
    "Snapshots",
    "Lifecycle",
    "Session",
    "Job",
    "Terminal",
    # providers of sandboxes
    "SandboxProvider",
    "Location",
    "open_sandboxes",
    "SandboxClient",
    # errors
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
"""Modules of the public names that are neither in `envs.sandbox.api` nor errors."""


def __getattr__(name: str) -> Any:
    """Return a public name from its module, which is imported now. Raises AttributeError for any other name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "flash.errors" if name.endswith("Error") else _ELSEWHERE.get(name, "envs.sandbox.api")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
