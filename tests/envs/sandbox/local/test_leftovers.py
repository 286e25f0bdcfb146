"""What an ended command has left behind is ended, however it comes and goes while it is looked for."""

from types import SimpleNamespace

import pytest

from envs.sandbox.agent import main
from envs.sandbox.agent.command import Refusal


class World:
    """Processes by number, with their parents, of which the agent is 1; after each look at it something may happen."""

    def __init__(self, parents, then=()):
        self.parents, self.then = dict(parents), list(then)
        self.zombies, self.killed, self.looks = set(), [], 0

    def adopted(self):
        found = [pid for pid, parent in self.parents.items() if parent == 1]
        self.happen()
        return found

    def processes(self):
        found = [SimpleNamespace(pid=pid, parent=parent) for pid, parent in self.parents.items()]
        self.happen()
        return [stat for stat in found if stat.pid not in self.zombies]

    def number_of(self, pid):
        self.happen()

    def happen(self):
        self.looks += 1
        if self.then:
            self.then.pop(0)(self)

    def forks(self, pid, child):
        """It does, and ends: the agent gets its child."""
        if pid not in self.zombies:
            self.parents[child] = pid
            self.end(pid)

    def end(self, pid):
        self.zombies.add(pid)
        self.parents.update({child: 1 for child, parent in self.parents.items() if parent == pid})

    def send_signal(self, pids, number):
        for pid in sorted(set(pids) - self.zombies):
            self.killed.append(pid)
            self.end(pid)


def ended_by_agent(monkeypatch, world):
    agent = main.Agent.__new__(main.Agent)
    agent.active, agent.shells, agent.children = set(), {}, {5: "a shell"}
    for name in ("adopted", "processes", "number_of", "send_signal"):
        monkeypatch.setattr(main, name, getattr(world, name))
    monkeypatch.setattr(main, "LOOK_PAUSE", 0)
    agent.end_leftovers()
    return world


@pytest.mark.parametrize("moment", range(9))
def test_what_forks_and_ends_while_it_is_looked_at_does_not_escape(monkeypatch, moment):
    then = [lambda world: None] * moment + [lambda world: world.forks(10, 11)]
    world = ended_by_agent(monkeypatch, World({5: 1, 10: 1}, then))
    assert world.parents.keys() - world.zombies == {5}
    assert world.killed in ([10], [11])


def test_a_chain_of_forks_is_followed(monkeypatch):
    then = [lambda world, pid=pid: world.forks(pid, pid + 1) for pid in range(10, 30)]
    world = ended_by_agent(monkeypatch, World({5: 1, 10: 1}, then))
    assert world.parents.keys() - world.zombies == {5}


def test_nothing_is_killed_where_nothing_is_left(monkeypatch):
    assert ended_by_agent(monkeypatch, World({5: 1, 6: 5})).killed == []


def test_what_cannot_be_ended_is_told(monkeypatch):
    world = World({5: 1, 10: 1})
    world.end = lambda pid: None
    with pytest.raises(Refusal, match="multiplies faster"):
        ended_by_agent(monkeypatch, world)
