"""What ended commands have left behind, which is ended before the next one begins."""

import _signal
import time

from envs.sandbox.agent.proc import adopted, number_of, processes
from envs.sandbox.agent.process import send_signal
from envs.sandbox.agent.wire import CallRefusal

LOOKS, LOOK_PAUSE = 300, 0.001
"""How often it is looked for what earlier commands have left, and seconds for it to die between two looks."""


def end_leftovers(agent: object, shell: object = None) -> None:
    """Kill what ended commands have left behind, before the next one begins: it could tamper with that.

    Left behind is what has lost its parent and belongs to no running command or job, nor to what another session
    than `shell` is doing. Raises Refusal when it cannot be ended.
    """
    ended = set()
    for _ in range(LOOKS):
        left = leftovers(agent, shell) - ended
        if not left:
            return
        living = {stat.pid for stat in processes()}
        # What these had started is ours by now, but may not have been when we looked. Ours keep their numbers until
        # they are reaped.
        ended.update((left - living).intersection(adopted()))
        send_signal(left & living, _signal.SIGKILL)
        time.sleep(LOOK_PAUSE)
    raise CallRefusal("limit", "what an earlier command left behind multiplies faster than it can be ended")


def leftovers(agent: object, shell: object) -> "set[int]":
    """Of these, also those that have ended and were not reaped."""
    going_on = {command.number for command in agent.active}
    going_on.update(other.number for other in agent.shells.values() if other is not shell and other.current)
    found = {pid for pid in adopted() if pid not in agent.children and number_of(pid) not in going_on}
    return found.union(stat.pid for stat in descendants(found))


def descendants(roots: "set[int]") -> list:
    """Everything that comes from these processes."""
    inside, every, grown = set(roots), processes(), True
    while grown:
        grown = False
        for stat in every:
            if stat.parent in inside and stat.pid not in inside:
                inside.add(stat.pid)
                grown = True
    return [stat for stat in every if stat.pid in inside and stat.pid not in roots]
