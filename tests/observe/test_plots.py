from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from flash.observe.plots import (
    BLUE,
    draw_offpolicy,
    draw_rewards,
    draw_timeline,
    ratio_quantiles,
    run_times,
    write_plots,
)
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.summary import by_step
from flash.observe.timeline import COLOURS, lane_shares, timeline
from flash.types import Activity
from tests.observe.sample_rows import STARTED, eval_row, metrics_row, spans


@pytest.mark.slow
def test_all_plots_are_written_at_readme_width(directory: RunDirectory) -> None:
    directory.append_spans(spans(30))
    for step in range(30):
        directory.append_metrics(metrics_row(step))
    directory.append_evaluation(eval_row(0, 0.3))
    directory.append_evaluation(eval_row(30, 0.9))
    paths = write_plots(directory.path)
    assert [path.name for path in paths] == ["reward.png", "offpolicy.png", "timeline.png"]
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", data[16:24])
        assert width == 1600
        assert height > 300


def curves(axes: Axes) -> dict[str, list[float]]:
    """Return the drawn values by their names in the legend; NaN in gaps."""
    return {str(line.get_label()): np.asarray(line.get_ydata()).tolist() for line in axes.get_lines()}


def test_an_empty_run_gives_no_plot(tmp_path: Path) -> None:
    assert write_plots(tmp_path) == []


def test_a_run_that_ended_after_its_first_evaluation_is_plotted(directory: RunDirectory) -> None:
    directory.append_evaluation(eval_row(0, 0.3, low=None, high=None))
    assert [path.name for path in write_plots(directory.path)] == ["reward.png"]


def test_the_curves_are_the_recorded_numbers_over_steps_and_over_time() -> None:
    figure = draw_rewards(
        [metrics_row(0, reward_mean=None), metrics_row(1, reward_mean=0.5)], [eval_row(0, 0.3), eval_row(2, 0.9)]
    )
    assert figure is not None
    left, right = figure.axes
    reward, accuracy = left.get_lines()
    assert np.array_equal(reward.get_ydata(), [np.nan, 0.5], equal_nan=True)
    assert np.array_equal(accuracy.get_xdata(), [0, 2])
    assert np.array_equal(accuracy.get_ydata(), [0.3, 0.9])
    assert np.array_equal(right.get_lines()[0].get_xdata(), [12.0, 14.0])
    assert np.array_equal(right.get_lines()[1].get_ydata(), [0.3, 0.9])


def test_a_step_that_was_recorded_twice_is_drawn_once_as_it_was_later() -> None:
    rows = [metrics_row(1), metrics_row(0), metrics_row(1, reward_mean=0.5)]
    times, _ = run_times(by_step(rows), [])
    assert times.tolist() == [12.0, 14.0]


def test_without_wall_time_the_unix_time_since_the_first_row_stands_in() -> None:
    rows = [metrics_row(step) for step in range(3)]
    for row in rows:
        del row["wall_s"]
    assert run_times(rows, [])[0].tolist() == [0.0, 2.0, 4.0]


def test_ratio_quantiles_over_the_run_weigh_steps_by_their_tokens_of_that_age_in_logarithms() -> None:
    rows = [
        metrics_row(0, trained_tokens=100, age_1=0.5, ratio_p99_age_1=2.0),
        metrics_row(1, trained_tokens=300, age_1=0.5, ratio_p99_age_1=32.0),
        metrics_row(2, trained_tokens=100, age_1=0.5, ratio_p99_age_1=-1.0),  # changed by somebody
    ]
    ages, ratios = ratio_quantiles(rows)
    assert ages.tolist() == [0, 1]
    assert ratios.tolist() == [pytest.approx([0.9, 1.0, 1.1]), pytest.approx([0.5, 1.01, 16.0])]


def test_rows_without_weights_have_no_offpolicy_plot() -> None:
    assert draw_offpolicy([{"step": 0, "entropy": 1.0}]) is None


