// The charts of the metrics, with the curves of several runs in each.

import { $, byFinger, colourOf, element, figure, lookOf, plain } from "./tools.js";

const MOST_POINTS = 1200;  // Points of a curve. Of more, neighbours are averaged: a screen has no more pixels.
const SMOOTH_FROM = 20;    // Rows from which a running mean is drawn.
const MARKED = 40;         // Evaluations of a run up to which each is drawn as a point.
const MOST_NAMES = 8;      // Names of curves that a chart lists.

const cards = new Map();   // By id of the chart: its elements, whether it is on the screen, and the version of its data that was drawn.
let charts = [];           // Charts as the server describes them (`DrawnChart` in flash/view/charts.py).
let zoom = null;           // Range of the x axis of all charts that the user has chosen; null: all of it.
let redraw = () => {};     // Draws the view again.

// Make a card for each chart. The page calls this once; `changed` draws the view again. Only cards near the visible part of the page are
// drawn, because drawing all of them takes long.
export function prepare(described, changed) {
  charts = described;
  redraw = changed;
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) cards.get(entry.target.dataset.chart).visible = entry.isIntersecting;
    redraw();
  }, { rootMargin: "300px" });
  for (const chart of charts) {
    const now = element("span", "now"), lines = element("div", "lines"), plot = element("div", "plot");
    const title = element("h2", "", chart.unit ? `${chart.title}, ${chart.unit}` : chart.title);
    const box = element("article", "card", element("header", "", title, now), lines, plot,
      element("p", "", chart.means), element("p", "hint", `Worry when: ${chart.worry}`));
    box.dataset.chart = chart.id;
    cards.set(chart.id, { box, now, lines, plot, visible: false, drawn: "" });
    $("charts").append(box);
    seen.observe(box);
  }
  for (const id of ["axis", "smooth"]) $(id).onchange = () => { zoom = null; redraw(); };
  matchMedia("(prefers-color-scheme: dark)").onchange = redraw;
}

// The rows of a run from which a chart is drawn.
const rowsOf = (chart, run) => (chart.of === "evals" ? run.evals : run.steps);

// The curves of a run in a chart. A line with a star is a curve for each column that has any text in place of the star.
// In a chart with more than two lines, lines after the first are left out if their values are always 0.
function curvesOf(chart, run) {
  const rows = rowsOf(chart, run);
  return chart.lines.flatMap((line, place) => {
    if (!line.key.includes("*")) {
      const shown = place && chart.lines.length > 2 ? (row) => row[line.key] : (row) => line.key in row;
      return rows.some(shown) ? [{ ...line, title: line.name }] : [];
    }
    const [begin, end] = line.key.split("*");
    return [...columnsOf(rows)].filter((key) => key.startsWith(begin) && key.endsWith(end)).sort()
      .map((key) => ({ ...line, key, title: key.slice(begin.length, key.length - end.length) }));
  });
}

// The names of all columns in these rows.
function columnsOf(rows) {
  const found = new Set();
  for (const row of rows) for (const key in row) found.add(key);
  return found;
}

// Draw the charts of which anything has changed. A chart without a curve is hidden, and named below the others.
export function draw(runs) {
  const byHours = $("axis").value === "hours", look = lookOf(), unmeasured = [];
  for (const chart of charts) {
    const card = cards.get(chart.id);
    const all = runs.flatMap((run) => curvesOf(chart, run).map((curve) => ({ ...curve, run, rows: rowsOf(chart, run) })));
    card.box.hidden = !all.length;
    if (!all.length) unmeasured.push(chart.title);
    const version = JSON.stringify([runs.map((run) => [run.name, run.sequence, rowsOf(chart, run).length]), byHours, $("smooth").checked, zoom, look]);
    if (!all.length || !card.visible || version === card.drawn) continue;
    card.drawn = version;
    drawChart(chart, card, all, runs, byHours, look);
  }
  $("unmeasured").textContent = !runs.length ? "Choose a run above."
    : runs.every((run) => !run.steps.length && !run.evals.length) ? "No step is trained yet."
      : unmeasured.length ? `The chosen runs do not measure: ${unmeasured.join(", ")}.` : "";
}

