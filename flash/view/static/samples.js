// The list of readable samples that match a search.

import { $, ask, chooseRun, element, figure, visible } from "./tools.js";
import { drawGroup } from "./sample.js";

// Fields of a found sample (`FoundSample` in flash/view/samples.py) that the list shows, with the heads of their columns.
const COLUMNS = [
  ["step", "Step"], ["group_id", "Group"], ["sample_index", "Member"], ["environment", "Environment"], ["reward", "Reward"], ["outcome", "Outcome"],
  ["turns", "Turns"], ["tokens", "Tokens"], ["age", "Age"], ["excerpt", "Last response"],
];
const NAMES = new Set(["step", "group_id", "sample_index"]);  // Numbers that identify a sample, and so have no separators.
const PATIENCE_MS = 250;  // Milliseconds after the last key until the search begins.
const LATER = 20;         // Number of steps after a moment in which samples of that moment may still be trained.

let found = [];            // Samples in the list, in the order in which they were found.
let continued = false;     // True if the user has continued the search to older steps.
let searchedTo = null;     // Step before which a continued search begins; null if no older step is left.
let asked = "";            // Description of the last search: the form, the run's files, and its number of steps.
let order = null;          // Order that the user has chosen: the field `key`, ascending if `up`; null: as found.
let waiting = 0;           // Timer of a search that begins when the user has stopped typing.
let opened = 0;            // Number of groups that the user has opened.
let redraw = () => {};     // Draws the view again, with a new search if the form has changed.

// Show the samples of a step or of a time range. `fields` are values for the fields of the form.
export function lookAt(run, fields) {
  const form = $("query");
  form.reset();
  for (const [name, value] of Object.entries({ run: run.number, time_min: "", time_max: "", ...fields })) form.elements[name].value = value;
  tellTime();
  $("group").hidden = true;
  location.hash = "samples";
}

// Show the time range of the search as a button, whose click removes it; hide the button without a range.
function tellTime() {
  const { time_min: begin, time_max: end } = $("query").elements, at = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");
  $("query-time").hidden = !begin.value;
  $("query-time").textContent = `Active from ${at(begin.value)} to ${at(end.value)} ✕`;
}

// Make the head of the list, and connect the form. The page calls this once; `changed` draws the view again.
export function prepare(changed) {
  redraw = changed;
  $("query-time").onclick = () => { for (const name of ["time_min", "time_max"]) $("query").elements[name].value = ""; tellTime(); redraw(); };
  const head = $("list").tHead.rows[0];
  for (const [key, name] of COLUMNS) {
    const button = element("button", "", name);
    button.title = `Sort the list by ${name.toLowerCase()}`;
    button.onclick = () => { order = { key, up: order?.key === key ? !order.up : key === "excerpt" }; list(); };
    head.append(element("th", key, button));
  }
  $("query").onsubmit = (event) => event.preventDefault();
  $("query").oninput = () => { clearTimeout(waiting); waiting = setTimeout(redraw, PATIENCE_MS); };
  $("older").onclick = () => search(questions(), searchedTo, true);
}

// The fields of the form that the user has filled in, by name, as parameters of a search (`Query` in flash/view/samples.py).
function questions() {
  const given = [...new FormData($("query"))].filter(([, value]) => value !== "");
  return Object.fromEntries(given);
}

// Search again if the form or the files of the run have changed. A list that the user has continued to older steps stays.
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

// The step before which a search begins; null: with the newest. Samples that were active in a time range are not trained much later.
function newestOf(run) {
  const end = $("query").elements.time_max.value, after = end ? run.steps.find((row) => row.time >= end) : undefined;
  return after ? after.step + 1 + LATER : null;
}

// Search, and show the list. `before`: the search begins below this step; null: with the newest one. `older`: the found samples are added
// to the list.
async function search(wanted, before, older = false) {
  const mine = asked;
  $("older").disabled = true;
  try {
    const answer = await ask("/api/samples", before === null ? wanted : { ...wanted, before });
    if (mine !== asked) return;  // A newer search has begun meanwhile.
    found = older ? [...found, ...answer.samples] : answer.samples;
    continued = older;
    searchedTo = answer.searched_to;
    $("found").textContent = answer.newest === null ? "This run has no readable samples. run.log_samples is the number that each step keeps."
      : `${found.length} found${searchedTo === null ? "" : ` down to step ${searchedTo}`}; the newest readable step is ${answer.newest}.`;
    list();
  } catch (error) {
    if (mine === asked) $("found").textContent = error.message;
  } finally {
    $("older").disabled = false;
  }
}

// Show the found samples in the chosen order. A click or Enter opens a sample, and the arrow keys move to its neighbours.
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

// Show the group of a sample below the list. `row` is the row of the sample, which gets the focus back when the group is closed.
async function open(sample, row) {
  const run = $("query").elements.run.value, target = $("group"), mine = ++opened;
  try {
    const group = await ask("/api/group", { run, step: sample.step, group: sample.group_id });
    if (mine !== opened) return;  // The user has opened another sample meanwhile, whose answer may have come first.
    if (group.samples.length) drawGroup(target, group, sample.sample_index);
    else target.replaceChildren(element("p", "hint", `The samples of step ${sample.step} cannot be read: their file was deleted to save space, moved away by a resume, or damaged.`));
  } catch (error) {
    if (mine !== opened) return;
    target.replaceChildren(element("p", "bad", error.message));
  }
  target.hidden = false;
  target.addEventListener("closed", () => row.focus(), { once: true });
  if (document.activeElement === row) target.querySelector("select")?.focus({ preventScroll: true });
  target.scrollIntoView({ block: "nearest" });
}
