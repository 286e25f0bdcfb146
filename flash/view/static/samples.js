// The list of readable samples, found by what they are.

import { $, ask, chooseRun, element, figure, visible } from "./tools.js";
import { drawGroup } from "./sample.js";

const COLUMNS = [
  ["step", "Step"], ["group_id", "Group"], ["sample_index", "Member"], ["environment", "Environment"], ["reward", "Reward"], ["outcome", "Outcome"],
  ["turns", "Turns"], ["tokens", "Tokens"], ["age", "Age"], ["excerpt", "Says last"],
];
const NAMES = new Set(["step", "group_id", "sample_index"]);  // Numbers that count nothing.
const PATIENCE_MS = 250;  // Between keys.
const LATER = 20;         // Steps in which what was under way at some time may still be trained.

let found = [], continued = false, searchedTo = null, asked = "", order = null, waiting = 0, redraw = () => {};

// Shows the samples of a step, or of a time: `asked` fills fields of the form.
export function lookAt(run, asked) {
  const form = $("query");
  form.reset();
  for (const [name, value] of Object.entries({ run: run.number, time_min: "", time_max: "", ...asked })) form.elements[name].value = value;
  tellTime();
  $("group").hidden = true;
  location.hash = "samples";
}

function tellTime() {
  const { time_min: begin, time_max: end } = $("query").elements, at = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");
  $("query-time").hidden = !begin.value;
  $("query-time").textContent = `Under way ${at(begin.value)} to ${at(end.value)} ✕`;
}

export function prepare(changed) {
  redraw = changed;
  $("query-time").onclick = () => { for (const name of ["time_min", "time_max"]) $("query").elements[name].value = ""; tellTime(); redraw(); };
  const head = $("list").tHead.rows[0];
  for (const [key, name] of COLUMNS) {
    const button = element("button", "", name);
    button.title = `Sort what is listed by ${name.toLowerCase()}`;
    button.onclick = () => { order = { key, up: order?.key === key ? !order.up : key === "excerpt" }; list(); };
    head.append(element("th", key, button));
  }
  $("query").onsubmit = (event) => event.preventDefault();
  $("query").oninput = () => { clearTimeout(waiting); waiting = setTimeout(redraw, PATIENCE_MS); };
  $("older").onclick = () => search(questions(), searchedTo, true);
}

function questions() {
  const given = [...new FormData($("query"))].filter(([, value]) => value !== "");
  return Object.fromEntries(given);
}

// Asks again when the questions, or the run's files, are other ones. A list that somebody has continued stays.
export function draw(runs) {
  const run = chooseRun($("query").elements.run, runs);
  if (!run) {
    found = [];
    asked = "";
    $("found").textContent = "Choose a run above.";
    return list();
  }
  const now = JSON.stringify([questions(), run.sequence]), stands = JSON.stringify(run.steps.length);
  if (asked === now + stands) return undefined;
  const same = asked.startsWith(now) && continued;
  asked = now + stands;
  return same ? undefined : search(questions(), newestOf(run));
}

// Nothing newer needs to be looked at for what was under way at some time.
function newestOf(run) {
  const end = $("query").elements.time_max.value, after = end ? run.steps.find((row) => row.time >= end) : undefined;
  return after ? after.step + 1 + LATER : null;
}

async function search(wanted, before, older = false) {
  const mine = asked;
  $("older").disabled = true;
  try {
    const answer = await ask("/api/samples", before === null ? wanted : { ...wanted, before });
    if (mine !== asked) return;
    found = older ? [...found, ...answer.samples] : answer.samples;
    continued = older;
    searchedTo = answer.searched_to;
    $("found").textContent = answer.newest === null ? "No readable samples are there (run.log_samples is how many each step leaves)."
      : `${found.length} found${searchedTo === null ? "" : ` down to step ${searchedTo}`}; the newest readable step is ${answer.newest}.`;
    list();
  } catch (error) {
    if (mine === asked) $("found").textContent = error.message;
  } finally {
    $("older").disabled = false;
  }
}

function list() {
  const rows = order ? [...found].sort((one, other) => (one[order.key] < other[order.key] ? -1 : one[order.key] > other[order.key] ? 1 : 0) * (order.up ? 1 : -1)) : found;
  $("list").tBodies[0].replaceChildren(...rows.map((sample) => {
    const row = element("tr", "", ...COLUMNS.map(([key]) => {
      const value = sample[key];
      return element("td", key, NAMES.has(key) ? String(value) : typeof value === "number" ? figure(value) : visible(value));
    }));
    row.tabIndex = 0;
    row.onclick = () => open(sample, row);
    row.onkeydown = (event) => {
      const other = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
      if (event.key === "Enter") open(sample, row);
      if (!other) return;
      other.focus();
      event.preventDefault();
    };
    return row;
  }));
  $("list").classList.toggle("one-environment", rows.every((sample) => !sample.environment));
  $("older").hidden = searchedTo === null || !found.length && !asked;
}

async function open(sample, row) {
  const run = $("query").elements.run.value, target = $("group");
  try {
    const group = await ask("/api/group", { run, step: sample.step, group: sample.group_id });
    drawGroup(target, group, sample.sample_index);
  } catch (error) {
    target.replaceChildren(element("p", "bad", error.message));
  }
  target.hidden = false;
  target.addEventListener("closed", () => row.focus(), { once: true });
  if (document.activeElement === row) target.querySelector("select")?.focus({ preventScroll: true });
  target.scrollIntoView({ block: "nearest" });
}
