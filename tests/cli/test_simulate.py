"""`flash simulate`: its arguments give the cells of a sweep, and the cells give a table, a plot and JSON."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from flash.cli.main import BROKEN_PIPE, main
from flash.cli.simulate import (
    Sweep,
    parse_sweep,
    predicted_step_s,
    product,
    recommend,
    resolve_key,
    simulate_command,
    split_values,
)
from flash.config.load import load
from flash.errors import ConfigError
from flash.simulate.report import SimReport, SweepCell
from flash.simulate.tables import print_run, recommendation

RUN = """
run = { name = "small", steps = 4 }
model = { path = "no/such/model/folder" }
env = { path = "no.such.module:Env" }
[rollout]
group_size = 2
max_new_tokens = 64
[engine]
max_sequences = 8
[train]
batch_size = 8
async_ratio = 1
[simulate]
gpus = 4
rollout_gpus = 2
response_tokens = { kind = "lognormal", mean = 20, deviation = 20, low = 1, high = 64 }
prompt_tokens = 10
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the path of a configuration file for a small simulation."""
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def report(samples_per_s: float, ages: dict[int, int], wasted: int = 0) -> SimReport:
    """Return a report with this throughput. `ages`: number of trained tokens by age; `wasted`: discarded tokens."""
    return SimReport(
        seconds=10.0, steps=4, samples=32, trained_tokens=900, generated_tokens=1000, step_s=8 / samples_per_s,
        samples_per_s=samples_per_s, tokens_per_s=28 * samples_per_s, stale_share=0.0, stale_samples=0,
        trainer_busy=0.5, trainer_idle={"batch": 0.5}, engine_busy=0.9,
        engine_idle={"swap": 0.1}, slot_use=0.5, ages=ages, mean_trained_length=20.0, mean_issued_length=21.0,
        ledger={"generated_tokens": 1000, "discarded_tokens": wasted}, rows=[], real_s=0.1, loop_lag_p99_ms=1.0,
    )  # fmt: skip


def cell(samples_per_s: float, ages: dict[int, int], wasted: int = 0, **values: str) -> SweepCell:
    """Return a cell of a sweep with the values of its keys. The other arguments are those of `report`."""
    return SweepCell(values=values, report=report(samples_per_s, ages, wasted), bounds=[])


def test_values_are_split_at_the_commas_outside_of_brackets():
    assert split_values("0, 1,2.5") == ["0", "1", "2.5"]
    assert split_values("{kind='uniform', low=1, high=3},[4, 5]") == ["{kind='uniform', low=1, high=3}", "[4, 5]"]


def test_the_end_of_a_key_is_enough_where_only_one_key_ends_so():
    assert resolve_key("async_ratio") == "train.async_ratio"
    assert resolve_key("rollout_gpus") == "simulate.rollout_gpus"
    assert resolve_key("train.async_ratio") == "train.async_ratio"


def test_output_without_a_reader_ends_the_command_without_a_message(run: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "flash", "simulate", str(run)]
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, "")


def test_an_ambiguous_key_is_refused_with_its_candidates():
    with pytest.raises(ConfigError, match=r"`path` is ambiguous: `model\.path` or `env\.path`"):
        resolve_key("path")


def test_an_unknown_key_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="no key `async_rato`; did you mean `async_ratio`"):
        resolve_key("async_rato")


@pytest.mark.parametrize("text", ["async_ratio", "async_ratio=", "async_ratio=1,,2"])
def test_a_sweep_without_values_is_refused(text: str):
    with pytest.raises(ConfigError, match="expected KEY=VALUE,VALUE"):
        parse_sweep(text)


def test_a_sweep_is_the_product_of_its_keys_and_the_last_changes_fastest():
    sweeps = [Sweep("a", ["0", "1"]), Sweep("b", ["x", "y"])]
    assert product(sweeps) == [("0", "x"), ("0", "y"), ("1", "x"), ("1", "y")]
    assert product([]) == [()]


def test_a_small_gain_of_throughput_is_not_worth_older_tokens():
    young, fast, slow = cell(9.9, {0: 5, 1: 5}), cell(10.0, {0: 5, 4: 5}), cell(9.0, {0: 5})
    assert recommend([slow, fast, young]) is young


def test_a_large_gain_of_throughput_is_worth_older_tokens():
    young, fast = cell(5.0, {0: 5}), cell(10.0, {0: 5, 4: 5})
    assert recommend([young, fast]) is fast


def test_an_age_that_no_token_has_does_not_count():
    assert cell(1.0, {0: 5, 1: 1, 7: 0}).oldest == 1


def test_the_recommendation_names_the_choice_and_what_it_costs():
    slow, best = cell(5.0, {0: 5}, k="1"), cell(10.0, {0: 5, 2: 5}, wasted=30, k="2")
    assert recommendation([slow, best], best) == (
        "Take k = 2: 280 trained tokens/s, the fastest and 2.00x the slowest, "
        "with no trained token older than 2 versions and 3.0% of the tokens wasted."
    )


def test_one_run_is_printed_with_the_causes_of_idle_time_and_the_bounds(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", str(run), "run.steps=3"]) == 0
    shown = capsys.readouterr().out
    assert "small: 2 GPUs generate, 2 train; 3 steps of 8 samples, async_ratio 1" in shown
    for part in ("step time", "throughput", "slot use", "engines", "trainers", "age", "waste", "capacity", "L/(α+1)"):
        assert part in shown


def test_names_are_printed_as_they_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(run, simulated=True)
    named = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name="[bold]:key:"))
    print_run(named, cell(5.0, {0: 5}))
    assert capsys.readouterr().out.startswith("[bold]:key:: 2 GPUs generate")


def test_repeated_attempts_are_counted_as_attempts_and_not_as_samples(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = cell(5.0, {0: 5})
    report = msgspec.structs.replace(
        found.report,
        ledger={
            "issued": 10,
            "generated_tokens": 100,
            "discarded_tokens_stale": 20,
            "given_up_env_error": 1,
            "retried_env_error": 3,
            "filtered": 2,
        },
    )
    print_run(load(run, simulated=True), msgspec.structs.replace(found, report=report))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    waste = lines[lines.index("waste count share") + 1 :][:4]
    assert waste == [
        "repeated env error (attempts) 3 30.0%",
        "filtered (samples) 2 20.0%",
        "given up env error (samples) 1 10.0%",
        "stale (tokens) 20 20.0%",
    ]


def test_a_line_says_that_the_run_cuts_responses(run: Path, capsys: pytest.CaptureFixture[str]):
    simulate_command([run], ["rollout.max_new_tokens=32"])
    assert "responses of up to 64 tokens were cut at rollout.max_new_tokens = 32" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_shows_every_cell_marks_the_best_one_and_writes_the_named_files(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plot, table = tmp_path / "sweep.png", tmp_path / "sweep.json"
    sweeps = ["async_ratio=0,2", "rollout_gpus=1,2,3"]
    cells = simulate_command([run], [], sweeps=sweeps, plot=plot, json=table)
    shown = capsys.readouterr().out
    assert len(cells) == 6
    assert shown.count("◀ best") == 1
    assert "\nTake train.async_ratio = " in shown
    assert plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(table.read_text())
    assert [one["values"] for one in written][:2] == [
        {"train.async_ratio": "0", "simulate.rollout_gpus": "1"},
        {"train.async_ratio": "0", "simulate.rollout_gpus": "2"},
    ]
    assert written[0]["report"]["steps"] == 4
    assert written[0]["bounds"][-1]["name"] == "capacity"


@pytest.mark.slow
def test_a_sweep_over_words_is_drawn_too(run: Path, tmp_path: Path):
    simulate_command([run], ["run.steps=2"], sweeps=["rollout.swap=keep,recompute"], plot=tmp_path / "swap.png")
    assert (tmp_path / "swap.png").read_bytes().startswith(b"\x89PNG")


def test_one_run_is_drawn(run: Path, tmp_path: Path):
    simulate_command([run], ["run.steps=2"], plot=tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_an_invalid_cell_is_refused_before_any_cell_runs(run: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"expected fewer than simulate\.gpus = 4"):
        simulate_command([run], [], sweeps=["rollout_gpus=2,4"], json=tmp_path / "never.json")
    assert not (tmp_path / "never.json").exists()


def test_a_key_swept_twice_is_refused(run: Path):
    with pytest.raises(ConfigError, match=r"names `train\.async_ratio` more than once"):
        simulate_command([run], [], sweeps=["async_ratio=1", "train.async_ratio=2"])


def test_a_folder_that_is_missing_is_named_before_anything_runs(run: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        simulate_command([run], [], json=tmp_path / "nowhere" / "out.json")


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("simulate.rollout_gpus=3", "expected a multiple of engine.tensor_parallel = 2"),
        ("cluster.nodes=2", "expected at most one per simulated engine: 1"),
        ("simulate.response_tokens=long", 'expected a number, .*, got "long"; a distribution is no text any more'),
        ("rollout.max_new_tokens=9999", "expected at most 4095"),
        ("train.batch_size=9", "expected a multiple of rollout.group_size"),
    ],
)
def test_a_configuration_that_cannot_be_simulated_is_refused(run: Path, override: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        simulate_command([run], ["engine.tensor_parallel=2", override])


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("env_s=-1", r"`simulate\.env_s` \(setting\): expected at least 0, got -1"),
        ("reset_s=[-1, 1]", r"`simulate\.reset_s\[0\]` \(setting\): expected at least 0, got -1"),
        (
            'env_s={kind="normal", mean=-1, deviation=1}',
            r"`simulate\.env_s\.mean` .*: expected at least 0, got -1",
        ),
        ('turns={kind="uniform", low=-2, high=3}', r"`simulate\.turns\.low` .*: expected at least 0, got -2"),
        ("observation_tokens=-5", r"`simulate\.observation_tokens` .*: expected at least 0, got -5"),
    ],
)
def test_negative_times_lengths_and_turns_are_refused_with_their_key(run: Path, override: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        load([run], [f"simulate.{override}"], simulated=True)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("success=2", r"`simulate\.success` \(setting\): expected a probability from 0 to 1, got 2"),
        ("success=[0.5, -1]", r"`simulate\.success\[1\]` .*: expected a probability from 0 to 1, got -1"),
        (
            'success={kind="uniform", low=0, high=3}',
            r"`simulate\.success\.high` .*: expected a probability from 0 to 1",
        ),
        ("turns=0", r"`simulate\.turns` .*: expected at least 1, got 0"),
        ("turns=[1, 0.2]", r"`simulate\.turns\[1\]` .*: expected at least 1, got 0\.2"),
        ("response_tokens=0", r"`simulate\.response_tokens` .*: expected at least 1, got 0"),
        ("prompt_tokens=-5", r"`simulate\.prompt_tokens` .*: expected at least 1, got -5"),
    ],
)
def test_impossible_probabilities_and_counts_are_refused_with_their_key(run: Path, override: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        load([run], [f"simulate.{override}"], simulated=True)


def test_prompts_that_never_leave_room_for_a_response_are_refused_before_anything_runs(run: Path):
    for prompts in ("4096", "[100000, 4096]", '{kind="uniform", low=5000, high=9000}'):
        expected = r"leaves no room in model\.max_length = 4096: .* at most 4095"
        with pytest.raises(ConfigError, match=r"`simulate\.prompt_tokens` \(setting\): " + expected):
            load([run], [f"simulate.prompt_tokens={prompts}"], simulated=True)
    assert load([run], ["simulate.prompt_tokens=[4095, 100000]"], simulated=True).model.max_length == 4096


def test_a_distribution_may_be_cut_at_1_turn_and_at_certain_success(run: Path):
    cut = [
        'simulate.turns={kind="lognormal", mean=0.8, deviation=0.8}',
        'simulate.success={kind="normal", mean=0.5, deviation=1}',
    ]
    assert load([run], [*cut, "simulate.prompt_tokens=1"], simulated=True).simulate is not None


def test_times_and_later_observations_may_be_0(run: Path):
    zeros = ["simulate.env_s=0", "simulate.reset_s=[0, 1]", "simulate.observation_tokens=0"]
    assert load([run], zeros, simulated=True).simulate is not None


def test_without_a_simulate_table_there_is_nothing_to_simulate(tmp_path: Path):
    (tmp_path / "real.toml").write_text(RUN.partition("[simulate]")[0])
    with pytest.raises(ConfigError, match=r"`simulate`: is missing: the \[simulate\] table"):
        simulate_command([tmp_path / "real.toml"], [])


@pytest.mark.slow
def test_predictions_are_made_from_several_draws_of_the_workload(run: Path):
    seconds = predicted_step_s(run)
    assert len(set(seconds.tolist())) == len(seconds) > 1


@pytest.mark.integration
def test_simulating_imports_neither_torch_nor_vllm(run: Path):
    code = (
        "import sys; from flash.cli.main import main; "
        f"assert main(['simulate', {str(run)!r}, 'run.steps=1']) == 0; "
        "sys.exit(', '.join({'torch', 'vllm', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def workers_of(pid: int) -> list[tuple[int, int]]:
    """Return the id and the processor time, in ticks of the kernel's clock, of each child of a process."""
    found: list[tuple[int, int]] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(OSError):  # one that has only asked the machine something has ended
            ticks = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11]
            found.append((int(child), int(ticks)))
    return found


@pytest.fixture
def sweep(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A sweep that would take hours, in a session of its own, when its workers compute."""
    command = "import sys; from flash.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["simulate", str(run), "run.steps=100000", "--sweep", "train.batch_size=8,16,24,32,40,48"]
    process = subprocess.Popen(
        [sys.executable, "-c", command, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 60
        # It takes less than two seconds to start a worker.
        while max((ticks for _, ticks in workers_of(process.pid)), default=0) <= 2 * os.sysconf("SC_CLK_TCK"):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_an_interrupted_sweep_ends_at_once_with_its_workers_and_says_nothing(sweep: subprocess.Popen[bytes]) -> None:
    """As from a terminal: the interrupt goes to all processes of the command."""
    os.killpg(sweep.pid, signal.SIGINT)
    said = sweep.communicate(timeout=60)[1]
    assert (sweep.returncode, said) == (130, b"")


def test_the_workers_of_a_killed_sweep_end_too(sweep: subprocess.Popen[bytes]) -> None:
    assert len(workers_of(sweep.pid)) > 1
    sweep.kill()
    sweep.communicate(timeout=60)  # returns when no process has its standard error open any more
