"""Answers that are used again: the same call in the same state has the same answer, in every episode of a node.

The state of a sandbox is the calls that have been made in it, in their order. A call whose answer is known is not
carried out: what it would have changed is made up for before the next call that is. So an episode that does what
another one did needs no sandbox at all.

Law: an answer is of the state that it is given in. A call that did not come to its end, by a deadline or an error, may
have changed anything: from then on the episode's calls are all carried out, and none is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any

import anyio
import msgspec

from envs.tools.runner import Cut, Runner

MOST = 4096
"""Answers kept by a node for the tools of one environment, the last used ones."""


class Answers:
    """What calls have been answered, on one node."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: OrderedDict[bytes, str] = OrderedDict()

    def get(self, key: bytes) -> str | None:
        """The answer of this key, if it is known."""
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def keep(self, key: bytes, answer: str) -> None:
        """Know an answer."""
        self._known[key] = answer
        self._known.move_to_end(key)
        if len(self._known) > self._most:
            self._known.popitem(last=False)


class _State:
    def __init__(self) -> None:
        self.digest = b""
        self.sure = True
        """Every call so far has come to its end."""
        self.owed: list[tuple[Runner, dict[str, Any]]] = []
        """Calls that were answered without being carried out."""
        self.lock = anyio.Lock()


class Memory:
    """One episode's calls."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._states: dict[str, _State] = {}
        self.used_again = 0

    async def call(self, runner: Runner, arguments: dict[str, Any]) -> str:
        """The answer to a call, known or not."""
        if runner.state is None:
            return await runner.call(arguments)
        name = _digest([runner.name, arguments])
        if not runner.state:
            known = self._known(name)
            if known is None:
                known = await runner.call(arguments)
                self._keep(name, known)
            return known
        state = self._states.setdefault(runner.state, _State())
        async with state.lock:
            return await self._in_state(state, runner, arguments, name)

    async def _in_state(self, state: _State, runner: Runner, arguments: dict[str, Any], name: bytes) -> str:
        key = _digest([runner.state, state.digest, name])
        answer = self._known(key) if state.sure else None
        if answer is not None:
            if runner.changes:
                state.owed.append((runner, arguments))
        else:
            was_sure, state.sure = state.sure, False
            while state.owed:
                skipped, given = state.owed.pop(0)
                was_sure = not isinstance(await skipped.call(given), Cut) and was_sure
            answer = await runner.call(arguments)
            state.sure = was_sure and not isinstance(answer, Cut)
            if state.sure:
                self._keep(key, answer)
        if runner.changes:
            state.digest = key
        return answer

    def _keep(self, key: bytes, answer: str) -> None:
        if not isinstance(answer, Cut):
            self._answers.keep(key, answer)

    def _known(self, key: bytes) -> str | None:
        answer = self._answers.get(key)
        self.used_again += answer is not None
        return answer


def _digest(value: list[Any]) -> bytes:
    return blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).digest()