def test_the_offpolicy_plot_draws_the_recorded_numbers_and_the_masks_that_occurred() -> None:
    rows = [metrics_row(step, ess=0.9 - step / 10) for step in range(3)]
    figure = draw_offpolicy([*rows, {"step": 3, "entropy": 1.0}])
    assert figure is not None
    weights, ratios, shares, policy, norms = figure.axes
    assert np.allclose(weights.get_lines()[0].get_ydata(), [90, 80, 70])
    assert np.allclose(ratios.get_lines()[1].get_ydata(), [1.0, 1.01])
    low, high = ratios.get_ylim()
    assert low < 0.5
    assert high > 2.0
    assert [text.get_text() for text in shares.get_legend().get_texts()] == [
        "clipped",
        "masked: too old",
        "masked: cap",
    ]
    assert curves(shares)["masked: too old"] == [1.0] * 3
    assert np.array_equal(policy.get_lines()[0].get_ydata(), [row["entropy"] for row in rows])
    assert np.array_equal(norms.get_lines()[0].get_ydata(), [row["grad_norm"] for row in rows])


@pytest.mark.parametrize("known", [[True], [False, True, False], [True, False, True, True]])
def test_a_value_without_known_neighbours_is_drawn_as_a_point(known: list[bool]) -> None:
    rows = [metrics_row(step, reward_mean=0.5 if value else None) for step, value in enumerate(known)]
    figure = draw_rewards(rows, [])
    assert figure is not None
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    x, y = figure.axes[0].transData.transform((known.index(True), 0.5))
    image = np.asarray(canvas.buffer_rgba())
    assert to_hex(image[round(image.shape[0] - y), round(x)] / 255) == BLUE


def test_the_timeline_zooms_into_eight_steps_in_the_middle() -> None:
    prepared = timeline(spans(40), [metrics_row(step) for step in range(40)])
    assert prepared is not None
    assert prepared.zoom_steps == (16, 23)
    assert prepared.zoom == (STARTED + 32.0, STARTED + 48.0)
    assert [lane.name for lane in prepared.lanes] == ["engine 0", "trainer 0"]
    assert [lane.busy for lane in prepared.lanes] == pytest.approx([1.0, 0.75])


def test_engines_come_before_trainers_and_ten_comes_after_nine() -> None:
    names = ["trainer 10", "evaluation", "engine 10", "trainer 9", "engine 9"]
    prepared = timeline([Activity(name, "train", 0.0, 1.0) for name in names], [])
    assert prepared is not None
    assert [lane.name for lane in prepared.lanes] == ["engine 9", "engine 10", "trainer 9", "trainer 10", "evaluation"]
    assert prepared.zoom == (0.25, 0.75)


def test_a_swap_during_generation_is_not_counted_twice() -> None:
    bars = [Activity("e", "generate", 0.0, 4.0), Activity("e", "generate", 3.0, 5.0), Activity("e", "swap", 1.0, 2.0)]
    shares = lane_shares(bars, np.array([0.0, 2.0, 4.0, 8.0]))
    assert shares["swap"].tolist() == [0.5, 0.0, 0.0]
    assert shares["generate"].tolist() == [0.5, 1.0, 0.25]


@given(
    st.lists(
        st.tuples(st.sampled_from([*COLOURS, "other"]), st.integers(0, 50), st.integers(1, 20)),
        min_size=1,
        max_size=25,
    )
)
def test_shares_of_time_sum_to_the_time_in_which_anything_happened(bars: list[tuple[str, int, int]]) -> None:
    lane = [Activity("lane", name, float(start), float(start + length)) for name, start, length in bars]
    edges = np.linspace(0.0, 70.0, 11)
    shares = lane_shares(lane, edges)
    busy = [any(span.start <= second < span.stop for span in lane) for second in range(70)]
    assert sum(shares.values()).tolist() == pytest.approx([sum(busy[at : at + 7]) / 7 for at in range(0, 70, 7)])


@pytest.mark.parametrize("steps", [2, 600])
def test_single_bars_are_drawn_for_short_runs_and_shares_for_long_ones(steps: int) -> None:
    prepared = timeline(spans(steps), [metrics_row(step) for step in range(steps)])
    assert prepared is not None
    whole, close = draw_timeline(prepared).axes
    assert len(close.collections) == 4
    assert len(whole.patches) == (1 if steps == 2 else 5)
    assert {label.get_text() for label in whole.get_yticklabels()} == {"engine 0", "trainer 0"}


def test_every_known_activity_has_its_own_colour() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)
