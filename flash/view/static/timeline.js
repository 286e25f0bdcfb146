// The timeline: the activities of each worker in a window of time, which the user can move and zoom.

import { lookAt } from "./samples.js";
import { $, ask, byFinger, chooseRun, element, lookOf, plain } from "./tools.js";

const LANE_PX = 26;        // Height of a lane in pixels.
const MOST_MARKS = 60;     // Steps in the window up to which their ends are marked.
const MOST_NUMBERS = 20;   // Steps in the window up to which the marks have numbers.
const SMALLEST_S = 0.01;   // Seconds of the smallest window, and of the time that a step may end before the last bar of its training.
const REFRESH_MS = 5000;   // Milliseconds between two requests of a run that goes on, at least.
const DOUBLE_MS = 350;     // Milliseconds after a click in which a second one makes it a double click.

let clicked = 0;           // Timer of a click that may still become a double click.
let chosen = null;         // Run that is drawn.
let part = null;           // Window that the user has chosen, with `start` and `stop` in Unix seconds; null: the whole run.
let drawn = "";            // Description of the last request. While it stays the same, nothing is requested.
let answer = null;         // Last answer: a `Window` (flash/view/timeline.py); null if nothing is recorded.
let redraw = () => {};     // Draws the view again, with a new request if the window has changed.

// Connect the buttons. The page calls this once; `changed` draws the view again.
export function prepare(changed) {
  redraw = changed;
  const moved = (act) => () => {
    if (!answer) return;
    const length = answer.stop - answer.start, middle = (answer.start + answer.stop) / 2;
    part = act(length, middle);
    redraw();
  };
  // The window of `length` seconds around the moment `middle`.
  const around = (length, middle) => ({ start: middle - length / 2, stop: middle + length / 2 });
  $("zoom-in").onclick = moved((length, middle) => around(Math.max(SMALLEST_S, length / 2), middle));
  $("zoom-out").onclick = moved((length, middle) => around(length * 2, middle));
  $("earlier").onclick = moved((length, middle) => around(length, middle - length / 2));
  $("later").onclick = moved((length, middle) => around(length, middle + length / 2));
  $("whole").onclick = moved(() => null);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawn = ""; redraw(); });
}

// Request the window of the chosen run, if it may have changed, and draw it.
export async function draw(runs) {
  const run = chooseRun($("timeline-run"), runs);
  if (run !== chosen) { chosen = run; part = null; }
  if (!run) return note("Choose a run above.");
  // A window in the past does not change. The whole run is requested again when 1 % of it is new.
  const every = Math.max(REFRESH_MS, answer ? 10 * (answer.stop - answer.start) : 0);
  const now = JSON.stringify([run.number, run.sequence, part, part || run.ended ? 0 : Math.floor(Date.now() / every)]);
  if (now === drawn) return undefined;
  drawn = now;
  try {
    const came = await ask("/api/timeline", { run: run.number, ...(part || {}) });
    if (now !== drawn) return undefined;  // The user has chosen another window meanwhile.
    answer = came;
    if (!came) return note("Nothing is recorded yet.");
    drawBars(run, came);
    return note(came.lanes.every((lane) => lane.exact) ? "" : "Where single bars would be too thin, heights are shares of time. Zoom in to see each bar.");
  } catch (error) {
    drawn = "";  // The next call requests the window again.
    return note(error.message);
  }
}

// Write a text below the timeline. Without a run or an answer, also remove the bars of the last one.
function note(text) {
  $("timeline-note").textContent = text;
  if (!answer || text.startsWith("Choose")) { $("bars").replaceChildren(); $("activities").replaceChildren(); Plotly.purge($("bars")); }
}

// Plotly's time axes have no time zones, so local time is passed as if it were UTC. `zone` is the distance of local time from UTC at a
// Unix time, in seconds. `clock` is a place on Plotly's axis, in milliseconds, for a Unix time in seconds; `seconds` is its inverse.
// Plotly reports a place as a number or as a text, such as "2026-01-31 12:00:00.5".
const zone = (seconds) => -60 * new Date(1000 * seconds).getTimezoneOffset();
const clock = (seconds) => 1000 * (seconds + zone(seconds));
const seconds = (shown) => {
  const there = typeof shown === "number" ? shown / 1000 : Date.parse(`${shown.replace(" ", "T")}${shown.length > 10 ? "" : "T00:00"}Z`) / 1000;
  return there - zone(there);
};

