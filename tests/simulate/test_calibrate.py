"""Calibration recovers the constants of a machine from what a run on it leaves behind."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import anyio
import msgspec
import numpy as np
import pytest

from flash.cli.simulate import predicted_step_s
from flash.config.learning import TrainConfig
from flash.config.load import dump, load
from flash.config.simulate import Lognormal, SimulateConfig, Uniform, sampler
from flash.config.tree import ClusterConfig, Config, EngineConfig, EnvConfig, ModelConfig, RolloutConfig, RunConfig
from flash.errors import ConfigError
from flash.observe.observer import Wish
from flash.observe.rundir.rundir import RunDirectory, SampleTimes, TurnTimes, sample_times
from flash.rollout.engine import ResponseRequest
from flash.simulate.calibrate import calibrate, fit_training, fit_workload, gather, nonnegative_fit, spread_of
from flash.simulate.clock import run_virtual
from flash.simulate.engine import SimEngine
from flash.simulate.report import SimReport
from flash.simulate.workload import tokens
from flash.simulate.world import SimObserver, World
from flash.types import Activity, Batch, Canary, Completion, Published

TRUTH = SimulateConfig(step_s=0.02, sequence_s=0.003, context_s=0.0, prefill_s=0.0005, swap_s=0.7)
TRAIN_TOKEN_S, TRAIN_STEP_S, PUBLISH_S = 0.004, 1.5, 0.25
"""Seconds of training per token and per step, and of publishing, of the measured machine."""
PLACES = 12
"""Sequences that the engine runs at once."""
GROUP = 4
"""Samples of a group."""


def config(tmp_path: Path) -> Config:
    """Return the configuration of the measured run."""
    return Config(
        run=RunConfig(name="measured", output_dir=str(tmp_path)),
        model=ModelConfig(path="none"),
        env=EnvConfig(path="none:None"),
        engine=EngineConfig(max_sequences=PLACES),
        rollout=RolloutConfig(group_size=GROUP, max_new_tokens=500),
        train=TrainConfig(batch_size=32),
    )


class Machine:
    """Simulated engine that serves bursts of groups, and a record of its responses and swaps."""

    def __init__(self) -> None:
        self.random = Random(3)
        self.engine = SimEngine(TRUTH, PLACES, lambda key: 20 + key // 8192 * 37 % 180, stream_interval=16)
        self.turns: dict[int, dict[int, TurnTimes]] = {}
        """Times of each response, by group and number of the sample, which is the order in which they arrive."""
        self.swaps: list[Activity] = []

    async def respond(self, group: int, key: int) -> None:
        """Request the response of the sample with the number `key`, and record its times."""
        prompt = tokens(group, 50 + group * 13 % 100)
        begun = anyio.current_time()
        request = ResponseRequest(prompt, 500, key * 8192)
        done = [piece async for piece in self.engine.generate(request) if isinstance(piece, Completion)]
        spent = anyio.current_time() - begun
        self.turns.setdefault(group, {})[key] = TurnTimes(len(prompt), len(done[0].token_ids), begun, spent, 0.0, 0)

    async def swap(self, version: int) -> None:
        """Load a version, and record the swap."""
        begun = anyio.current_time()
        await self.engine.load(Published(version, "tcp", b"", Canary([], [])), keep_cache=False)
        self.swaps.append(Activity("engine 0", "swap", begun, anyio.current_time()))

    async def run(self) -> None:
        """Serve 24 bursts of one to eight groups, with a swap in each."""
        await self.swap(0)
        for burst in range(24):
            async with anyio.create_task_group() as group:
                for number in range(1 + self.random.randrange(8)):
                    for sample in range(GROUP):
                        group.start_soon(self.respond, burst * 8 + number, (burst * 8 + number) * GROUP + sample)
                await anyio.sleep(self.random.random() * 3)
                await self.swap(burst + 1)


@pytest.fixture(scope="module")
def machine() -> Machine:
    """Return a machine that has served all of its bursts."""
    machine = Machine()
    run_virtual(machine.run)
    return machine


@pytest.fixture
def run_dir(machine: Machine, tmp_path: Path) -> Path:
    """Return the directory of the machine's run, as a recorder would have written it, with eight groups in a step."""
    directory = RunDirectory.open(tmp_path / "measured", dump(config(tmp_path)))
    groups = sorted(machine.turns)
    time = 0.0
    for step, start in enumerate(range(0, len(groups), 8)):
        rows = [
            SampleTimes(step, group, float(sample % 2), [turn])
            for group in groups[start : start + 8]
            for sample, turn in sorted(machine.turns[group].items())
        ]
        directory.append_samples(rows)
        length = sum(turn.observation_tokens + turn.tokens for row in rows for turn in row.turns)
        spent = length * TRAIN_TOKEN_S + TRAIN_STEP_S
        directory.append_metrics({"step": step, "trainer_step_s": spent, "interval_s": spent + PUBLISH_S})
        directory.append_spans([Activity("trainer 0", "publish", time + spent, time + spent + PUBLISH_S)])
        time += spent + PUBLISH_S
    directory.append_spans(machine.swaps)
    return directory.path


