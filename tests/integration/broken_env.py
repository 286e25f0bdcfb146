"""An environment that fails in its first call."""

from __future__ import annotations

from typing import Any


class BrokenEnv:
    def __init__(self, digits: int = 1) -> None:
        self.digits = digits

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        raise OSError("BrokenEnv always fails")

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        raise AssertionError("reset already failed")

    async def close(self) -> None:
        return None
