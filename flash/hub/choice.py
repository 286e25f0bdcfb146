"""Which complete groups a step trains: a pure decision over the groups in flight.

Those whose tokens expire first go first. No straggler is waited for while enough groups are complete, with two
exceptions that the configuration asks for: a window in the order of issue (`fifo_window`), and `on_expire = "wait"`,
where a step is held back as long as taking it would leave a group that is still on its way no step to be trained in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from flash.config.tree import SLACK
from flash.hub.contract import AgeContract
from flash.hub.groups import Group


def choose(
    contract: AgeContract,
    step: int,
    groups: Iterable[Group],
    ready: Iterable[Group],
    *,
    fifo_window: float | None,
    wait: bool,
) -> list[Group] | None:
    """The groups of a step, or None while it has to wait.

    Args:
        contract: the run's age contract.
        step: the version that is trained.
        groups: all groups in flight.
        ready: those of them that are complete.
        fifo_window: batches of groups, in order of issue, among which the step may choose. None: all.
        wait: whether groups on their way must keep a step in which all their tokens can be trained.
    """
    size = contract.groups_per_batch
    eligible = list(ready)
    if fifo_window is not None:
        end = math.floor((step + fifo_window) * size + SLACK)
        eligible = [group for group in eligible if group.slot < end]
    if len(eligible) < size:
        return None
    eligible.sort(key=lambda group: (group.oldest_version, group.group_id))
    chosen = eligible[:size]
    if wait and not _all_in_time(contract, step + 1, groups, chosen):
        return None
    return chosen


def _all_in_time(contract: AgeContract, step: int, groups: Iterable[Group], chosen: Sequence[Group]) -> bool:
    """Whether all groups but the chosen can be trained from `step` on, each before its first token expires.

    Earliest deadline first: up to any step s there are s − step + 1 batches, so no more groups than they hold may be
    due by s. A step that is overbooked by complete groups alone does not count: waiting would not change it.
    """
    taken = {group.group_id for group in chosen}
    due: dict[int, int] = {}
    on_their_way: dict[int, bool] = {}
    for group in groups:
        oldest = group.oldest_version
        if group.group_id in taken or oldest is None:
            continue
        last = contract.last_step(oldest)
        due[last] = due.get(last, 0) + 1
        on_their_way[last] = on_their_way.get(last, False) or not group.complete
    total, waiting = 0, False
    for last in sorted(due):
        total += due[last]
        waiting = waiting or on_their_way[last]
        if waiting and total > max(0, last - step + 1) * contract.groups_per_batch:
            return False
    return True
