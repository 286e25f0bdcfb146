"""Admission's laws: capacity, answered, fair share, no starvation."""

from __future__ import annotations

from collections import Counter
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from envs.sandbox.pool.admission import Demand, PlaceRequest, SandboxAdmission
from flash.errors import SandboxBusyError, SandboxRefusedError

ONE = Demand(1000, 512)
PATIENCE = 4


def make(hosts: dict[str, Demand], *, patience: int = PATIENCE, max_waiting: int = 10_000) -> SandboxAdmission:
    admission = SandboxAdmission(max_waiting=max_waiting, patience=patience)
    for name, capacity in hosts.items():
        admission.set_host(name, capacity)
    return admission


def many(count: int) -> Demand:
    return Demand(1000 * count, 512 * count)


def granted(admission: SandboxAdmission) -> list[str]:
    return [grant.id for grant in admission.decide()]


class Machine(RuleBasedStateMachine):
    """Any order of orders, ends, and hosts that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = {"a": many(4), "b": many(8)}
        self.admission = make(self.capacity)
        self.waiting: dict[str, Demand] = {}
        self.granted: dict[str, tuple[Demand, str]] = {}
        self.number = 0

    @rule(owner=st.sampled_from("xyz"), size=st.integers(1, 8), priority=st.integers(-1, 1))
    def submit(self, owner, size, priority):
        id = str(self.number)
        self.number += 1
        self.admission.submit(PlaceRequest(id, owner, many(size), priority))
        self.waiting[id] = many(size)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def release(self, data):
        id = data.draw(st.sampled_from(sorted(self.granted)))
        self.admission.remove(id)
        del self.granted[id]

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def put_back(self, data):
        id = data.draw(st.sampled_from(sorted(self.granted)))
        demand, host = self.granted.pop(id)
        self.admission.put_back(id, avoid={host})
        self.waiting[id] = demand

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data):
        id = data.draw(st.sampled_from(sorted(self.waiting)))
        self.admission.remove(id)
        del self.waiting[id]

    @rule(host=st.sampled_from("ab"), accepts=st.booleans())
    def set_host(self, host, accepts):
        self.admission.set_host(host, self.capacity[host], accepts=accepts)

    @rule()
    def decide(self):
        for grant in self.admission.decide():
            self.granted[grant.id] = (self.waiting.pop(grant.id), grant.host)

    @invariant()
    def never_beyond_capacity(self):
        for name, capacity in self.capacity.items():
            used = sum((demand for demand, host in self.granted.values() if host == name), Demand(0, 0))
            assert used.fits(capacity)

    @invariant()
    def every_request_is_in_exactly_one_state(self):
        assert all(self.admission.is_waiting(id) for id in self.waiting)
        assert not any(self.admission.is_waiting(id) for id in self.granted)
        assert sum(self.admission.waiting().values()) == len(self.waiting)

    @invariant()
    def positions_count_the_older_requests(self):
        oldest_first = sorted(self.waiting, key=int)
        assert [self.admission.position(id) for id in oldest_first] == list(range(len(oldest_first)))

    @invariant()
    def the_books_agree(self):
        total = sum((demand for demand, _ in self.granted.values()), Demand(0, 0))
        assert sum(self.admission.usage().values(), Demand(0, 0)) == total
        assert sum((host.granted for host in self.admission.hosts()), Demand(0, 0)) == total

    def teardown(self):
        """Every request is answered once the others give back what they hold."""
        for host, capacity in self.capacity.items():
            self.admission.set_host(host, capacity)
        for _ in range(2 * self.number + 1):
            self.decide()
            for id in list(self.granted):
                self.admission.remove(id)
                del self.granted[id]
        assert not self.waiting


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def overtaken_unfairly(size: int, priority: int, ahead: int, stream: list[tuple[int, int, str]]) -> int:
    """How many younger requests are granted before one of owner x, those of owners with a smaller share left out."""
    admission = make({"a": many(4)})
    held: list[tuple[str, str]] = []
    for number in range(ahead):
        admission.submit(PlaceRequest(f"ahead{number}", "x", ONE))
    admission.submit(PlaceRequest("mine", "x", many(size), priority))
    overtaken = 0
    for number, (other, urgent, owner) in enumerate(stream):
        admission.submit(PlaceRequest(f"{owner}{number}", owner, many(other), urgent))
        shares = Counter({name: usage.millicpus for name, usage in admission.usage().items()})
        for grant in admission.decide():
            if grant.id == "mine":
                return overtaken
            owner_of = "x" if grant.id.startswith("ahead") else grant.id[0]
            overtaken += not grant.id.startswith("ahead") and (owner_of == "x" or shares[owner_of] > shares["x"])
            shares[owner_of] = admission.usage()[owner_of].millicpus
            held.append((grant.id, owner_of))
        if held:
            admission.remove(held.pop(0)[0])
    raise AssertionError("never granted")


def streams(owners: str):
    return st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 3), st.sampled_from(owners)), min_size=200, max_size=200
    )


@pytest.mark.slow
@given(size=st.integers(1, 4), priority=st.integers(-3, 0), ahead=st.integers(0, 5), stream=streams("x"))
@settings(max_examples=40, deadline=None)
def test_no_starvation_whatever_the_owner_asks_for_later(size, priority, ahead, stream):
    """An endless stream of the same owner, of higher priority and any size: late first, then overdue."""
    assert overtaken_unfairly(size, priority, ahead, stream) <= ahead + 2 * PATIENCE + 1


@pytest.mark.slow
@given(size=st.integers(1, 4), priority=st.integers(-3, 0), ahead=st.integers(0, 5), stream=streams("xyz"))
@settings(max_examples=40, deadline=None)
def test_no_starvation_whatever_the_others_ask_for(size, priority, ahead, stream):
    """Each that stays ahead of it, younger ones of its owner included, is itself passed a bounded number of times."""
    assert overtaken_unfairly(size, priority, ahead, stream) <= (ahead + PATIENCE + 1) * (PATIENCE + 1)


@given(
    priorities=st.lists(st.integers(0, 2), min_size=1, max_size=7),
    sizes=st.lists(st.integers(1, 2), min_size=1, max_size=5),
)
@settings(max_examples=20, deadline=None)
def test_fair_share_also_with_a_flood(priorities, sizes):
    """Who asks for hundreds at once gets no more than who asks now and then."""
    admission = make({"a": many(4), "b": many(4)})
    for number in range(400):
        demand, priority = many(sizes[number % len(sizes)]), priorities[number % len(priorities)]
        admission.submit(PlaceRequest(f"x{number}", "x", demand, priority))
    held: list[str] = []
    had: Counter[str] = Counter()
    for number in range(200):
        while admission.waiting().get("y", 0) < 4:
            admission.submit(PlaceRequest(f"y{number}.{admission.waiting().get('y', 0)}", "y", ONE))
        held += granted(admission)
        if number > 20:
            had.update({owner: usage.millicpus for owner, usage in admission.usage().items()})
        admission.remove(held.pop(0))
    assert had["y"] >= 0.8 * had["x"]


def test_fair_share_gives_the_next_place_to_who_has_least():
    admission = make({"a": many(4)}, patience=1000)
    for number in range(6):
        admission.submit(PlaceRequest(f"x{number}", "x", ONE))
    for number in range(2):
        admission.submit(PlaceRequest(f"y{number}", "y", ONE))
    assert Counter(id[0] for id in granted(admission)) == {"x": 2, "y": 2}


def test_fair_share_is_of_who_pays_whatever_names_its_owners_have():
    admission = make({"a": many(24)}, patience=1000)
    for number in range(24):
        admission.submit(PlaceRequest(f"x{number}", f"greedy/name{number}", ONE))
    for number in range(24):
        admission.submit(PlaceRequest(f"y{number}", f"honest/name{number % 2}", ONE))
    assert Counter(id[0] for id in granted(admission)) == {"x": 12, "y": 12}
    held = {owner: usage.millicpus // ONE.millicpus for owner, usage in admission.usage().items()}
    assert [held["honest/name0"], held["honest/name1"]] == [6, 6]


def test_fair_share_gives_a_payer_with_many_owners_no_more_turns():
    admission = make({"a": many(1)}, patience=1000)
    for number in range(40):
        admission.submit(PlaceRequest(f"x{number}", f"greedy/name{number}", ONE))
    for number in range(20):
        admission.submit(PlaceRequest(f"y{number}", "honest", ONE))
    served: Counter[str] = Counter()
    for _ in range(20):
        [id] = granted(admission)
        served[id[0]] += 1
        admission.remove(id)
    assert served == {"x": 10, "y": 10}


@pytest.mark.parametrize(
    ("places", "owners"),
    [
        (1, ["a", "b"]),
        (8, [f"user{number}" for number in range(9)]),
        (1, [f"a/{number}" for number in range(100)]),
        (8, [f"user{number}" for number in range(100)]),
    ],
)
def test_no_starvation_by_owners_that_come_and_go(places, owners):
    """They wait, hold a place and leave in turn; the name of the one that stays is the last by the alphabet."""
    admission = make({"a": many(places)})
    names = cycle(owners)
    for number in range(places):
        admission.submit(PlaceRequest(str(number), next(names), ONE))
    held = granted(admission)
    admission.submit(PlaceRequest("mine", "z", ONE))
    for number in range(places, 100):
        admission.submit(PlaceRequest(str(number), next(names), ONE))
        admission.remove(held.pop(0))
        held += granted(admission)
        if "mine" in held:
            break
    assert number - places < 3


def test_a_share_is_the_larger_of_cpu_and_memory():
    admission = make({"a": Demand(10_000, 10_000)}, patience=1000)
    admission.submit(PlaceRequest("x0", "x", Demand(100, 8_000)))
    admission.submit(PlaceRequest("y0", "y", Demand(4_000, 100)))
    granted(admission)
    admission.submit(PlaceRequest("x1", "x", Demand(100, 100)))
    admission.submit(PlaceRequest("y1", "y", Demand(100, 100)))
    assert granted(admission) == ["y1", "x1"]


def test_priority_orders_the_requests_of_one_owner_only():
    admission = make({"a": many(1)}, patience=1000)
    admission.submit(PlaceRequest("low", "x", ONE, 0))
    admission.submit(PlaceRequest("high", "x", ONE, 5))
    admission.submit(PlaceRequest("other", "y", ONE, 0))
    order = []
    while taken := granted(admission):
        order += taken
        admission.remove(taken[0])
    assert order.index("high") < order.index("low")
    assert order.index("other") < 2


def test_a_small_request_passes_a_large_one_that_does_not_fit():
    admission = make({"a": many(2)}, patience=10)
    admission.submit(PlaceRequest("first", "x", ONE))
    assert granted(admission) == ["first"]
    admission.submit(PlaceRequest("large", "x", many(2)))
    admission.submit(PlaceRequest("small", "x", ONE))
    assert granted(admission) == ["small"]


def test_what_can_never_fit_is_refused_at_once():
    admission = make({"a": many(2), "b": Demand(1000, 100_000)})
    with pytest.raises(
        SandboxRefusedError, match=r"3 CPUs and 1536 MiB fits nowhere, not even alone; the hosts have a 2"
    ):
        admission.submit(PlaceRequest("r", "x", many(3)))
    with pytest.raises(SandboxRefusedError, match="on host b"):
        admission.submit(PlaceRequest("r", "x", many(2), only="b"))


def test_a_full_queue_says_so():
    admission = make({"a": many(1)}, max_waiting=2)
    for number in range(2):
        admission.submit(PlaceRequest(str(number), "x", ONE))
    with pytest.raises(SandboxBusyError, match="2 requests wait"):
        admission.submit(PlaceRequest("r", "x", ONE))


def test_a_ready_sandbox_attracts_its_kind_and_an_even_load_the_rest():
    admission = make({"a": many(4), "b": many(4)})
    admission.set_host("b", many(4), warm={"k": 1})
    admission.submit(PlaceRequest("r0", "x", ONE, warm_key="k"))
    admission.submit(PlaceRequest("r1", "x", ONE, warm_key="k"))
    admission.submit(PlaceRequest("r2", "x", ONE, warm_key="k"))
    assert {grant.id: grant.host for grant in admission.decide()} == {"r0": "b", "r1": "a", "r2": "a"}
    loads = [host.granted.millicpus for host in admission.hosts()]
    assert sorted(loads) == [1000, 2000]


def test_a_put_back_request_comes_first_and_prefers_another_host():
    admission = make({"a": many(1), "b": many(1)})
    admission.submit(PlaceRequest("r0", "x", ONE))
    [grant] = admission.decide()
    admission.submit(PlaceRequest("r1", "x", ONE, priority=9))
    admission.put_back("r0", avoid={grant.host})
    hosts = {grant.id: grant.host for grant in admission.decide()}
    assert hosts["r0"] != grant.host
    assert "r1" in hosts


def test_a_waiting_request_can_say_why():
    admission = make({"a": many(1)})
    for id in "rs":
        admission.submit(PlaceRequest(id, "x", ONE))
    granted(admission)
    assert admission.why_waiting("s") == (
        "0 of 1 waiting requests are older, 1 sandboxes are in use, 1 of 1 hosts take new ones"
    )


def test_no_books_are_kept_for_owners_that_left():
    admission = make({"a": many(1)})
    for number in range(20):
        admission.submit(PlaceRequest(str(number), f"owner{number}", ONE))
        granted(admission)
        admission.remove(str(number))
    assert admission.usage() == {}
    assert admission.waiting() == {}
    assert not any(vars(admission)[records] for records in ("_paid", "_last_paid", "_last_grant", "_turns", "_alarms"))
