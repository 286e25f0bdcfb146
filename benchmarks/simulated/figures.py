"""Benchmarks of simulated runs: `python -m benchmarks.simulated.figures NAME [--quick] [--json FILE] [--plot FILE]`.

A figure compares up to four numbers for each case: the published one, a peer's rules, Flash's own code, and the speed
that no schedule can exceed. The last three come from the same simulation of the same workload. Speed-ups are over the
same simulated baseline. The peers are ROLL Flash and AReaL, systems for asynchronous RL. α is `train.async_ratio`: how
many versions sampling may run ahead of training. A group is the samples of one prompt. The docstring of each function
in `FIGURES` describes its benchmark.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from benchmarks.form import WORKLOADS, Args, Row, main_of
from benchmarks.plots import bars, lines
from benchmarks.simulated.peers.asynchronous import Areal, ArealRules
from benchmarks.simulated.peers.roll_flash import (
    AgenticRules,
    BaselineRules,
    RollAgentic,
    RollFlash,
    RollRules,
    Synchronous,
)
from flash import ages
from flash.cli.simulate import in_workers
from flash.config.tree import Config
from flash.simulate.bounds import best_split, bounds, quantities
from flash.simulate.report import SimReport
from flash.simulate.world import simulate

ResultT = TypeVar("ResultT")


def at_once(cases: Iterable[Callable[[], ResultT]]) -> list[ResultT]:
    """Simulate the cases of a benchmark, one on each core, and return their results in the same order.

    Each case is a `partial` of a function of a module, because it is sent to a worker process.
    """
    return list(in_workers(_simulate_case, [*cases]))


def _simulate_case(case: Callable[[], ResultT]) -> ResultT:
    """Simulate one case in a worker process of `at_once`."""
    return case()


def rows_at_once(cases: Iterable[Callable[[], list[Row]]]) -> list[Row]:
    """Simulate cases as `at_once` does, and return the rows of all of them."""
    return [row for rows in at_once(cases) for row in rows]


# -- configurations --------------------------------------------------------------------------------------------------

GPUS_PER_NODE = 8
"""GPUs of a node, from which the number of nodes follows unless a configuration names it."""


def workload(name: str, **tables: Mapping[str, Any]) -> Config:
    """Return the configuration benchmarks/workloads/<name>.toml with changes, as `change` makes them."""
    return change(tomllib.loads((WORKLOADS / f"{name}.toml").read_text()), **tables)


def change(base: Config | Mapping[str, Any], **tables: Mapping[str, Any]) -> Config:
    """Return a configuration with changes: each table of `tables` replaces some keys of the same table.

    The number of GPUs that serve engines gives the number of nodes, unless it is changed, too.
    """
    before = msgspec.to_builtins(base) if isinstance(base, Config) else base
    changed = {name: before.get(name, {}) | dict(table) for name, table in tables.items()}
    serving, cluster = tables.get("simulate", {}).get("rollout_gpus"), tables.get("cluster", {})
    if serving is not None and "nodes" not in cluster:
        nodes = {"nodes": math.ceil(serving / GPUS_PER_NODE)}
        changed["cluster"] = before.get("cluster", {}) | dict(cluster) | nodes
    return msgspec.convert({**before, **changed}, Config)


def ours(config: Config, **rollout: object) -> SimReport:
    """Simulate our own code on a configuration. `rollout` are changes of its table `[rollout]`.

    The largest age of a trained token is ⌈α⌉, because ROLL Flash drops what is older. It is left unset (None) at α = 0,
    where no token is old. Steps are streamed only if `train.stream` is true, because ROLL Flash does not stream them.
    """
    oldest = ages.window(config.train.async_ratio)
    train = {"max_token_age": oldest or None, "stream": config.train.stream is True}
    return simulate(change(config, rollout=rollout, train=train))


def streamed(config: Config, ratio: float = 0) -> SimReport:
    """Simulate our own code on a configuration with streamed steps (`train.stream`) at this async ratio."""
    return ours(change(config, train={"async_ratio": ratio, "stream": True}))


def capacity_s(config: Config, report: SimReport) -> float:
    """Return the least seconds of a step under any schedule. `report` is that of a simulated run of `config`.

    There must be no redundant samples: with them there is no such bound.
    """
    every = bounds(quantities(config, report.ledger))
    return next(bound.step_s for bound in every if bound.lower)


LARGEST_ERROR = 0.15
"""Goal: largest difference of a simulated peer from the published figure, as a share of it."""
LEAST_SHARE_OF_PEER = 0.99
"""Goal of our speed as a share of the peer's: below 1, because the order of events differs where both do the same."""