def test_the_constants_of_the_engine_and_the_trainer_come_back(run_dir: Path):
    fitted = calibrate(run_dir).table
    assert fitted["step_s"] == pytest.approx(TRUTH.step_s, rel=0.05)
    assert fitted["sequence_s"] == pytest.approx(TRUTH.sequence_s, rel=0.05)
    assert fitted["prefill_s"] == pytest.approx(TRUTH.prefill_s, rel=0.15)
    assert fitted["swap_s"] == pytest.approx(TRUTH.swap_s, rel=0.1)
    assert fitted["train_token_s"] == pytest.approx(TRAIN_TOKEN_S, rel=1e-6)
    assert fitted["train_step_s"] == pytest.approx(TRAIN_STEP_S + PUBLISH_S, rel=1e-6)


def test_the_fit_tells_how_much_it_leaves_unexplained(run_dir: Path):
    parts = {part.name: part for part in calibrate(run_dir).parts}
    assert parts["engine"].residual < 0.05
    assert parts["training"].residual < 1e-6
    assert parts["engine"].points > 100


def test_the_table_overlays_the_runs_own_configuration(run_dir: Path):
    fitted = calibrate(run_dir)
    (run_dir / "fitted.toml").write_text(fitted.toml())
    merged = load([run_dir / "config.toml", run_dir / "fitted.toml"], simulated=True)
    assert merged.simulate is not None
    assert merged.simulate.gpus == 2
    assert merged.simulate.rollout_gpus == 1
    assert merged.simulate.step_s == fitted.table["step_s"]
    assert merged.engine.max_sequences == PLACES


