"""A user without the rights of root, for tests of files that may not be read."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

NOBODY = 65534


@contextmanager
def as_ordinary_user() -> Generator[None]:
    """Give up the rights of root in the block: root may read every file."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
