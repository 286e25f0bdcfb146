"""The folder of this user for files that are needed only while the machine runs, and that no other user may touch.

`envs.sandbox.open` puts the lock files of pools inside programs there; a service has its lock in its state folder.
`envs.sandbox.engines.seccomp` puts the system call filters for Podman there.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from flash.errors import ConfigError


def user_folder() -> Path:
    """Return the folder in XDG_RUNTIME_DIR, or else in the folder for temporary files. Created on first use.

    Raises:
        ConfigError: the folder cannot be created, is no folder, belongs to another user, or is open to other users.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"flash-sandbox-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror}; set XDG_RUNTIME_DIR") from error
    # Not `stat`: a link that another user has put here must not be followed.
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        reason = "is no folder"
    elif status.st_uid != os.getuid():
        reason = "belongs to another user"
    elif status.st_mode & 0o077:
        reason = f"is open to other users (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return folder
    raise ConfigError(f"{folder} {reason}; remove it, or set XDG_RUNTIME_DIR")
