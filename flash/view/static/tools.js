// Functions that all views use. All text is set as text, never as HTML.

// The element of the page with an id.
export const $ = (id) => document.getElementById(id);

// A new element that is not in the page yet. Its children are elements or texts. `className` is "" or left out for none.
export function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// Error of a server that was reached and has refused the request.
export class Refused extends Error {}

// The answer of the server to a request, decoded from JSON. `questions` are the parameters of the query, by name.
// Throws Refused if the server refuses the request, and TypeError if it cannot be reached.
export async function ask(path, questions = {}) {
  const answer = await fetch(`${path}?${new URLSearchParams(questions)}`);
  if (!answer.ok) throw new Refused(await answer.text());
  return answer.json();
}

// Okabe and Ito's palette for colour-blind readers, without black and yellow.
export const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"];
// The colour of the run or curve with a number, from 0. Colours repeat.
export const colourOf = (number) => COLOURS[number % COLOURS.length];

// A number as people read it: whole numbers with separators, others with four digits; a dash if there is none.
export const figure = (value) => {
  if (value === undefined || value === null) return "–";
  if (value === 0 || Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e6 ? value.toExponential(1) : Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
};

// A duration as people read it, in the largest unit that fits.
export const lasting = (seconds) => {
  if (seconds > 0 && seconds < 0.01) return "< 0.01 s";
  if (seconds < 90) return `${seconds < 10 ? Number(seconds.toPrecision(2)) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} days`;
};

// Plotly reads some tags in names as formatting.
export const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

// Colours for Plotly, which are those of the page, so that plots are light or dark as the page is.
export function lookOf() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  return { ink: colour("--ink"), faint: colour("--faint"), grid: colour("--grid"), card: colour("--card"), wait: colour("--wait") };
}

// True on a touch screen, where a finger must scroll the page and not zoom a chart.
export const byFinger = () => matchMedia("(pointer: coarse)").matches;

// Control characters, invisible characters and marks that reverse the reading direction are shown as their numbers.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e0fff}\ud800-\udfff]/gu;
export const visible = (text) => text.replace(UNSEEN, (one) => `\\u{${one.codePointAt(0).toString(16)}}`);

// The run that `select` chooses among `runs`; undefined if there is none. The select is hidden if there are fewer than two. Its options
// are made again only if the runs have changed, because a menu that the user has opened would close. A choice that is still possible stays.
export function chooseRun(select, runs) {
  const names = runs.map((run) => run.name), before = select.value;
  if (JSON.stringify(names) !== select.dataset.names) {
    select.dataset.names = JSON.stringify(names);
    select.replaceChildren(...runs.map((run) => Object.assign(element("option", "", run.name), { value: run.number })));
    if (runs.some((run) => `${run.number}` === before)) select.value = before;
  }
  select.closest(".which").hidden = runs.length < 2;
  return runs.find((run) => `${run.number}` === select.value);
}
