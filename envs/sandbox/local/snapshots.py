"""How the images that snapshots are, are named and labelled."""

from __future__ import annotations

from uuid import uuid4

from envs.sandbox.api import Spec

SNAPSHOT_NAME = "localhost/flash-snapshot"
"""Name of the images that snapshots are; the tag tells them apart."""

SNAPSHOT_LABEL = "flash.snapshot"
"""On snapshots, with the sandbox that they were made of."""
INSTANCE_LABEL = "flash.snapshot.life"
"""On snapshots, with the process that made them: it alone could tell of them."""
INSTANCE = uuid4().hex
"""This process, as that label says it."""


def from_snapshot(spec: Spec) -> bool:
    """Whether a sandbox of this spec begins with the files of another one."""
    return spec.image.startswith(SNAPSHOT_NAME)
