"""Rows of a data set: their prompts, their division into training and held-out rows, and their assignment to seeds.

Environments over data sets and folders of tasks use it, such as `envs.dataset`, `envs.code` and `envs.swe`.

Held-out rows are for evaluation only. No prompt is on both sides, so that an evaluation never shows a trained prompt.
The run gives each problem a seed: training seeds count from 0, and held-out ones from `HELD_OUT`. Consecutive training
seeds go through the training rows in a shuffled order without repetition. Each epoch, one pass through all training
rows, has another order.
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

KEPT = 64
"""Number of data sets whose rows a process keeps: far more than the environments of a mixture. A data set that is not
kept is read again by its next episode."""

ORDERS_KEPT = 3 * KEPT
"""Number of shuffled orders that a process keeps: for each data set this epoch's, the next one's and the held-out
rows'."""

Prompt = str | tuple[Message, ...]
"""Prompt of a row: text, or the messages of a complete chat."""


class SplitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of every environment over a data set.

    Raises:
        ConfigError: `held_out_fraction` is not between 0 and 1.
    """

    prompt_column: str | None = None
    """Column with the prompt: text, or the messages of a chat. None: `prompt`, `question` or another usual name."""
    held_out_path: str | None = None
    """Data set of the same form for evaluation. None: a part of the training data set is held out."""
    held_out_fraction: float = 0.05
    """Share of the distinct prompts that is held out if `held_out_path` is None."""
    system_prompt: str | None = None
    """Text before each prompt: a system message, or plain text before a plain prompt."""
    template: Literal["chat", "plain"] = "chat"
    """`chat` sends a text prompt as a user message through the model's chat template; `plain` sends the bare text."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        if self.held_out_path is None and not 0 < self.held_out_fraction < 1:
            raise ConfigError(f"held_out_fraction must lie between 0 and 1, but is {self.held_out_fraction!r}")


class HasPrompt(Protocol):
    """A row with a prompt. The division needs nothing else of a row."""

    @property
    def prompt(self) -> Prompt:
        """Prompt of the row. Rows with equal prompts are on the same side."""
        ...


R = TypeVar("R", bound=HasPrompt)


class Split(msgspec.Struct, Generic[R], frozen=True):
    """Training rows and held-out rows of a data set."""

    train: list[R]
    """Rows for training."""
    held_out: list[R]
    """Rows for evaluation only. No prompt of them is in `train`."""

    def of_seed(self, seed: int) -> R:
        """Return the row of a seed. Seeds from `HELD_OUT` on have held-out rows."""
        return (self.held_out if is_held_out(seed) else self.train)[self.place(seed)]

    def place(self, seed: int) -> int:
        """Return the index of a seed's row among the rows of its side.

        Training seeds beyond the last row start a new epoch. Held-out seeds beyond it repeat the rows in one order.
        """
        if is_held_out(seed):
            count, epoch, place = len(self.held_out), -1, (seed - HELD_OUT) % len(self.held_out)
        else:
            count, (epoch, place) = len(self.train), divmod(seed, len(self.train))
        return int(_order(count, epoch)[place])


def divide(rows: Sequence[R], held_out: Sequence[R] | None, fraction: float, name: str) -> Split[R]:
    """Divide rows into training and held-out ones.

    If `held_out` is None, a `fraction` of the distinct prompts is held out, and at least one prompt. Otherwise
    `held_out` has the rows for evaluation, and rows with the same prompts are removed from the training rows.

    Raises:
        ConfigError: a side would be empty. The message gives `name`, the data set's name.
    """
    if held_out is not None:
        aside = {row.prompt for row in held_out}
    else:
        # The hash of the prompt decides, so that rows with the same prompt stay together, at any position in the file.
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
    """Return a prompt as an observation: text if `template` is `plain`, and messages if it is `chat`.

    `plain` joins the texts of the messages of a chat with line ends. The system prompt comes first. If the chat begins
    with a system message, both become one message, because many templates refuse a second one.
    """
    if template == "plain":
        text = prompt if isinstance(prompt, str) else "\n".join(message.content for message in prompt)
        return (system_prompt or "") + text
    messages = [Message("user", prompt)] if isinstance(prompt, str) else list(prompt)
    if not system_prompt:
        return messages
    if messages and messages[0].role == "system":
        return [Message("system", f"{system_prompt}\n\n{messages[0].content}"), *messages[1:]]
    return [Message("system", system_prompt), *messages]


@functools.lru_cache(maxsize=ORDERS_KEPT)
def _order(count: int, epoch: int) -> Int32Array:
    """Return the shuffled order of an epoch, int32 [count]. Epoch −1 is the one order of the held-out rows."""
    return np.random.default_rng([count, epoch + 1]).permutation(count).astype(np.int32)


def _hash(prompt: Prompt) -> bytes:
    """Return a hash of a prompt that is the same in every process, unlike Python's own."""
    return hashlib.blake2b(msgspec.json.encode(prompt), digest_size=16).digest()