def speedup(
    case: str, baseline_s: float, ours_s: float, peer_s: float, bound_s: float | None, published: float | None
) -> list[Row]:
    """Return the speed-up over a baseline, and the error of the peer's rules against the published speed-up.

    Args:
        case: name of the rows.
        baseline_s: seconds of a step of the simulated baseline.
        ours_s: seconds of a step of Flash.
        peer_s: seconds of a step by the peer's rules.
        bound_s: least seconds of a step under any schedule; None if it is not computed.
        published: speed-up that the peer's paper states; None if it states none.
    """
    peer, bound = baseline_s / peer_s, None if bound_s is None else baseline_s / bound_s
    goal = LEAST_SHARE_OF_PEER * peer
    rows = [Row(case, "speedup", "x", baseline_s / ours_s, published, at_least=goal, peer=peer, bound=bound)]
    if published is not None:
        rows.append(Row(case, "reproduction_error", "share", abs(peer / published - 1), at_most=LARGEST_ERROR))
    return rows


# -- one technique each ----------------------------------------------------------------------------------------------

FILTERED = ((8, 0, 125 / 58), (8, 16, 125 / 37), (128, 0, 2.5))
"""Cases of `queue_scheduling`: prompts per batch, extra prompts, published speed-up."""
FILTERED_STEPS = {8: (60, 12), 128: (6, 2)}
"""Number of steps of a full and of a quick run, by prompts per batch: larger batches take longer to simulate."""
FILTERED_SAMPLES = 8
"""Samples of each prompt of `queue_scheduling`, as in its workload."""


def queue_scheduling(args: Args) -> list[Row]:
    """Compare queue scheduling with whole batches that are issued until enough prompts have passed a dynamic filter.

    The baseline issues whole batches and waits for all of their samples. ROLL Flash keeps as many prompts running as a
    batch needs, plus the extra ones, until enough have passed; it discards the rest of the step. Flash starts all of
    these prompts at once. When enough have passed, it cancels the others, and does not wait for them.
    """
    rows: list[Row] = []
    for prompts, extra, published in FILTERED:
        full, quick = FILTERED_STEPS[prompts]
        config = workload(
            "queue_scheduling",
            run={"steps": quick if args.quick else full},
            train={"batch_size": prompts * FILTERED_SAMPLES},
        )
        batches_s = Synchronous.simulate(config, BaselineRules(colocated=False, env_async=True, replicate=True)).step_s
        peer_s = RollFlash.simulate(config, RollRules(extra_prompts=extra)).step_s
        # When a batch of prompts has passed, ROLL Flash still runs a batch of prompts and the extra ones. So it has
        # started that many prompts beyond a batch, in addition to those that were filtered out.
        report = ours(config, extra_groups=prompts + extra)
        case = f"{prompts}x{FILTERED_SAMPLES}, {extra} extra prompts"
        rows += speedup(case, batches_s, report.step_s, peer_s, None, published)
    return rows


REPLICATED = ((32, 16, 116 / 89), (64, 16, 149 / 81), (16, 64, 162 / 83))
"""Cases of `prompt_replication`: prompts, samples of each, published speed-up."""


def prompt_replication(args: Args) -> list[Row]:
    """Compare n samples of a prompt as n requests with one request of n sequences, in generation alone.

    Baseline and peer follow ROLL Flash's rules without and with replication. Flash runs its own code with its own
    setting. All requests of a batch fit into the engines, so replication only improves the balance between engines.
    """
    rows: list[Row] = []
    for prompts, samples, published in REPLICATED:
        config = workload(
            "prompt_replication",
            run={"steps": 3 if args.quick else 12},
            rollout={"group_size": samples},
            train={"batch_size": prompts * samples},
        )
        shared_s, peer_s = (
            RollFlash.simulate(config, RollRules(replicate=replicate)).step_s for replicate in (False, True)
        )
        report = ours(config)
        rows += speedup(f"{prompts}x{samples}", shared_s, report.step_s, peer_s, capacity_s(config, report), published)
    return rows