// Draw a chart. `all` has its curves: those of `curvesOf`, each with its run and rows. `byHours`: the x axis is time. `look` is that of
// `lookOf`. With several runs, each run has a colour, and the curves of a run differ in their dashes; with one run, each curve has a colour.
function drawChart(chart, card, all, runs, byHours, look) {
  const titles = [...new Set(all.map((curve) => curve.title))];
  const colour = (curve) => colourOf(runs.length > 1 ? curve.run.number : titles.indexOf(curve.title) + (titles.length > 1 ? 0 : curve.run.number));
  card.now.textContent = runs.length > 1 ? "" : lastOf(chart, all[0]);
  card.lines.replaceChildren(...(titles.length < 2 && !titles[0] ? [] : titles.slice(0, MOST_NAMES).map((title) => {
    const curve = all.find((one) => one.title === title), swatch = element("i", `swatch ${curve.dash}`);
    if (runs.length === 1) swatch.style.color = colour(curve);
    return element("span", "", swatch, ` ${title || "all"}`);
  })), titles.length > MOST_NAMES ? `and ${titles.length - MOST_NAMES} more` : "");
  const traces = all.flatMap((curve) => tracesOf(chart, curve, colour(curve), byHours, runs.length > 1));
  const axis = { color: look.ink, gridcolor: look.grid, zeroline: false, linecolor: look.faint, automargin: true };
  const layout = {
    margin: { l: 44, r: 8, t: 6, b: 34 }, height: 220, showlegend: false, hovermode: "x unified",
    dragmode: byFinger() ? false : "zoom", paper_bgcolor: look.card, plot_bgcolor: look.card,
    font: { color: look.ink, size: 11 }, hoverlabel: { bgcolor: look.card, font: { color: look.ink } },
    xaxis: { ...axis, title: { text: byHours ? "hours" : "step", standoff: 4 }, ...(zoom ? { range: zoom } : { autorange: true }) },
    yaxis: { ...axis, type: chart.log ? "log" : "linear", rangemode: chart.from_zero ? "tozero" : "normal", fixedrange: true,
      ticksuffix: chart.percent ? " %" : "", exponentformat: "power" },
    shapes: chart.limit === null ? [] : [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: scaled(chart, chart.limit), y1: scaled(chart, chart.limit),
      line: { color: look.faint, width: 1, dash: "dash" } }],
  };
  const before = card.plot.data;
  Plotly.react(card.plot, traces, layout, { displayModeBar: false, responsive: true });
  if (!before) card.plot.on("plotly_relayout", (change) => zoomed(change));
}

// Take the range of the x axis that the user has chosen in one chart, or its reset, for all charts. Plotly calls this after other changes
// too, such as a new width.
function zoomed(change) {
  const range = "xaxis.range[0]" in change ? [change["xaxis.range[0]"], change["xaxis.range[1]"]]
    : change["xaxis.autorange"] ? null : undefined;
  if (range === undefined) return;
  zoom = range;
  redraw();
}

// A value as the chart shows it: shares in percent.
const scaled = (chart, value) => (chart.percent && value !== undefined ? 100 * value : value);

// The last value of a curve, as a text.
function lastOf(chart, curve) {
  const known = curve.rows.filter((row) => curve.key in row);
  return `${figure(scaled(chart, known[known.length - 1][curve.key]))}${chart.percent ? " %" : ""}`;
}

