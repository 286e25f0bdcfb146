"""Problems that are issued, and groups that are counted as ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flash.samples.tasks import Cursor, TaskSource
from flash.types import VersionRun
from tests.samples.cases import lease_all, make_buffer, trajectory


@given(asked=st.lists(st.sampled_from([None, "x", "y"]), max_size=30), cut=st.integers(0, 30))
def test_each_domain_gets_its_problems_in_their_order_also_after_a_restart(asked: list[str | None], cut: int) -> None:
    cursor = Cursor()
    seen: dict[str | None, list[int]] = {}
    for number, domain in enumerate(asked):
        if number in (0, cut):
            source = TaskSource(3, 2, lambda seed: "xy"[seed % 2], cursor)
        problem = source.next_problem(domain)
        tasks = source.issue(problem)
        assert {task.seed for task in tasks} == {problem.seed}
        assert domain in (None, problem.kind)
        seen.setdefault(domain, []).append(problem.seed)
    for domain, seeds in seen.items():
        assert [seed - seeds[0] for seed in seeds] == list(
            range(0, len(seeds) * (2 if domain else 1), 2 if domain else 1)
        )
    assert (cursor.next_group, cursor.next_task) == (len(asked), 2 * len(asked))


def test_a_group_that_is_trained_in_parts_counts_once() -> None:
    buffer = make_buffer(alpha=1, batch=8, group=4, steps=9)
    leases = lease_all(buffer, 0)
    late = leases[3]
    for lease in leases:
        if lease is not late:
            buffer.deliver(lease.lease_id, trajectory(lease.task, 0, reward=float(lease.lease_id % 2)))
    for version in (0, 1):
        assert buffer.next_round(version) is not None
        buffer.commit(version)
        buffer.do_slice()
    cursor = buffer.samples.source.cursor
    assert cursor.ended == 4
    assert buffer.samples.pool[late.task.group_id].earlier, "it was to be trained in parts"
    buffer.deliver(late.lease_id, trajectory(late.task, 0, 2, versions=[VersionRun(0, 1), VersionRun(2, 1)]))
    assert cursor.ended == 4
    assert cursor.equal == 0