def env_async(args: Args) -> list[Row]:
    """Compare environments that step on their own with environments in lock-step, in generation alone.

    Latencies are normal(10, σ). In lock-step, each turn waits for the slowest of all environments. On their own, only
    the slowest sum over all turns counts.
    """
    rows: list[Row] = []
    for sigma in (1, 10) if args.quick else (1, 2, 4, 6, 8, 10):
        latency = {"kind": "normal", "mean": 10, "deviation": sigma}
        config = workload("env_async", run={"steps": 2 if args.quick else 4}, simulate={"env_s": latency})
        locked_s = Synchronous.simulate(config, BaselineRules(colocated=False, replicate=True)).step_s
        peer_s, report = RollAgentic.simulate(config, AgenticRules()).step_s, ours(config)
        published = 892 / 362 if sigma == 10 else None
        rows += speedup(f"sigma {sigma}", locked_s, report.step_s, peer_s, capacity_s(config, report), published)
    return rows


def redundant_envs(args: Args) -> list[Row]:
    """Compare more groups and members than a batch needs, of which the first to finish count, with none redundant.

    A batch has 32 groups of 8, with environments that are slow or stop. Under ROLL Flash's rules the others run to
    their end and keep their environments busy; Flash cancels them at once. Speed-ups are over ROLL Flash without
    redundancy.
    """
    rows: list[Row] = []
    config = workload("redundant_envs", run={"steps": 3 if args.quick else 6})
    without_s = RollAgentic.simulate(config, AgenticRules()).step_s
    for groups in (0, 4) if args.quick else (0, 2, 4, 8):
        for members in (0, 1) if args.quick else (0, 1, 2):
            case = f"{32 + groups}x{8 + members}"
            peer = RollAgentic.simulate(config, AgenticRules(extra_groups=groups, extra_per_group=members))
            report = ours(config, extra_groups=groups, extra_per_group=members)
            rows += speedup(case, without_s, report.step_s, peer.step_s, None, None)
            waste = 1 - report.trained_tokens / report.generated_tokens
            rows.append(Row(case, "wasted_tokens", "share", waste, peer=peer.waste))
    return rows


WINDOWS = (None, 2.0, 1.0)
"""Windows of `length_bias`, in batches; None: any order."""
FIRST = 4
"""Number of steps that count as the first ones of a run in `length_bias`."""


def length_bias(args: Args) -> list[Row]:
    """Compare the lengths of trained samples: batches of the first complete groups favour short answers.

    `rollout.fifo_window` does not. Answers are lognormal with a deviation above their mean. Two engines run four
    batches at once, so samples end in an order that is far from the order of issue. The trainer is as fast as the
    engines. For each window there are these rows: the mean length of a trained sample over that of an issued one, in
    the first steps of a run and over a long run; and the throughput as a share of the throughput without a window. A
    window of 1 batch is strict order of issue.
    """
    steps = 20 if args.quick else 60
    rows: list[Row] = []
    free: SimReport | None = None  # the run without a window, which is the first
    for window in WINDOWS:
        case = "α = 2, " + ("any order" if window is None else f"window {window:g}")
        first, whole = (
            ours(workload("length_bias", run={"steps": count}), fifo_window=window) for count in (FIRST, steps)
        )
        free = free or whole
        rows += [
            Row(case, f"length_in_{FIRST}_steps", "share", first.mean_trained_length / free.mean_issued_length),
            Row(case, f"length_in_{steps}_steps", "share", whole.mean_trained_length / free.mean_issued_length),
            Row(case, "throughput_of_any_order", "share", whole.samples_per_s / free.samples_per_s),
        ]
    return rows


# -- asynchronous training -------------------------------------------------------------------------------------------

STRAGGLERS = [*[400] * 99, 16000]
"""Lengths of answers in tokens: 1 % are forty times longer."""


