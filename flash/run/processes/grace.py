"""How long processes that were told to end are waited for."""

from __future__ import annotations

import math

from flash.config.tree import Config

SHUTDOWN_MARGIN_S = 30
"""Seconds beyond deadlines.shutdown after which what has not ended is killed: a checkpoint must not be cut off."""


def grace(config: Config) -> int:
    """Seconds in which processes that were told to end do so."""
    return SHUTDOWN_MARGIN_S + math.ceil(config.deadlines.shutdown)