class Book(SimObserver):
    """An observer that writes the run directory of a simulated run, as a recorder does of a real one."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__()
        self.directory = directory

    def step(self, row: Mapping[str, float]) -> Wish | None:
        """Write the row of a step."""
        self.directory.append_metrics(row)
        return super().step(row)

    def activities(self, rows: Sequence[Activity]) -> None:
        """Write activities."""
        self.directory.append_spans(rows)

    def batch(self, batch: Batch) -> None:
        """Write lengths and times of the samples of a step."""
        self.directory.append_samples(sample_times(one, batch.step) for one in batch.trajectories)


def recorded(config: Config) -> SimReport:
    """Simulate a run that leaves a run directory behind."""
    directory = RunDirectory.open(config.run_dir, dump(msgspec.structs.replace(config, simulate=None)))

    async def run() -> SimReport:
        world = World(config, Book(directory))
        end = await world.run()
        directory.write_ledger(end.ledger)
        return world.report(end, 0.0, 0.0)

    return run_virtual(run)


@pytest.mark.slow
@pytest.mark.parametrize(("engines", "alpha"), [(1, 0.0), (1, 1.0), (3, 2.0)])
def test_a_simulated_run_is_predicted_from_what_it_left_behind(engines: int, alpha: float, tmp_path: Path):
    truth = msgspec.structs.replace(
        TRUTH, gpus=engines + 2, rollout_gpus=engines, train_token_s=0.002, train_step_s=2.0,
        prompt_tokens=Uniform(low=40, high=120), response_tokens=Lognormal(mean=60, deviation=60, low=1, high=400),
        turns=2, observation_tokens=Uniform(low=5, high=25), env_s=Lognormal(mean=0.5, deviation=0.5),
        reward_s=0.3, swap_s=0.4,
    )  # fmt: skip
    simulated = msgspec.structs.replace(
        config(tmp_path),
        run=RunConfig(name="measured", output_dir=str(tmp_path), steps=20),
        engine=EngineConfig(max_sequences=PLACES, count=engines),
        cluster=ClusterConfig(gpus_per_node=0, trainer_ranks=2),
        train=TrainConfig(batch_size=32, async_ratio=alpha),
        simulate=truth,
    )
    measured = recorded(simulated)
    fitted = calibrate(simulated.run_dir)
    assert fitted.step_s == pytest.approx(measured.step_s)
    token_s = fitted.table["step_s"] + PLACES * fitted.table["sequence_s"]
    assert token_s == pytest.approx(truth.step_s + PLACES * truth.sequence_s, rel=0.03)
    assert fitted.table["swap_s"] == pytest.approx(truth.swap_s, rel=0.1)
    (tmp_path / "fitted.toml").write_text(fitted.toml())
    assert predicted_step_s(simulated.run_dir / "config.toml", tmp_path / "fitted.toml").mean() == pytest.approx(
        measured.step_s, rel=0.05
    )


def test_what_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot be calibrated from: expected .* samples\.jsonl"):
        calibrate(tmp_path)


def test_a_run_without_the_seconds_of_its_steps_is_refused(run_dir: Path):
    metrics = RunDirectory(run_dir).metrics
    first, *rest = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(first + "".join(rest).replace('"interval_s"', '"other_s"'))
    with pytest.raises(ConfigError, match=r"no step after .* has interval_s, .* metrics\.jsonl: calibrate from"):
        calibrate(run_dir)


def test_a_run_whose_later_steps_have_no_response_is_refused(run_dir: Path):
    directory = RunDirectory(run_dir)
    first = [sample for sample in directory.read_samples() if sample.step == 0]
    directory.samples.unlink()
    directory.append_samples(first)
    with pytest.raises(ConfigError, match=r"no response after the first step .* samples\.jsonl: calibrate from"):
        calibrate(run_dir)


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"generated_tokens": "many"}', b"\xff"])
def test_a_damaged_ledger_is_refused(run_dir: Path, content: bytes):
    RunDirectory(run_dir).ledger.write_bytes(content)
    with pytest.raises(ConfigError, match=r"ledger\.json is damaged: .*; calibrate from another run"):
        calibrate(run_dir)


@pytest.mark.parametrize("all_of_them", [False, True])
def test_samples_without_turns_are_refused_with_their_number(run_dir: Path, all_of_them: bool):
    directory = RunDirectory(run_dir)
    samples = directory.read_samples()
    directory.samples.unlink()
    directory.append_samples(
        msgspec.structs.replace(sample, turns=[]) if all_of_them or sample.step == 1 else sample for sample in samples
    )
    empty, step = (len(samples), 0) if all_of_them else (sum(sample.step == 1 for sample in samples), 1)
    said = rf"^{empty} of {len(samples)} samples .* have no turns, .* at step {step}: remove these lines"
    with pytest.raises(ConfigError, match=said):
        calibrate(run_dir)


def test_equal_steps_count_as_tokens_only():
    rows = [{"step": step, "trainer_step_s": 2.0 + step % 2 / 10} for step in range(9)]
    samples = [SampleTimes(step, 0, 1.0, [TurnTimes(10, 90, 0.0, 1.0, 0.0, 0)]) for step in range(9)]
    part = fit_training(rows, samples, [], trainers=4)
    assert part.constants["train_step_s"] == 0.0
    assert part.constants["train_token_s"] == pytest.approx(2.05 / 100 * 4, rel=0.01)
    assert "nearly equal numbers of tokens" in part.note


def test_step_times_that_hardly_depend_on_tokens_are_fixed():
    amounts = range(1000, 20_001, 1000)
    rows = [{"step": step, "trainer_step_s": 5.0 + step % 2 / 10} for step in range(len(amounts))]
    samples = [SampleTimes(step, 0, 1.0, [TurnTimes(10, n - 10, 0.0, 1.0, 0.0, 0)]) for step, n in enumerate(amounts)]
    part = fit_training(rows, samples, [], trainers=1)
    assert part.constants["train_step_s"] == pytest.approx(5.05, rel=0.02)
    assert part.residual < 0.02
    assert not part.note


def test_a_run_whose_swaps_wait_for_its_responses_prefills_nothing_again(run_dir: Path):
    fitted: dict[str, float] = {}
    file = run_dir / "config.toml"
    recorded = file.read_text()
    for swap in ("keep", "drain", "recompute"):
        file.write_text(recorded.replace('swap = "recompute"', f'swap = "{swap}"'))
        fitted[swap] = calibrate(run_dir).table["prefill_s"]
    assert fitted["drain"] == fitted["keep"] != fitted["recompute"]


def test_a_model_too_short_for_the_simulators_default_prompt_is_calibrated(run_dir: Path):
    expected, file = calibrate(run_dir).table, run_dir / "config.toml"
    short = re.sub(r"(?m)^max_length = .*$", "max_length = 256", file.read_text())
    file.write_text(re.sub(r"(?m)^max_new_tokens = .*$", "max_new_tokens = 100", short))
    assert calibrate(run_dir).table == expected


def test_a_request_that_finds_all_places_taken_begins_when_one_is_free():
    samples = [SampleTimes(0, n, 1.0, [TurnTimes(5, 10, 0.0, 4.0 * (n + 1), 0.0, 0)]) for n in range(3)]
    found = gather(samples, [], engines=1, places=1, warmup_step=-1)
    assert found.begin.tolist() == [0.0, 4.0, 8.0]
    assert found.end.tolist() == [4.0, 8.0, 12.0]


def test_a_turn_goes_on_from_the_one_before_it_in_its_own_branch():
    turns = [
        TurnTimes(30, 8, 0.0, 1.0, 1.0, 0, branch=0),
        TurnTimes(20, 8, 2.0, 1.0, 1.0, 0, branch=1),
        TurnTimes(6, 8, 4.0, 1.0, 1.0, 0, branch=0),
        TurnTimes(5, 8, 6.0, 1.0, 1.0, 0, branch=1),
    ]
    found = gather([SampleTimes(0, 0, 1.0, turns)], [], engines=1, places=4, warmup_step=-1)
    assert found.context.tolist() == [30, 20, 44, 33]
    assert found.cold.tolist() == [30, 20, 6, 5], "the rest is cached"


def test_only_the_last_turn_pays_for_the_reward():
    turns = [TurnTimes(30, 8, 0.0, 1.0, 2.0, 0), TurnTimes(6, 8, 3.0, 1.0, 2.0, 0), TurnTimes(6, 8, 6.0, 1.0, 7.0, 0)]
    table = fit_workload([SampleTimes(0, group, group % 2, turns) for group in range(4)])
    assert table == {
        "prompt_tokens": 30,
        "response_tokens": 8,
        "observation_tokens": 6,
        "turns": 3,
        "env_s": 2,
        "reward_s": 5,
        "success": [0, 0, 1, 1],
    }


def test_a_listed_distribution_keeps_the_mean_and_whole_numbers():
    random = Random(5)
    lengths = [round(random.lognormvariate(4, 1.2)) for _ in range(960)]
    spread = spread_of(lengths, integer=True)
    assert isinstance(spread, list)
    values = sampler(spread)
    assert values.expected() == pytest.approx(sum(lengths) / len(lengths), rel=0.005)
    assert all(values.draw((i + 0.5) / 32).is_integer() for i in range(32))


def test_no_fitted_constant_is_negative():
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    constants, left = nonnegative_fit(columns, np.array([3.0, 2.0, 1.0]))
    assert constants.tolist() == [2.0, 0.0]
    assert left.tolist() == [1.0, 0.0, -1.0]
