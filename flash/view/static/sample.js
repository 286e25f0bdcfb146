// The samples of a group side by side, turn by turn and token by token.
//
// A group, a sample and a turn are those that the server sends (`ShownGroup`, `ShownSample` and `ShownTurn` in flash/view/samples.py). `place`
// is the index of a token in the response of its turn. A list of a turn is empty if its values are not known.

import { element, figure, lasting, visible } from "./tools.js";

const MOST_TOKENS = 3000;      // Tokens of a response that are drawn before a button shows the rest.
const MOST_CHARACTERS = 6000;  // Characters of an observation or note before a button shows the rest.
const OLDEST = 5;              // All ages from this one on have the same colour.
const USES = { TRAINED: "trained", CLIPPED: "clipped", REJECTED: "rejected by a correction", TOO_OLD: "too old to be trained" };

// Ways to colour tokens. `of` returns the value of a token; null or undefined if it is not known. `shade` returns the class of a value, and
// `legend` each class with its text. `upwards` is for values from 0 up, and `bothWays` for values around 0: the class follows from the number of
// limits that a value exceeds. `scale` multiplies the limits, and `say` turns a limit into the number that the legend shows.
const upwards = (limits) => ({
  shade: (value) => `l${limits.filter((end) => value > end).length}`,
  legend: () => limits.map((end, place) => [`l${place + 1}`, `> ${end}`]),
});
const bothWays = (limits, say, scale = () => 1) => ({
  shade: (value, group) => {
    const passed = limits.filter((end) => Math.abs(value) > end * scale(group)).length;
    return passed ? `${value < 0 ? "n" : "p"}${passed}` : "";
  },
  legend: (group) => [
    ...limits.map((end, place) => [`n${place + 1}`, `< ${short(say(-end * scale(group)))}`]).reverse(),
    ...limits.map((end, place) => [`p${place + 1}`, `> ${short(say(end * scale(group)))}`]),
  ],
});
// A limit in the legend, with two digits.
const short = (value) => figure(Number(value.toPrecision(2)));
const largestAdvantages = new WeakMap();

// The largest absolute advantage of a group, which every token of the group is compared with, so it is computed once.
function largestAdvantage(group) {
  if (!largestAdvantages.has(group)) {
    let largest = 1e-9;
    // A loop, because Math.max refuses the hundred thousand arguments that the tokens of a group may be.
    for (const sample of group.samples) for (const turn of sample.turns) for (const one of turn.advantages) largest = Math.max(largest, Math.abs(one));
    largestAdvantages.set(group, largest);
  }
  return largestAdvantages.get(group);
}

// The ways by name. The log-prob has the classes of −log-prob, and its legend the log-probs themselves.
const COLOURINGS = {
  logprob: { name: "log-prob", of: (turn, place) => turn.logprobs[place] === undefined ? null : -turn.logprobs[place],
    ...upwards([0.1, 0.7, 1.6, 3, 5]), legend: () => [-0.1, -0.7, -1.6, -3, -5].map((end, place) => [`l${place + 1}`, `< ${end}`]) },
  ratio: { name: "ratio", of: (turn, place) => turn.log_ratios[place], ...bothWays([1.02, 1.1, 1.35, 2].map(Math.log), Math.exp) },
  advantage: { name: "advantage", of: (turn, place) => turn.advantages[place], ...bothWays([0.02, 0.3, 0.6, 0.9], (value) => value, largestAdvantage) },
  entropy: { name: "entropy", of: (turn, place) => turn.entropies[place], ...upwards([0.1, 0.5, 1, 2, 3]) },
  age: { name: "version", of: (turn, place) => Math.max(0, Math.min(OLDEST, turn.ages[place])),
    shade: (age) => `a${age}`, legend: () => [...Array(OLDEST + 1).keys()].map((age) => [`a${age}`, `age ${age}${age === OLDEST ? "+" : ""}`]) },
  use: { name: "mask", of: (turn, place) => turn.uses[place], shade: (use) => use === "TRAINED" ? "" : use.toLowerCase(),
    legend: () => Object.entries(USES).map(([use, says]) => [use === "TRAINED" ? "" : use.toLowerCase(), says]) },
};

let colouring = "logprob";  // Way that the user has chosen; "": no colours.

// Show a group in the element `target`. The sample with the index `chosen` is emphasised. Closing hides `target`, and dispatches `closed` there.
export function drawGroup(target, group, chosen) {
  const choice = element("select");
  choice.title = "The key c chooses the next one";
  for (const [value, name] of [...Object.entries(COLOURINGS).map(([key, one]) => [key, one.name]), ["", "nothing"]]) {
    choice.append(Object.assign(element("option", "", name), { value, selected: value === colouring }));
  }
  choice.onchange = () => { colouring = choice.value; drawGroup(target, group, chosen); target.querySelector("select").focus(); };
  const close = element("button", "", "Close");
  close.onclick = () => { target.hidden = true; target.dispatchEvent(new Event("closed")); };
  target.onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") close.onclick();
    if (event.key === "c" && event.target !== choice) { choice.selectedIndex = (choice.selectedIndex + 1) % choice.length; choice.onchange(); }
  };
  const legend = element("span", "hint", ...legendOf(group));
  const samples = group.samples.map((sample) => member(group, sample, sample.sample_index === chosen));
  target.replaceChildren(
    element("p", "controls", element("h2", "", `Step ${group.step}, group ${group.group_id}`),
      element("label", "", "Tokens coloured by ", choice), legend, close),
    element("p", "hint", rewardsOf(group)),
    element("div", "members", ...samples),
  );
}