def async_ratio(args: Args) -> list[Row]:
    """Compare throughput and age by async ratio, at 40 GPUs.

    The peer's column has the figures of ROLL Flash's rules. In rows named AReaL it has those of AReaL's rules, whose
    parameter η is the async ratio. AReaL's admission bounds the average age, and no age is checked when a sample is
    trained. Streamed steps have rows of their own. The last row has the age of the oldest trained token at a ratio of
    2, if 1 % of the answers are forty times longer: under AReaL's rules it is far above η.
    """
    batch, steps = (512, 5) if args.quick else (1024, 16)
    base = workload(
        "rlvr_long", run={"steps": steps}, train={"batch_size": batch}, simulate={"gpus": 40, "rollout_gpus": 28}
    )
    ratios = (0, 2, 8) if args.quick else (0, 1, 2, 4, 8)
    cases = [partial(at_ratio, base, ratio) for ratio in ratios]
    return rows_at_once([*cases, partial(stragglers, 30 if args.quick else 80)])


def at_ratio(base: Config, ratio: int) -> list[Row]:
    """Simulate a case of `async_ratio`: `base` with this async ratio."""
    config = change(base, train={"async_ratio": ratio})
    report = ours(config)
    peer = RollFlash.simulate(config, RollRules(async_ratio=ratio)).samples_per_s
    other = Areal.simulate(config, ArealRules(eta=ratio)).samples_per_s
    speed, fast = report.samples_per_s, streamed(config, ratio).samples_per_s
    bound = config.train.batch_size / capacity_s(config, report)
    return [
        Row(f"{ratio}", "samples_per_s", "samples/s", speed, peer=peer, bound=bound),
        # These are not called `samples_per_s`, because the plot has a point for each row of that name.
        Row(f"{ratio}, AReaL", "areal_samples_per_s", "samples/s", speed, peer=other),
        Row(f"{ratio}, streamed", "streamed_samples_per_s", "samples/s", fast, peer=peer, bound=bound),
    ]


def stragglers(steps: int) -> list[Row]:
    """Simulate the last case of `async_ratio`, in which 1 % of the answers are long."""
    config = workload(
        "rlvr_long",
        run={"steps": steps},
        train={"batch_size": 256, "async_ratio": 2},
        simulate={"gpus": 16, "rollout_gpus": 8, "response_tokens": STRAGGLERS, "length_correlation": 0},
    )
    oldest = Areal.simulate(config, ArealRules(eta=2)).oldest_age
    return [Row("stragglers, AReaL", "age_versions", "versions", max(ours(config).ages), peer=oldest)]


GPUS = 40
"""Number of GPUs of `gpu_split`."""


def gpu_split(args: Args) -> list[Row]:
    """Compare throughput by the number of GPUs that serve engines, of 40 GPUs, at α = 2, for long-tailed answers.

    `best_rollout_gpus` compares the best split that was simulated with β*, which the published formula predicts from
    the workload alone.
    """
    batch, steps = (512, 5) if args.quick else (1024, 8)
    sizes = (20, 28, 32) if args.quick else (16, 20, 24, 28, 32, 36)
    found = at_once(partial(at_split, serving, batch, steps) for serving in sizes)
    best = float(max(found, key=lambda one: one.row.ours).row.case.split()[0])
    # The prediction is nearly the same in each case: it does not depend on the split that is simulated.
    predicted = GPUS * (1 - found[-1].trainers)
    return [*(one.row for one in found), Row("best split", "best_rollout_gpus", "GPUs", best, predicted)]


class Split(NamedTuple):
    """Result of a case of `gpu_split`."""

    row: Row
    """Row with the throughput."""
    trainers: float
    """Share of the GPUs that should train, by the published formula."""


