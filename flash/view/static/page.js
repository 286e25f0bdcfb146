// The page: chooses runs and view, and requests the new rows of the chosen runs.
//
// A view is a module with `prepare`, which `begin` calls once, and `draw`, which gets the chosen runs. `draw` is called after each
// round of requests and after each choice of the user, so it draws only the parts that have changed. A run has the fields of `RunFacts`
// (flash/view/app.py), its number at the server, and its rows so far: `steps` and `evals`, objects of numbers by column.

import { $, ask, colourOf, element, lasting, Refused, visible } from "./tools.js";
import * as overview from "./overview.js";
import * as samples from "./samples.js";
import * as timeline from "./timeline.js";
import * as cluster from "./cluster.js";

const EVERY_MS = 2000;  // Milliseconds between two rounds of requests. A run writes its files about as often.
const VIEWS = { overview, samples, timeline, cluster };  // By the name that the address has after its #.

let runs = [];            // All runs of the server, by their numbers.
let wake = () => {};      // Ends the pause of `follow`, so that a run that was just chosen is requested at once.

const shown = () => runs.filter((run) => run.shown);

// The name of the view in the address; the overview if it has none.
function view() {
  const name = location.hash.slice(1).split("?")[0];
  return name in VIEWS ? name : "overview";
}

// Show the view of the address, and let it draw the chosen runs.
function draw() {
  for (const link of document.querySelectorAll("nav a")) link.className = link.hash === `#${view()}` ? "here" : "";
  for (const name in VIEWS) $(name).hidden = name !== view();
  VIEWS[view()].draw(shown());
}

// Fill the list of runs at the top, with a checkbox for each. `run.state` becomes the element with the state of a run.
function listRuns() {
  $("runs").replaceChildren(...runs.map((run) => {
    const box = element("input"), swatch = element("i", "swatch");
    box.type = "checkbox";
    box.checked = run.shown;
    box.onchange = () => { run.shown = box.checked; wake(); draw(); };
    swatch.style.color = colourOf(run.number);
    run.state = element("span", "hint");
    const label = element("label", "", box, swatch, element("b", "", run.name), run.state);
    label.title = [run.path, ...Object.entries(run.facts).map(([name, value]) => `${name}: ${value}`)].join("\n");
    return label;
  }));
}

// Write the state of a run beside its name: its last step, how long ago that was, or its end.
function showState(run) {
  const last = run.steps[run.steps.length - 1];
  if (run.gone) { run.state.textContent = "gone: its directory was moved or removed"; return; }
  if (!last) run.state.textContent = run.sequence ? "no step yet" : "";
  else if (run.ended) run.state.textContent = `ended after step ${last.step}`;
  else run.state.textContent = `step ${last.step}${run.facts.steps ? ` of ${run.facts.steps}` : ""}, ${lasting(Math.max(0, Math.round(Date.now() / 1000 - last.time)))} ago`;
}

// Request the new rows of a run. Returns true if more can be requested at once. A run that cannot be read shows its error beside its
// name, and the other runs are still shown.
async function update(run) {
  let came;
  try {
    came = await ask("/api/rows", { run: run.number, sequence: run.sequence, steps: run.steps.length, evals: run.evals.length });
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    run.state.textContent = visible(error.message);
    return false;
  }
  // Another sequence: a resumed run has replaced its rows, or the server was started again. All rows come again.
  if (came.sequence !== run.sequence) Object.assign(run, { sequence: came.sequence, steps: [], evals: [] });
  run.steps.push(...came.steps);
  run.evals.push(...came.evals);
  Object.assign(run, { ended: came.ended, gone: came.gone });
  showState(run);
  return came.more;
}

// Write the state of the connection to the server at the top right. `mood` is a class of the style sheet: good or bad.
function showLink(text, mood) {
  $("link").textContent = text;
  $("link").className = mood;
}

// Request the rows of the chosen runs and draw them, again and again, as long as the page is open. Without an answer it tries again.
async function follow() {
  for (;;) {
    let more = false;
    try {
      for (const run of shown()) more = (await update(run)) || more;
      showLink(shown().length && shown().every((run) => run.ended) ? "complete" : "live", "good");
    } catch (error) {
      showLink(`no answer: is flash view still running? ${error.message}`, "bad");
    }
    draw();
    if (!more) await new Promise((done) => { wake = done; setTimeout(done, EVERY_MS); });
  }
}

// Request the runs and charts, prepare the views, and follow the runs.
async function begin() {
  const contents = await ask("/api/contents");
  runs = contents.runs.map((run, number) => ({ ...run, number, sequence: "", steps: [], evals: [], ended: false }));
  listRuns();
  overview.prepare(contents.charts, draw);
  samples.prepare(draw);
  timeline.prepare(draw);
  cluster.prepare();
  addEventListener("hashchange", draw);
  await follow();
}

begin().catch((error) => showLink(error.message, "bad"));
