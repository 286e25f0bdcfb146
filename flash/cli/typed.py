"""What a person has typed to start this process, for hints that are to be typed again."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import MutableMapping, Sequence
from pathlib import Path

VARIABLE = "FLASH_TYPED"
"""In which `launch.sh` hands over what it was called as, quoted for a shell."""


def typed(argv: Sequence[str], environment: MutableMapping[str, str]) -> list[str]:
    """The words, of a process with these arguments. What it starts does not inherit the variable."""
    if script := environment.pop(VARIABLE, ""):
        return shlex.split(script)
    program, *rest = argv
    # Found through PATH it was called by its name; so is `python -m flash`, for short.
    by_path = Path(program).name == "flash" and program != shutil.which("flash", path=environment.get("PATH"))
    return [program if by_path else "flash", *rest]