def at_split(serving: int, batch: int, steps: int) -> Split:
    """Simulate a case of `gpu_split`, in which `serving` of all GPUs serve engines."""
    config = workload(
        "rlvr_long",
        run={"steps": steps},
        train={"batch_size": batch},
        simulate={"gpus": GPUS, "rollout_gpus": serving},
    )
    report = ours(config)
    peer = RollFlash.simulate(config, RollRules(async_ratio=config.train.async_ratio)).samples_per_s
    bound = batch / capacity_s(config, report)
    row = Row(f"{serving} of {GPUS}", "samples_per_s", "samples/s", report.samples_per_s, peer=peer, bound=bound)
    q = quantities(config, report.ledger)
    return Split(row, best_split(q.samples, q.generate_all_s, q.longest_s, q.train_s, q.gpus, q.async_ratio))


SPLITS = (4, 5, 6)
"""Eighths of the GPUs that serve engines, in the splits that `stream_split` tries."""
SHARE_GOAL = 0.92
"""Goal of the throughput of streamed steps at α = 2 on 128 GPUs, as a share of what no schedule can exceed."""


def stream_split(args: Args) -> list[Row]:
    """Compare streamed with unstreamed steps, each at the best of three splits of the GPUs, for long-tailed answers.

    `mean_age` is that of the trained tokens. `share_of_bound` is the speed in the middle of the run, as a share of the
    speed that no schedule can exceed: the first steps wait for the first samples, and during the last ones the engines
    have no more samples to begin.
    """
    if args.quick:
        return rows_at_once(partial(best_splits, 16, ratio, steps=5, batch=512) for ratio in (0, 2))
    small = [partial(best_splits, 40, ratio, steps=12, batch=1024) for ratio in (0, 1, 2)]
    large = [partial(best_splits, 128, ratio, steps=7, batch=4096) for ratio in (0, 1, 2)]
    return rows_at_once([*small, *large])


