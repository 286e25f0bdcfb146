"""Which tokens of an answer the credit should go to: marks of attention against chance, critics against critics.

A small model, warm-started on Countdown with three numbers, learns it with each method from the same problems, for
equally many trained tokens, on data of an exact age; see `benchmarks.offpolicy.harness`. `random` and `entropy`
multiply the advantages of as many tokens as `local`, `global` and `coupled`, by as much. `ppo` has a critic of the
policy's size, `asyppo` two of half its layers, with its mask and without. Intervals are Student's over seeds;
`difference` is paired by seed, which share model and problems: against `grpo`, of the attention's marks also against
`random`, and of the critics against `ppo`. Finished cells are kept in a folder and not run again, so the grid can be
run in pieces.

Cost: a step on batches of about 4,000 trained tokens, with one critic as large as the policy and with two of half its
layers, in processor time of one thread, and what the critics hold: weights, gradients and two moments.

Further options: --cells FOLDER (default outputs/credit), --workers N (default: one per usable core), --limit-s S (start
no cell that would end later), --methods A,B,… and --alphas 0,2 and --seeds N (a part of the grid; 5 seeds), --keep FILE
(all finished cells as JSON lines), --no-cost (the grid only).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import msgspec

from benchmarks.form import Args, Row, main
from benchmarks.offpolicy.cells import Cell, Folder, Method, Result, Setting, write_lines
from benchmarks.offpolicy.run import Plan, Pool, RunCell, cell_options, make_model, run_cell
from benchmarks.offpolicy.summary import Summary, accuracy_table, half_width, summarise
from benchmarks.real.objective_cost import apart, make_tiny_model, random_shard, step_config

ALPHAS = (0, 2)
SEEDS = 5
SETTING = Setting(
    countdown={"numbers": 3, "largest": 9, "lowest": 10, "highest": 99, "operators": "+-*"},
    layers=4,
    warm_start_steps=220,
    tokens=200_000,
    batch_size=128,
    learning_rate=1e-4,
    max_new_tokens=24,
)
"""One figure each, and two for what is to be reached, so that all prompts have equally many tokens. The rate was chosen
for `grpo` on one seed: 1e-4 and 2e-4 end alike, 5e-4 learns nothing, and 1e-3 forgets all."""
QUICK = msgspec.structs.replace(SETTING, steps=4, eval_every=2, problems=64)
QUICK_METHODS = ("grpo", "random")
NEAR = {"nearest": 4, "farthest": 16}
"""Answers have about 18 tokens: with the paper's 10 to 100 hardly any would have an influence."""
CRITIC = {"learning_rate": 1e-3}
SMALL = CRITIC | {"path": "outputs/models/credit-critic-2x128-countdown-1", "tiny_layers": 2, "clip": None}
MEAN = "seq_mean_token_mean"
"""AsyPPO's aggregation, for ppo too: only critics are to differ."""
METHODS = (
    Method(key="grpo", objective="grpo"),
    Method(key="random", objective="grpo", marks="random"),
    Method(key="entropy", objective="grpo", marks="entropy"),
    Method(key="local", objective="grpo", rhythm={"credit": "local"}),
    Method(key="global", objective="grpo", rhythm={"credit": "global"} | NEAR),
    Method(key="coupled", objective="grpo", rhythm={"credit": "coupled"} | NEAR),
    Method(key="ppo", objective="ppo", critic=CRITIC, aggregation=MEAN),
    Method(key="asyppo", objective="asyppo", critic=SMALL),
    Method(key="asyppo_unmasked", objective="asyppo", options={"mask_lowest": 0.0}, critic=SMALL),
)
AGAINST = {
    **dict.fromkeys(("random", "entropy", "ppo"), ("grpo",)),
    **dict.fromkeys(("local", "global", "coupled"), ("grpo", "random")),
    "asyppo": ("ppo", "asyppo_unmasked"),
    "asyppo_unmasked": ("ppo",),
}
"""What each method is compared with, seed by seed."""
MIB = 2**20


# -- the grid --------------------------------------------------------------------------------------------------------