const meanOf = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;

// The sentence about the rewards of the whole group, also of samples that are not readable.
function rewardsOf(group) {
  return `Rewards of the group: ${group.rewards.map(figure).join(", ")}; mean ${figure(meanOf(group.rewards))}. ${group.samples.length} of ${group.rewards.length} are readable.`;
}

// The elements of the legend. If no token has a value, a sentence takes their place.
function legendOf(group) {
  const way = COLOURINGS[colouring];
  if (!way) return [];
  const known = group.samples.some((sample) => sample.turns.some((turn) => turn.tokens.some((_, place) => (way.of(turn, place, group) ?? null) !== null)));
  if (!known) return ["The trainer has not reported these values for this step."];
  return way.legend(group).map(([shade, says]) => element("span", `token ${shade}`, ` ${says} `));
}

// The card of a sample. `chosen`: it is emphasised.
function member(group, sample, chosen) {
  const ahead = sample.reward - meanOf(group.rewards);
  const apart = ahead ? `, ${figure(Math.abs(ahead))} ${ahead < 0 ? "below" : "above"} the group's mean` : "";
  const ages = Object.entries(sample.ages).map(([age, count]) => `${figure(count)} of age ${age}`).join(", ");
  return element("article", `card${chosen ? " chosen" : ""}`,
    element("h2", "", `Member ${sample.sample_index}: reward ${figure(sample.reward)}, ${sample.outcome}`),
    element("p", "hint", `${figure(sample.tokens)} tokens (${ages})${apart}`),
    ...sample.turns.map((turn, place) => turnOf(group, turn, place, sample.turns.length)));
}

// The part of a card for the turn with the index `place` among `count` turns.
function turnOf(group, turn, place, count) {
  const metrics = Object.entries(turn.metrics).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
  const facts = [`reward ${figure(turn.reward)}`, `generated in ${lasting(turn.generate_s)}`, `environment ${lasting(turn.env_s)}`, metrics, turn.branch ? `branch ${turn.branch}` : ""];
  const parts = [shortened(turn.observation, "shown"), responseOf(group, turn)];
  if (turn.note) parts.push(shortened(turn.note, "note"));
  return element("section", "turn", element("h3", "", count > 1 ? `Turn ${place + 1}` : ""), ...parts,
    element("p", "hint", visible(facts.filter(Boolean).join(" · "))));
}

// A text, cut at MOST_CHARACTERS, with a button that shows all of it. `kind` is its class.
function shortened(text, kind) {
  const box = element("pre", kind, visible(text.slice(0, MOST_CHARACTERS)));
  if (text.length > MOST_CHARACTERS) box.append(more(`Show all ${figure(text.length)} characters`, () => box.replaceChildren(visible(text))));
  return box;
}

// The tokens of a response, at first at most MOST_TOKENS, with a button that adds the others.
function responseOf(group, turn) {
  const box = element("pre", "said");
  const tokens = (from, to) => turn.tokens.slice(from, to).map((text, place) => token(group, turn, from + place, text));
  box.append(...tokens(0, MOST_TOKENS));
  if (turn.tokens.length > MOST_TOKENS) {
    const button = more(`Show all ${figure(turn.tokens.length)} tokens`, () => { button.remove(); box.append(...tokens(MOST_TOKENS)); });
    box.append(button);
  }
  return box;
}

// A button with a text that calls `act`.
function more(text, act) {
  const button = element("button", "", text);
  button.onclick = act;
  return button;
}

// The element of a token: its text in the colour of its value. The tooltip has all known values.
function token(group, turn, place, text) {
  const way = COLOURINGS[colouring], value = way ? way.of(turn, place, group) ?? null : null;
  const made = element("span", `token ${value === null ? "" : way.shade(value, group)}`.trim(), visible(text));
  const ratio = turn.log_ratios[place] ?? null, version = turn.versions[place];
  const known = [["log-prob", turn.logprobs[place]], ["ratio", ratio === null ? null : Math.exp(ratio)], ["advantage", turn.advantages[place]],
    ["entropy", turn.entropies[place]]].filter(([, one]) => (one ?? null) !== null).map(([name, one]) => `${name} ${figure(one)}`);
  made.title = [...known, `version ${version}`, `age ${turn.ages[place]}`, USES[turn.uses[place]]].filter(Boolean).join(", ");
  return made;
}