// The curves of Plotly that draw a curve: one, or two if a running mean is drawn over the pale values. `named`: the name has that of the run.
function tracesOf(chart, curve, colour, byHours, named) {
  const rows = curve.rows.filter((row) => (byHours ? "wall_s" : "step") in row);
  const x = rows.map((row) => (byHours ? row.wall_s / 3600 : row.step));
  const column = (key) => rows.map((row) => scaled(chart, row[key]) ?? null);
  const name = plain([named ? curve.run.name : "", curve.title].filter(Boolean).join(": ") || chart.title);
  const line = { color: colour, dash: curve.dash, width: 2 };
  const base = { type: "scatter", mode: "lines", x, name, line, connectgaps: false };
  if (chart.of === "evals") return heldOut(base, curve, rows, column, colour);
  const y = column(curve.key), unit = chart.percent ? " %" : "";
  const thin = thinned(x, y);
  if (x.length < SMOOTH_FROM || !$("smooth").checked) return [{ ...base, ...thin, ...pointsAlone(thin.y), hovertemplate: `%{y:.4~g}${unit}` }];
  const mean = thinned(x, runningMean(y));
  return [
    { ...base, ...thin, line: { ...line, width: 1 }, opacity: 0.35, hoverinfo: "skip" },
    { ...base, ...mean, customdata: thin.y, hovertemplate: `%{y:.4~g}${unit} (%{customdata:.4~g}${unit})` },
  ];
}

// A line of one value has no length, so a value without a known neighbour is drawn as a point.
function pointsAlone(y) {
  const known = (at) => (y[at] ?? null) !== null;
  const sizes = y.map((_, at) => (known(at) && !known(at - 1) && !known(at + 1) ? 6 : 0));
  return sizes.some(Boolean) ? { mode: "lines+markers", marker: { size: sizes } } : { mode: "lines" };
}

// The curves of Plotly for evaluations: points with error bars, or a line in a band if there are many. `base` has the fields that all
// curves have, and `column` returns the values of a column. Only the mean reward has an interval.
function heldOut(base, curve, rows, column, colour) {
  const y = column(curve.key), few = rows.length <= MARKED, low = column("low"), high = column("high");
  const made = { ...base, y, mode: few ? "lines+markers" : "lines", connectgaps: true, hovertemplate: "%{y:.3f}" };
  if (curve.key !== "mean_reward") return [made];
  made.customdata = rows.map((_, at) => [low[at], high[at]]);
  made.hovertemplate = "%{y:.3f} (%{customdata[0]:.3f} to %{customdata[1]:.3f})";
  const away = (ends) => ends.map((end, at) => Math.abs(end - y[at]));
  if (few) return [{ ...made, error_y: { symmetric: false, array: away(high), arrayminus: away(low), thickness: 1.2, width: 3 } }];
  return [
    { ...base, y: low, line: { width: 0 }, hoverinfo: "skip" },
    { ...base, y: high, line: { width: 0 }, fill: "tonexty", fillcolor: `${colour}33`, hoverinfo: "skip" },
    made,
  ];
}

// Means of neighbours, so that no more points are drawn than can be seen. `null` is a value that is not known, as in `runningMean`.
function thinned(x, y) {
  const size = Math.ceil(x.length / MOST_POINTS);
  if (size <= 1) return { x, y };
  const many = { x: [], y: [] };
  for (let at = 0; at < x.length; at += size) {
    const known = y.slice(at, at + size).filter((value) => value !== null);
    many.x.push(x[at]);
    many.y.push(known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null);
  }
  return many;
}

// The mean in a window around each value, which holds a twentieth of all values and at least five.
function runningMean(y) {
  const half = Math.max(2, Math.floor(y.length / 40)), sums = [0], counts = [0];
  for (const value of y) {
    sums.push(sums[sums.length - 1] + (value ?? 0));
    counts.push(counts[counts.length - 1] + (value === null ? 0 : 1));
  }
  return y.map((_, at) => {
    const first = Math.max(0, at - half), last = Math.min(y.length, at + half + 1), count = counts[last] - counts[first];
    return count ? (sums[last] - sums[first]) / count : null;
  });
}