def grid(setting: Setting, methods: Sequence[str], alphas: Sequence[int], seeds: int) -> list[Cell]:
    """All cells, seed by seed, so that a part of the grid is a whole comparison."""
    return [
        Cell(method=method, alpha=alpha, seed=seed, setting=setting)
        for seed in range(seeds)
        for alpha in alphas
        for method in METHODS
        if method.key in methods
    ]


class Comparison:
    """Runs what is missing of a grid and reports it, and then what critics cost."""

    def __init__(
        self,
        options: argparse.Namespace,
        run_cell: RunCell = run_cell,
        make_model: Callable[[Cell], object] = make_model,
    ) -> None:
        self._options = options
        self._run_cell, self._make_model = run_cell, make_model

    def measure(self, args: Args) -> list[Row]:
        """The grid, then the cost."""
        options = self._options
        plan = Plan(
            cells=grid(
                QUICK if args.quick else SETTING,
                options.methods or (QUICK_METHODS if args.quick else [method.key for method in METHODS]),
                options.alphas or ALPHAS,
                options.seeds or (1 if args.quick else SEEDS),
            ),
            folder=options.cells,
            workers=options.workers,
            limit_s=options.limit_s,
            keep=options.keep,
        )
        for cell in {cell.method.key: cell for cell in plan.cells}.values():
            self._make_model(cell)
        pool = Pool(plan, self._run_cell)
        anyio.run(pool.run)
        results = Folder(plan.folder).finished(plan.cells)
        for failure in pool.failures:
            print(f"\nno result of {failure}")
        if missing := pool.missing():
            print(f"\n{len(missing)} of {len(plan.cells)} cells are missing; the same command runs them")
        if plan.keep is not None:
            write_lines(results, plan.keep)
        summaries = summarise(results)
        print(f"\n{accuracy_table(summaries)}\n\n{difference_table(results)}\n")
        return [*grid_rows(summaries, results), *([] if options.no_cost else cost_rows(args))]


def differences(results: Sequence[Result], key: str, other: str, alpha: int) -> list[float]:
    """How much higher a method ended than another, for every seed that both have."""
    finals = {
        (result.cell.method.key, result.cell.seed): result.final for result in results if result.cell.alpha == alpha
    }
    return [
        final - finals[other, seed] for (one, seed), final in finals.items() if one == key and (other, seed) in finals
    ]


def compared(results: Sequence[Result]) -> list[tuple[str, str, int, list[float]]]:
    """Each comparison that some seed has: the method, the other, alpha, and the differences."""
    alphas = sorted({result.cell.alpha for result in results})
    all_of_them = [
        (key, other, alpha, differences(results, key, other, alpha))
        for alpha in alphas
        for key, others in AGAINST.items()
        for other in others
    ]
    return [one for one in all_of_them if one[-1]]


def grid_rows(summaries: Sequence[Summary], results: Sequence[Result]) -> list[Row]:
    """Means with their intervals, then differences with theirs."""
    rows: list[Row] = []
    for one in summaries:
        rows += [
            Row(one.case, "start_accuracy", "share", start_of(results, one)),
            Row(one.case, "final_accuracy", "share", one.mean),
            Row(one.case, "final_accuracy_low", "share", one.low),
            Row(one.case, "final_accuracy_high", "share", one.high),
            Row(one.case, "seeds", "runs", one.seeds),
        ]
    for key, other, alpha, found in compared(results):
        case, mean, half = f"{key} less {other}, α = {alpha}", statistics.fmean(found), half_width(found)
        rows += [
            Row(case, "difference", "share", mean),
            Row(case, "difference_low", "share", mean - half),
            Row(case, "difference_high", "share", mean + half),
            Row(case, "seeds", "pairs", len(found)),
        ]
    return rows


def start_of(results: Sequence[Result], summary: Summary) -> float:
    """Accuracy before training, the same for all seeds: the problems of an evaluation are."""
    mine = (summary.method.key, summary.alpha)
    return statistics.fmean(one.start for one in results if (one.cell.method.key, one.cell.alpha) == mine)


