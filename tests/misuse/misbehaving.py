"""User code that misbehaves in each of the ways of a table. `Misbehaving` and `Blocking` are environments."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from fractions import Fraction
from typing import Any

import anyio
import numpy as np

from flash.errors import EnvError, RewardError, SandboxBusyError


class TimeoutException(BaseException):
    """An exception like those with which some packages end a call that takes too long."""


class UnspeakableError(Exception):
    """An error whose message raises."""

    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


class SlyError(EnvError):
    """An `EnvError` whose message raises."""

    def __str__(self) -> str:
        raise GeneratorExit


def unpicklable() -> Exception:
    class Local(Exception):
        def __reduce__(self) -> Any:
            raise SystemExit(1)

    return Local(lambda: None)


def deep() -> Exception:
    error: Exception = ValueError("the innermost")
    for _ in range(2000):
        error = ExceptionGroup("level", [error])
    return error


def recursive() -> None:
    recursive()


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "Exception": lambda: ValueError("bad value"),
    "GeneratorExit": GeneratorExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "StopIteration": lambda: StopIteration("over"),
    "StopAsyncIteration": StopAsyncIteration,
    "BaseException": lambda: TimeoutException("too long"),
    "CancelledError": asyncio.CancelledError,
    "TimeoutError": TimeoutError,
    "group": lambda: ExceptionGroup("tasks", [KeyError("x")]),
    "base group": lambda: BaseExceptionGroup("tasks", [KeyboardInterrupt(), asyncio.CancelledError()]),
    "deep group": deep,
    "unspeakable": UnspeakableError,
    "unspeakable of ours": SlyError,
    "unpicklable": unpicklable,
    "long": lambda: ValueError("x" * 5_000_000),
    "ours, long": lambda: EnvError("x" * 5_000_000),
    "surrogates": lambda: ValueError("\udcff\0"),
    "reward": lambda: RewardError("no judge"),
    "sandbox": lambda: SandboxBusyError("full"),
    "memory": MemoryError,
    "assertion": AssertionError,
}
"""Makers of exceptions that a user's code may raise."""


async def swallows() -> None:
    while True:
        try:
            await asyncio.sleep(1000)
        except BaseException:
            continue


async def swallows_in_a_scope() -> None:
    with anyio.move_on_after(0.05):
        await swallows()


async def swallows_in_a_group() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(swallows)
        tasks.start_soon(swallows)


async def shields() -> None:
    with anyio.CancelScope(shield=True):
        await anyio.sleep(1000)


async def shields_natively() -> None:
    await asyncio.shield(asyncio.create_task(asyncio.sleep(1000)))


async def retries() -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.sleep, 1000)


async def cleans_up_for_ever() -> None:
    try:
        await anyio.sleep(1000)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(1000)


async def spins() -> None:
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(0)


async def waits_on_a_future() -> None:
    await asyncio.get_running_loop().create_future()


HANGS: dict[str, tuple[Callable[[], Awaitable[None]], bool]] = {
    "sleep": (lambda: asyncio.sleep(1000), True),
    "future": (waits_on_a_future, True),
    "swallows": (swallows, True),
    "swallows in a scope": (swallows_in_a_scope, False),
    "swallows in a group": (swallows_in_a_group, False),
    "shields": (shields, True),
    "shields natively": (shields_natively, True),
    "retries": (retries, False),
    "cleans up for ever": (cleans_up_for_ever, True),
    "spins": (spins, False),
}
"""Coroutines that do not end by themselves, each with True if time can pass on the virtual clock meanwhile."""

ENDS = ("sleep", "future", "shields natively")
"""Hangs that end when they are cancelled."""


class Unshowable:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise KeyboardInterrupt

    __str__ = __repr__


class EvilFloat(float):
    """A number whose conversion raises."""

    def __float__(self) -> float:
        raise SystemExit(4)


REWARDS: dict[str, Any] = {
    "nan": math.nan,
    "inf": math.inf,
    "none": None,
    "text": "1.0",
    "bytes": b"1",
    "list": [1.0],
    "huge": 10**400,
    "complex": 1j,
    "numpy nan": np.float64("nan"),
    "array": np.ones(2),
    "unshowable": Unshowable(),
    "evil": EvilFloat(1.0),
    "coroutine function": swallows,
}
"""Rewards that are refused."""

GOOD_REWARDS: dict[str, Any] = {
    "bool": True,
    "int": 1,
    "numpy": np.float32(1.0),
    "numpy bool": np.bool_(True),
    "numpy int": np.int64(1),
    "fraction": Fraction(1),
}
"""Rewards that count as 1."""

RESULTS: dict[str, Any] = {
    "none": None,
    "four": ("", 0.0, True, {}),
    "list": ["", 0.0, True, False, {}],
    "bytes": (b"", 0.0, True, False, {}),
    "flags": ("", 0.0, 1, 0, {}),
    "info": ("", 0.0, True, False, None),
    "metrics": ("", 0.0, True, False, {"metrics": {"a": math.nan}}),
    "metrics of a kind": ("", 0.0, True, False, {"metrics": {"a": EvilFloat(1.0)}}),
    "note": ("", 0.0, True, False, {"note": 3}),
    "surrogate": ("\udcff", 0.0, False, False, {}),
    "unshowable": Unshowable(),
}
"""Results of `step` that are refused."""


class Misbehaving:
    """An environment that misbehaves in one method; the other methods play a turn.

    Args:
        place: the method, `start` for the constructor.
        act: what it does there instead.
    """

    def __init__(self, place: str, act: Callable[[], Any]) -> None:
        self.place = place
        self.act = act
        self.closed = 0
        if place == "start":
            act()

    async def reset(self, seed: int) -> Any:
        return await self._at("reset", ("1+1=", {}))

    async def step(self, action: str) -> Any:
        return await self._at("step", ("", 1.0, True, False, {}))

    async def close(self) -> None:
        self.closed += 1
        await self._at("close", None)

    async def _at(self, place: str, otherwise: Any) -> Any:
        if place != self.place:
            return otherwise
        result = self.act()
        return await result if asyncio.iscoroutine(result) else result


class Blocking:
    """The blocking form of `Misbehaving`."""

    def __init__(self, place: str, act: Callable[[], Any]) -> None:
        self.place = place
        self.act = act
        self.closed = 0
        if place == "start":
            act()

    def reset(self, seed: int) -> Any:
        return self.act() if self.place == "reset" else ("1+1=", {})

    def step(self, action: str) -> Any:
        return self.act() if self.place == "step" else ("", 1.0, True, False, {})

    def close(self) -> None:
        self.closed += 1
        if self.place == "close":
            self.act()


class Contextual(Misbehaving):
    """Sets a context variable in `reset` that is the reward of `step`."""

    seen: ContextVar[float] = ContextVar("seen")

    def __init__(self) -> None:
        super().__init__("", lambda: None)

    async def reset(self, seed: int) -> Any:
        self.seen.set(float(seed))
        return "1+1=", {}

    async def step(self, action: str) -> Any:
        return "", self.seen.get(0.0), True, False, {}


def raising(make: Callable[[], BaseException]) -> Callable[[], Any]:
    """Return a function that raises what `make` makes."""

    def act() -> Any:
        raise make()

    return act


def sleeps_in_its_thread() -> None:
    time.sleep(1000)
