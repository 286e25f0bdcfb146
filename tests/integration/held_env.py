"""An environment that goes only as far as a test lets it, and whose rewards tell who made a sample."""

from __future__ import annotations

import os
from pathlib import Path

import anyio

from envs.arithmetic import Arithmetic, ArithmeticOptions
from flash.environment import Info, is_held_out

VARIABLE = "TEST_BONUS"
"""The part of the rewards that tells the samples of one command from those of the others."""
LOOK_S = 0.05


class HeldOptions(ArithmeticOptions, frozen=True, kw_only=True):
    """Of `Held`."""

    gate: str
    """A file that says how many episodes of the training each node may begin."""


class Held(Arithmetic):
    """Arithmetic, with half a point for a right answer, and the bonus."""

    begun = 0
    """Of this process, to train on."""

    def __init__(self, options: HeldOptions) -> None:
        super().__init__(options)
        self._gate = Path(options.gate)

    async def reset(self, seed: int) -> tuple[str, Info]:
        """Wait for the gate, but in an evaluation."""
        Held.begun += not is_held_out(seed)
        number = 0 if is_held_out(seed) else Held.begun
        while int(self._gate.read_text() or "0") < number:  # noqa: ASYNC110  # nobody tells us
            await anyio.sleep(LOOK_S)
        return await super().reset(seed)

    def _reward(self, answer: str, solution: str) -> float:
        return super()._reward(answer, solution) / 2 + float(os.environ.get(VARIABLE, "0"))


def held(text: str, gate: Path) -> str:
    """The text of a configuration, with this environment in the place of arithmetic."""
    for old, new in (
        ("envs.arithmetic:Arithmetic", f"{__name__}:Held"),
        ("digits = 1", f'digits = 1, gate = "{gate}"'),
    ):
        text = text.replace(old, new)
    return f"{text}\n[deadlines]\nenv_step = 600\n"