def difference_table(results: Sequence[Result]) -> str:
    """Markdown: the paired differences in points, with their intervals and the number of seeds."""
    lines = ["| points, by seed | α | difference | seeds |", "|---|--:|--:|--:|"]
    for key, other, alpha, found in compared(results):
        half = f" ± {100 * half_width(found):.1f}" if len(found) > 1 else ""
        lines.append(f"| {key} − {other} | {alpha} | {100 * statistics.fmean(found):+.1f}{half} | {len(found)} |")
    return "\n".join(lines)


# -- what critics cost -----------------------------------------------------------------------------------------------

LAYERS = 4
CRITICS: dict[str, tuple[int, int]] = {"no critic": (0, 0), "one, full": (1, LAYERS), "two, half": (2, LAYERS // 2)}
"""How many, of how many layers."""


class CriticCost(msgspec.Struct, frozen=True):
    """Of a step with these critics."""

    seconds: float
    """Median processor time of the whole step."""
    critic_bytes: int
    """Weights, gradients and moments of all critics."""


def critic_costs(steps: int) -> dict[str, CriticCost]:
    """By what critics there are; they take turns. Makes a process group, so it wants a process of its own."""
    import torch
    import torch.distributed as dist
    from transformers.utils.logging import disable_progress_bar

    from flash.foreign.torch import private_store
    from flash.trainer.step import Trainer

    disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=private_store(), rank=0, world_size=1)
    times: dict[str, list[float]] = {name: [] for name in CRITICS}
    with tempfile.TemporaryDirectory() as folder:
        trainers: dict[str, Trainer] = {}
        for name, (count, layers) in CRITICS.items():
            policy, critic = (str(Path(folder) / f"{layers}-layers") for layers in (LAYERS, layers))
            make_tiny_model(policy, LAYERS)
            config = step_config("ppo" if count else "grpo", policy, steps + 1)
            if config.critic is not None:
                make_tiny_model(critic, layers)
                described = msgspec.structs.replace(config.critic, path=critic, count=count)
                config = msgspec.structs.replace(config, critic=described)
            trainers[name] = Trainer(config)
        for step in range(steps + 1):
            shard = random_shard(step)
            for name, trainer in trainers.items():
                begun = time.process_time()
                trainer.train_step(shard)
                times[name].append(time.process_time() - begun)
    dist.destroy_process_group()
    return {
        # The first step makes the optimizers' moments.
        name: CriticCost(statistics.median(times[name][1:]), sum(held_bytes(one.model) for one in trainer.critics))
        for name, trainer in trainers.items()
    }


def held_bytes(model: object) -> int:
    """Weights, gradients and two moments, all float32."""
    from torch import nn

    assert isinstance(model, nn.Module)
    return 4 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def cost_rows(args: Args) -> list[Row]:
    """Whole steps, what the critics add to one without, and what they hold; the reference is one full critic's."""
    costs = apart(critic_costs, 2 if args.quick else 15)
    plain, full = costs["no critic"], costs["one, full"]
    rows = [Row("critics: none", "step_ms", "ms", 1e3 * plain.seconds)]
    for name, cost in costs.items():
        if name == "no critic":
            continue
        same = name == "one, full"
        case = f"critics: {name} size"
        rows += [
            Row(case, "step_ms", "ms", 1e3 * cost.seconds, None if same else 1e3 * full.seconds),
            Row(
                case,
                "critics_ms",
                "ms",
                1e3 * (cost.seconds - plain.seconds),
                None if same else 1e3 * (full.seconds - plain.seconds),
            ),
            Row(case, "critics_mib", "MiB", cost.critic_bytes / MIB, None if same else full.critic_bytes / MIB),
        ]
    return rows


# -- the command -----------------------------------------------------------------------------------------------------


def own_options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options that only this benchmark has, and the arguments that are left."""
    parser = cell_options("python -m benchmarks.real.credit", Path("outputs/credit"), METHODS)
    parser.add_argument("--no-cost", action="store_true")
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    own, rest = own_options(None)
    main("credit", __doc__ or "", Comparison(own).measure, rest)