// Draw the bars of a window, with a curve of Plotly for each activity, and dotted lines at the ends of the steps.
// Lane 0 is at the top and has the place 0 on the y axis. Its bars take 0.84 of its height, from low to high (`LaneBar`).
function drawBars(run, window) {
  const look = lookOf(), traces = new Map();
  const colourOf = (name) => (name === "wait" ? look.wait : window.colours[name]);
  $("activities").replaceChildren(...Object.keys(window.colours).map((name) => {
    const swatch = element("i", "block");
    swatch.style.background = colourOf(name);
    return element("span", "", swatch, ` ${name}`);
  }));
  for (const name in window.colours) {
    traces.set(name, { type: "bar", orientation: "h", name: plain(name), x: [], base: [], y: [], width: [], customdata: [],
      marker: { color: colourOf(name), line: { width: 0 } }, hovertemplate: "%{customdata}" });
  }
  window.lanes.forEach((lane, place) => {
    for (const [name, start, length, low, high] of lane.bars) {
      const trace = traces.get(name), tall = 0.84 * (high - low);
      trace.x.push(1000 * length);
      trace.base.push(clock(start));
      trace.y.push(place + 0.42 - 0.84 * low - tall / 2);
      trace.width.push(tall);
      trace.customdata.push(lane.exact ? `${plain(name)}, ${length.toPrecision(3)} s` : `${plain(name)}, ${Math.round(100 * (high - low))} % of ${length.toPrecision(3)} s`);
    }
  });
  const marks = run.steps.filter((row) => row.time >= window.start && row.time <= window.stop);
  const shapes = marks.length > MOST_MARKS ? [] : marks.map((row) => ({ type: "line", yref: "paper", x0: clock(row.time), x1: clock(row.time), y0: 0, y1: 1,
    layer: "above", line: { color: look.ink, width: 1, dash: "dot" } }));
  const annotations = marks.length > MOST_NUMBERS ? [] : marks.map((row) => ({ x: clock(row.time), yref: "paper", y: 1, yanchor: "bottom", xanchor: "right",
    text: `${row.step}`, showarrow: false, font: { size: 10, color: look.faint } }));
  const height = 80 + LANE_PX * window.lanes.length;
  const layout = {
    height, margin: { l: 10, r: 8, t: 18, b: 40 }, barmode: "overlay", bargap: 0, showlegend: false, hovermode: "closest",
    dragmode: byFinger() ? false : "zoom", paper_bgcolor: look.card, plot_bgcolor: look.card, font: { color: look.ink, size: 11 },
    hoverlabel: { bgcolor: look.card, font: { color: look.ink } }, shapes, annotations,
    xaxis: { type: "date", range: [clock(window.start), clock(window.stop)], color: look.ink, gridcolor: look.grid },
    yaxis: { range: [window.lanes.length - 0.5, -0.5], fixedrange: true, automargin: true, color: look.ink, showgrid: false, zeroline: false, ticklabelstandoff: 6,
      tickvals: window.lanes.map((_, place) => place), ticktext: window.lanes.map((lane) => `${plain(lane.name)} · ${Math.round(100 * lane.busy)} %`) },
  };
  const target = $("bars"), first = !target.data;
  target.style.height = `${height}px`;
  Plotly.react(target, [...traces.values()], layout, { displayModeBar: false, responsive: true, doubleClick: false });
  if (!first) return;  // Plotly keeps the functions below for later calls.
  target.on("plotly_relayout", (change) => {
    if (!("xaxis.range[0]" in change)) return;
    const start = seconds(change["xaxis.range[0]"]), stop = seconds(change["xaxis.range[1]"]);
    if (stop - start >= SMALLEST_S) part = { start, stop };
    redraw();
  });
  target.on("plotly_doubleclick", () => { clearTimeout(clicked); part = null; redraw(); });
  target.on("plotly_click", ({ points: [bar] }) => { clearTimeout(clicked); clicked = setTimeout(() => open(bar), DOUBLE_MS); });
}

// Show the samples of a bar that the user has clicked, in the samples view. A trainer's bar belongs to the step that is committed next; for
// another worker, the samples that were active at the time are shown.
function open(bar) {
  const { base, x, y } = bar.data, place = bar.pointNumber;
  const start = seconds(base[place]), stop = start + x[place] / 1000, lane = answer.lanes[Math.round(y[place])].name;
  const step = lane.startsWith("trainer") ? chosen.steps.find((row) => row.time >= stop - SMALLEST_S)?.step : undefined;
  lookAt(chosen, step === undefined ? { time_min: start, time_max: stop } : { step });
}
