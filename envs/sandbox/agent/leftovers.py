"""What ended commands have left behind, which is ended before the next one begins."""

import _signal
import time

from envs.sandbox.agent.proc import adopted, number_of, processes
from envs.sandbox.agent.process import send_signal
from envs.sandbox.agent.wire import CallRefusal

LOOKS = 300
"""How often it is looked for what earlier commands have left."""


class System:
    """What is asked of this machine's processes, and done to them."""

    adopted, processes, number_of = staticmethod(adopted), staticmethod(processes), staticmethod(number_of)
    send_signal = staticmethod(send_signal)
    pause = 0.001
    """Seconds for processes to die between two looks."""


def end_leftovers(agent: object, shell: object = None, system: object = System) -> None:
    """Kill what ended commands have left behind, before the next one begins: it could tamper with that.

    Left behind is what has lost its parent and belongs to no running command or job, nor to what another session
    than `shell` is doing. Raises Refusal when it cannot be ended.
    """
    ended = set()
    for _ in range(LOOKS):
        left = leftovers(agent, shell, system) - ended
        if not left:
            return
        living = {stat.pid for stat in system.processes()}
        # What these had started is ours by now, but may not have been when we looked. Ours keep their numbers until
        # they are reaped.
        ended.update((left - living).intersection(system.adopted()))
        system.send_signal(left & living, _signal.SIGKILL)
        time.sleep(system.pause)
    raise CallRefusal("limit", "what an earlier command left behind multiplies faster than it can be ended")


def leftovers(agent: object, shell: object, system: object) -> "set[int]":
    """Of these, also those that have ended and were not reaped."""
    going_on = {command.number for command in agent.active}
    going_on.update(other.number for other in agent.shells.values() if other is not shell and other.current)
    found = {pid for pid in system.adopted() if pid not in agent.children and system.number_of(pid) not in going_on}
    return found.union(stat.pid for stat in descendants(found, system))


def descendants(roots: "set[int]", system: object = System) -> list:
    """Everything that comes from these processes."""
    inside, every, grown = set(roots), system.processes(), True
    while grown:
        grown = False
        for stat in every:
            if stat.parent in inside and stat.pid not in inside:
                inside.add(stat.pid)
                grown = True
    return [stat for stat in every if stat.pid in inside and stat.pid not in roots]
