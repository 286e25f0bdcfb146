"""Rows of a data set, divided into training and held-out rows and dealt to seeds, and their prompts.

Training seeds that follow each other walk through the training rows in a shuffled order without repetition, and through
another order in the next epoch. No prompt is on both sides.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Generic, Literal, Protocol, TypeVar

import msgspec
import numpy as np

from flash.environment import HELD_OUT, is_held_out
from flash.errors import ConfigError
from flash.types import Int32Array, Message

Prompt = str | tuple[Message, ...]
"""A row's prompt: text, or a whole chat."""


class SplitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of every environment over a data set.

    Raises:
        ConfigError: no share of the prompts would be kept aside.
    """

    prompt_column: str | None = None
    """Column with the prompt: text, or the messages of a chat. None: `prompt`, `question` or another usual name."""
    held_out_path: str | None = None
    """Another data set of the same kind, for evaluation. None: a part of the first one is kept aside."""
    held_out_fraction: float = 0.05
    """The share of the distinct prompts that is kept aside then."""
    system_prompt: str | None = None
    """Comes before each prompt: as system message, or as text in front of plain text."""
    template: Literal["chat", "plain"] = "chat"
    """`chat` sends a text prompt as user message through the model's chat template, `plain` as it is."""

    def __post_init__(self) -> None:
        if self.held_out_path is None and not 0 < self.held_out_fraction < 1:
            raise ConfigError(f"held_out_fraction must lie between 0 and 1, but is {self.held_out_fraction!r}")


class HasPrompt(Protocol):
    """A row, as far as dividing looks at it."""

    @property
    def prompt(self) -> Prompt: ...


R = TypeVar("R", bound=HasPrompt)


class Split(msgspec.Struct, Generic[R], frozen=True):
    """The divided data set."""

    train: list[R]
    held_out: list[R]

    def of_seed(self, seed: int) -> R:
        """Return the row of a seed."""
        return (self.held_out if is_held_out(seed) else self.train)[self.place(seed)]

    def place(self, seed: int) -> int:
        """Return the place of a seed's row among the rows of its side."""
        if is_held_out(seed):
            count, epoch, place = len(self.held_out), -1, (seed - HELD_OUT) % len(self.held_out)
        else:
            count, (epoch, place) = len(self.train), divmod(seed, len(self.train))
        return int(_order(count, epoch)[place])


def divide(rows: Sequence[R], held_out: Sequence[R] | None, fraction: float, name: str) -> Split[R]:
    """Divide rows; without held-out rows of their own, a `fraction` of the distinct prompts is kept aside.

    Raises:
        ConfigError: a side would be empty. `name` is the data set's, for the message.
    """
    if held_out is not None:
        aside = {row.prompt for row in held_out}
    else:
        # By the hash of the prompt, so that rows with the same prompt stay together, wherever they stand in the file.
        prompts = sorted({row.prompt for row in rows}, key=_hash)
        aside = set(prompts[: max(1, round(fraction * len(prompts)))])
        held_out = [row for row in rows if row.prompt in aside]
    train = [row for row in rows if row.prompt not in aside]
    if not train or not held_out:
        raise ConfigError(
            f"{name} leaves {len(train)} rows to train on and {len(held_out)} held out; both need one, and rows "
            "with a held-out prompt are not trained on"
        )
    return Split(train, list(held_out))


def show_prompt(prompt: Prompt, system_prompt: str | None, template: str) -> str | list[Message]:
    """Return a prompt as an observation: `plain` text, or messages for the model's `chat` template."""
    if template == "plain":
        text = prompt if isinstance(prompt, str) else "\n".join(message.content for message in prompt)
        return (system_prompt or "") + text
    system = [Message("system", system_prompt)] if system_prompt else []
    return [*system, *([Message("user", prompt)] if isinstance(prompt, str) else prompt)]


@functools.lru_cache(maxsize=4)
def _order(count: int, epoch: int) -> Int32Array:
    """int32 [count]: the shuffled order of an epoch; −1 is the one order of the held-out rows."""
    return np.random.default_rng([count, epoch + 1]).permutation(count).astype(np.int32)


def _hash(prompt: Prompt) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(prompt), digest_size=16).digest()