def best_splits(gpus: int, ratio: int, *, steps: int, batch: int) -> list[Row]:
    """Simulate a case of `stream_split`, with this number of GPUs and this async ratio, at each split."""
    case, rows, best = f"{gpus} GPUs, α = {ratio}", list[Row](), dict[bool, SimReport]()
    for stream in (False, True):
        cells: list[tuple[SimReport, Config]] = []
        for eighths in SPLITS:
            config = workload(
                "rlvr_long",
                run={"steps": steps},
                train={"batch_size": batch, "async_ratio": ratio, "stream": stream},
                simulate={"gpus": gpus, "rollout_gpus": gpus * eighths // 8},
            )
            cells.append((ours(config), config))
        report, config = max(cells, key=lambda cell: cell[0].samples_per_s)
        assert config.simulate is not None
        bound_s, best[stream] = capacity_s(config, report), report
        middle = report.rows[1 : steps - ages.window(ratio)]
        share = bound_s * len(middle) / sum(row["interval_s"] for row in middle)
        goal = SHARE_GOAL if stream and (gpus, ratio) == (128, 2) else None
        name = f"{case}, streamed" if stream else case
        rows += [
            Row(name, "samples_per_s", "samples/s", report.samples_per_s, bound=batch / bound_s),
            Row(name, "rollout_gpus", "GPUs", config.simulate.rollout_gpus),
            Row(name, "mean_age", "versions", mean_age(report)),
            Row(name, "share_of_bound", "share", share, at_least=goal),
        ]
    gain = best[True].samples_per_s / best[False].samples_per_s
    return [*rows, Row(f"{case}, streamed over not", "speedup", "x", gain)]


def mean_age(report: SimReport) -> float:
    """Return the mean age of the trained tokens of a simulated run, in versions."""
    return sum(age * tokens for age, tokens in report.ages.items()) / report.trained_tokens


SCALED = 7.6
"""Scaling from 16 to 128 GPUs in the paper of ROLL Flash."""
SCALING_GOAL = 7.9
"""Goal of the scaling; 8 is the limit."""
SIZES, ENDS = (16, 32, 64, 128), (16, 128)
"""Numbers of GPUs of `scaling`, and those of a short comparison."""


def scaling(args: Args) -> list[Row]:
    """Compare throughput from 16 to 128 GPUs, for long-tailed answers.

    The batch is the same at every size, so a larger machine has less work per GPU and the same longest answer. Three
    quarters of the GPUs serve engines. `scaling` is the throughput at 128 GPUs divided by that at 16; 8 is the limit.
    At α = 2 the longest answers do not fit into three steps of 128 GPUs. The rows with α = 4 give them five steps.
    """
    if args.quick:
        return scale(2, ENDS, steps=4, batch=1024)
    return [*scale(2, SIZES, steps=7, batch=4096), *scale(4, ENDS, steps=9, batch=4096)]


def scale(ratio: int, sizes: tuple[int, ...], *, steps: int, batch: int) -> list[Row]:
    """Simulate `scaling` at one async ratio on each number of GPUs.

    Returns a row with the throughput of each size, and a row with the scaling from the first size to the last. At a
    ratio of 2 there are also the scaling of synchronous training, and of streamed steps at a ratio of 0.
    """
    label = "long" if ratio == 2 else f"long, async ratio {ratio}"
    found = at_once(partial(at_size, ratio, gpus, steps, batch) for gpus in sizes)
    rows = [
        Row(f"{gpus} GPUs, {label}", "samples_per_s", "samples/s", one.ours, peer=one.peer, bound=one.bound)
        for gpus, one in zip(sizes, found, strict=True)
    ]
    case = f"{sizes[0]} to {sizes[-1]} GPUs, {label}"
    ours_x, peer, bound, sync, stream = (last / first for first, last in zip(found[0], found[-1], strict=True))
    rows.append(Row(case, "scaling", "x", ours_x, SCALED, at_least=SCALING_GOAL, peer=peer, bound=bound))
    if ratio == 2:
        gain = found[-1].streamed / found[-1].synchronous
        rows += [
            Row(case, "reproduction_error", "share", abs(peer / SCALED - 1), at_most=LARGEST_ERROR),
            Row(f"{case}, synchronous", "scaling", "x", sync),
            Row(f"{case}, streamed at α = 0", "scaling", "x", stream),
            Row(f"{sizes[-1]} GPUs, streamed at α = 0 over synchronous", "stream_speedup", "x", gain),
        ]
    return rows


class Throughput(NamedTuple):
    """Samples per second of a case of `scaling`."""

    ours: float
    peer: float
    """By ROLL Flash's rules."""
    bound: float
    """No schedule is faster."""
    synchronous: float
    """In synchronous training. NaN if it was not simulated."""
    streamed: float
    """With streamed steps at a ratio of 0. NaN if they were not simulated."""


def at_size(ratio: int, gpus: int, steps: int, batch: int) -> Throughput:
    """Simulate a case of `scaling`, with this number of GPUs. Only at a ratio of 2 it is compared with a ratio of 0."""
    config = workload(
        "rlvr_long",
        run={"steps": steps},
        train={"batch_size": batch, "async_ratio": ratio},
        simulate={"gpus": gpus, "rollout_gpus": gpus * 3 // 4},
    )
    report = ours(config)
    peer = RollFlash.simulate(config, RollRules(async_ratio=ratio)).samples_per_s
    bound = batch / capacity_s(config, report)
    if ratio != 2:
        return Throughput(report.samples_per_s, peer, bound, math.nan, math.nan)
    sync = Synchronous.simulate(config, BaselineRules(env_async=True)).samples_per_s
    return Throughput(report.samples_per_s, peer, bound, sync, streamed(config).samples_per_s)


# -- all techniques --------------------------------------------------------------------------------------------------

CHAINS = {"alfworld": ((1.58, 2.27, 2.72), (8, 1)), "swe": ((1.23, 1.68, 1.81), (2, 1))}
"""Published speed-ups of each technique on top of the others; extra groups and members of the last one."""


def end_to_end(args: Args) -> list[Row]:
    """Compare synchronous training with ROLL Flash's techniques, added one after the other, and with Flash.

    RLVR has 128 GPUs and long answers, and also a row of streamed steps at an async ratio of 0. The agentic workloads
    (`CHAINS`) get environments that step on their own, then asynchronous training, then redundant environments; Flash
    has the same settings at each step. The baseline uses all GPUs for generation and then for training, sends a prompt
    as one request, and steps its environments together. Its step takes the sum of both phases. Quick runs have smaller
    batches, whose ratios differ from the published ones.
    """
    return rows_at_once([partial(rlvr, args.quick), *(partial(agentic, name, args.quick) for name in CHAINS)])


def rlvr(quick: bool) -> list[Row]:
    """Simulate the case RLVR of `end_to_end`."""
    smaller = {"batch_size": 512} if quick else {}
    fewer = {"gpus": 16, "rollout_gpus": 12} if quick else {}
    config = workload("rlvr_long", run={"steps": 5 if quick else 7}, train=smaller, simulate=fewer)
    baseline_s = Synchronous.simulate(config, BaselineRules(env_async=True)).step_s
    peer_s = RollFlash.simulate(config, RollRules(async_ratio=config.train.async_ratio)).step_s
    report, published = ours(config), None if quick else 2.24
    rows = speedup("RLVR, async", baseline_s, report.step_s, peer_s, capacity_s(config, report), published)
    return [*rows, Row("RLVR, streamed at α = 0", "speedup", "x", baseline_s / streamed(config).step_s)]


def agentic(name: str, quick: bool) -> list[Row]:
    """Simulate a workload of `end_to_end` with many turns, technique by technique. `name` is a key of CHAINS."""
    published, (groups, members) = CHAINS[name]
    smaller = {"batch_size": 128} if quick else {}
    config = workload(name, run={"steps": 3 if quick else 8}, train=smaller)
    ratio = config.train.async_ratio
    more = change(config, rollout={"extra_groups": groups, "extra_per_group": members})
    baseline_s = Synchronous.simulate(config, BaselineRules()).step_s
    steps: tuple[tuple[str, AgenticRules, Config], ...] = (
        ("environments on their own", AgenticRules(colocated=True), _turns(config)),
        ("+ async training", AgenticRules(async_ratio=ratio), config),
        ("+ redundant envs", AgenticRules(async_ratio=ratio, extra_groups=groups, extra_per_group=members), more),
    )
    rows: list[Row] = []
    for (technique, rules, mine), known in zip(steps, published, strict=True):
        report = ours(mine)
        # Where phases take turns, or samples are redundant, there is no such bound.
        bound_s = capacity_s(mine, report) if mine is config else None
        peer_s = RollAgentic.simulate(config, rules).step_s
        rows += speedup(f"{name}, {technique}", baseline_s, report.step_s, peer_s, bound_s, None if quick else known)
    return rows


def _turns(config: Config) -> Config:
    """Configure phases that take turns on all GPUs, for code that gives each phase GPUs of its own.

    The engines get all GPUs. The trainer has one GPU more, which is as fast as all of them. At an async ratio of 0
    phases never overlap.
    """
    simulate = config.simulate
    assert simulate is not None
    gpus = {
        "gpus": simulate.gpus + 1,
        "rollout_gpus": simulate.gpus,
        "train_token_s": simulate.train_token_s / simulate.gpus,
    }
    return change(config, train={"async_ratio": 0}, simulate=gpus)


FIGURES = {
    "async_ratio": (async_ratio, lines("Async ratio (simulated)", "α", "samples/s", "samples_per_s")),
    "end_to_end": (end_to_end, bars("End to end (simulated)", "speed-up over synchronous")),
    "env_async": (
        env_async,
        lines("Environments on their own (simulated)", "σ of the latency, s", "speed-up over lock-step", "speedup"),
    ),
    "gpu_split": (
        gpu_split,
        lines("Split of 40 GPUs (simulated)", "GPUs that serve engines", "samples/s", "samples_per_s"),
    ),
    "length_bias": (length_bias, None),
    "prompt_replication": (prompt_replication, bars("Prompt replication (simulated)", "speed-up over one request")),
    "queue_scheduling": (queue_scheduling, bars("Queue scheduling (simulated)", "speed-up over whole batches")),
    "redundant_envs": (
        redundant_envs,
        bars("Redundant environments, batch of 32x8 (simulated)", "speed-up over none redundant"),
    ),
    "stream_split": (stream_split, None),
    "scaling": (scaling, lines("Throughput by size (simulated)", "GPUs", "samples/s", "samples_per_s")),
}
"""Benchmarks of this file, each with its plot."""


if __name__ == "__main__":
    main_of(FIGURES)
