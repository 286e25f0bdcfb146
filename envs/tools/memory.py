"""Reuse of tool answers: an equal call in the same state has the same answer, in every episode of a node.

`envs.tools.env` uses it if the option `cache` is set: one `Answers` for each node, one `Memory` for each episode. The
state of a sandbox is the sequence of the calls that were made in it. A call whose answer is known is skipped: it is not
carried out at once. If it may change the state, the sandbox lacks its changes. So it is carried out later, before the
next call whose answer is not known. An episode that repeats the calls of another one therefore needs no sandbox at all.

Law: an answer is reused only in the state in which it was given. A call that did not finish, because of a deadline or
an error, may have changed anything. From then on, all calls of the episode in this state are carried out, and their
answers are not kept.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any

import anyio
import msgspec

from envs.tools.runner import Cut, Runner

MOST = 4096
"""Number of answers that a node keeps for the tools of one environment; the least recently used are dropped."""


class Answers:
    """Known answers of one node, by a digest of the call and of the state in which it was made."""

    def __init__(self, most: int = MOST) -> None:
        """Create an empty table for at most `most` answers."""
        self._most = most
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """Answers by key, the least recently used one first."""

    def get(self, key: bytes) -> str | None:
        """Return the answer for a key; None if it is unknown."""
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def add(self, key: bytes, answer: str) -> None:
        """Add an answer, and drop the least recently used one if there are too many."""
        self._known[key] = answer
        self._known.move_to_end(key)
        if len(self._known) > self._most:
            self._known.popitem(last=False)


class _State:
    """Calls of one episode that depend on the same state, such as the files of its sandbox (`Runner.state`)."""

    def __init__(self) -> None:
        self.digest = b""
        """Digest of all calls so far that may have changed the state."""
        self.sure = True
        """True if every call so far has finished. Only then are answers reused and kept."""
        self.skipped: list[tuple[Runner, dict[str, Any]]] = []
        """Calls that may change the state and were answered without being carried out, in order."""
        self.lock = anyio.Lock()
        """Lock that makes the calls of one turn, which arrive together, run one after the other in this state."""


class Memory:
    """Tool calls of one episode, answered from the node's known answers where possible."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._states: dict[str, _State] = {}
        """Calls of this episode in each state, by `Runner.state`."""
        self.used_again = 0
        """Number of answers of this episode that were reused."""

    async def call(self, runner: Runner, arguments: dict[str, Any]) -> str:
        """Return the answer to a call: a known one, or the result of carrying the call out.

        Only the arguments count for a tool without a state. A tool with an unknown state (None) is always carried out.
        Calls of one turn arrive together: those in the same state wait for each other, others run at the same time.
        Raises the errors of the tool.
        """
        if runner.state is None:
            return await runner.call(arguments)
        name = _digest([runner.name, arguments])
        if not runner.state:
            known = self._known(name)
            if known is None:
                known = await runner.call(arguments)
                self._add(name, known)
            return known
        state = self._states.setdefault(runner.state, _State())
        async with state.lock:
            return await self._in_state(state, runner, arguments, name)

    async def _in_state(self, state: _State, runner: Runner, arguments: dict[str, Any], name: bytes) -> str:
        """Return the answer to a call that depends on a state. `name` is the digest of the call.

        A known call is skipped. Before an unknown call is carried out, all skipped calls are, so that the state is the
        one in which the call was made.
        """
        key = _digest([runner.state, state.digest, name])
        answer = self._known(key) if state.sure else None
        if answer is not None:
            if runner.changes:
                state.skipped.append((runner, arguments))
        else:
            # If a call below raises an error, the state stays uncertain.
            was_sure, state.sure = state.sure, False
            while state.skipped:
                runner_before, arguments_before = state.skipped.pop(0)
                was_sure = not isinstance(await runner_before.call(arguments_before), Cut) and was_sure
            answer = await runner.call(arguments)
            state.sure = was_sure and not isinstance(answer, Cut)
            if state.sure:
                self._add(key, answer)
        if runner.changes:
            state.digest = key
        return answer

    def _add(self, key: bytes, answer: str) -> None:
        """Add an answer to the node's known ones, unless a deadline ended the call."""
        if not isinstance(answer, Cut):
            self._answers.add(key, answer)

    def _known(self, key: bytes) -> str | None:
        """Return the known answer for a key and count its reuse; None if it is unknown."""
        answer = self._answers.get(key)
        self.used_again += answer is not None
        return answer


def _digest(value: list[Any]) -> bytes:
    """Return a digest that is the same for equal values in every process."""
    return blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).digest()
