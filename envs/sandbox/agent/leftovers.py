"""Processes that ended commands have left behind. They are killed before the next command begins."""

import _signal
import time

from envs.sandbox.agent.proc import adopted, number_of, processes
from envs.sandbox.agent.process import send_signal
from envs.sandbox.agent.wire import CallRefusal

LOOKS = 300
"""Most rounds of killing before the command is refused."""


class System:
    """The functions on this machine's processes; tests replace them."""

    adopted, processes, number_of = staticmethod(adopted), staticmethod(processes), staticmethod(number_of)
    send_signal = staticmethod(send_signal)
    pause = 0.001
    """Seconds between two rounds, for processes to die."""


def end_leftovers(agent: object, shell: object = None, system: object = System) -> None:
    """Kill the processes that ended commands left behind; they could tamper with the next command.

    Such a process has lost its parent, and belongs neither to a running command or job nor to a command of a session
    other than `shell`. Raises CallRefusal if they cannot be ended.
    """
    ended = set()
    for _ in range(LOOKS):
        left = leftovers(agent, shell, system) - ended
        if not left:
            return
        living = {stat.pid for stat in system.processes()}
        # Children of these are adopted by us, but may not have been when we looked. Adopted processes keep their ids
        # until they are reaped.
        ended.update((left - living).intersection(system.adopted()))
        system.send_signal(left & living, _signal.SIGKILL)
        time.sleep(system.pause)
    raise CallRefusal("limit", "what an earlier command left behind multiplies faster than it can be ended")


def leftovers(agent: object, shell: object, system: object) -> "set[int]":
    """Return the ids of left-behind processes, including adopted ones that have ended and were not reaped."""
    going_on = {command.number for command in agent.active}
    going_on.update(other.number for other in agent.shells.values() if other is not shell and other.current)
    found = {pid for pid in system.adopted() if pid not in agent.children and system.number_of(pid) not in going_on}
    return found.union(stat.pid for stat in descendants(found, system))


def descendants(roots: "set[int]", system: object = System) -> list:
    """Return all living descendants of these processes."""
    inside, every, grown = set(roots), system.processes(), True
    while grown:
        grown = False
        for stat in every:
            if stat.parent in inside and stat.pid not in inside:
                inside.add(stat.pid)
                grown = True
    return [stat for stat in every if stat.pid in inside and stat.pid not in roots]
