"""Redundant environments in a simulation: more groups and members than a batch needs, of which the first to finish
count.

A batch has 32 groups of 8, with environments that are slow or stop. Under ROLL Flash's rules the others run to their
end and keep their environments busy; Flash cancels them at once. Speed-ups are over ROLL Flash without redundancy.
"""

from __future__ import annotations

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import change, ours, workload
from benchmarks.simulated.figure import bars, speedup
from benchmarks.simulated.peers.roll_agentic import Rules, roll_agentic

GROUPS, SIZE = 32, 8
"""Groups of a batch, and members of a group, without redundancy."""


def measure(args: Args) -> list[Row]:
    """Simulate each number of extra groups with each number of extra members; return speed-ups and wasted tokens."""
    rows: list[Row] = []
    config = workload("redundant_envs", run={"steps": 3 if args.quick else 6})
    without_s = roll_agentic(config, Rules()).step_s
    for extra_groups in (0, 4) if args.quick else (0, 2, 4, 8):
        for extra_per_group in (0, 1) if args.quick else (0, 1, 2):
            case = f"{GROUPS + extra_groups}x{SIZE + extra_per_group}"
            rules = Rules(extra_groups=extra_groups, extra_per_group=extra_per_group)
            more = {"extra_groups": extra_groups, "extra_per_group": extra_per_group}
            peer = roll_agentic(config, rules)
            report = ours(change(config, rollout=more))
            rows += speedup(case, without_s, report.step_s, peer.step_s, None, None)
            waste = 1 - report.trained_tokens / report.generated_tokens
            rows.append(Row(case, "wasted_tokens", "share", waste, peer=peer.waste))
    return rows


if __name__ == "__main__":
    plot = bars("Redundant environments, batch of 32x8", "speed-up over none redundant")
    main("redundant_envs", __doc__ or "", measure, plot=plot)
