// A group's samples side by side, turn by turn and token by token.

import { element, figure, lasting, visible } from "./tools.js";

const MOST_TOKENS = 3000;      // Of a response, until somebody wants all.
const MOST_CHARACTERS = 6000;  // Of what was shown before it.
const UNLIKELY = [-0.1, -0.7, -1.6, -3, -5];  // Log-probs at which the colour changes: 90, 50, 20, 5 and 0.7 %.
const OLDEST = 5;              // Ages from which on the colour is the same.

let colouring = "logprob";

export function drawGroup(target, group, chosen) {
  const choice = element("select");
  for (const [value, name] of [["logprob", "log-prob"], ["age", "age"], ["", "nothing"]]) {
    choice.append(Object.assign(element("option", "", name), { value, selected: value === colouring }));
  }
  choice.onchange = () => { colouring = choice.value; drawGroup(target, group, chosen); };
  const close = element("button", "", "Close");
  close.onclick = () => { target.hidden = true; };
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

function rewardsOf(group) {
  if (!group.rewards) return "Rewards of the others in the group, and log-probs, are in the step's recorded batch, which is not there any more (checkpoint.batches).";
  return `Rewards of the group: ${group.rewards.map(figure).join(", ")}; mean ${figure(meanOf(group.rewards))}. ${group.samples.length} of ${group.rewards.length} are readable.`;
}

function legendOf(group) {
  if (colouring === "age") return [...Array(OLDEST + 1).keys()].map((age) => element("span", `token a${age}`, ` ${age}${age === OLDEST ? "+" : ""} `));
  if (colouring !== "logprob") return [];
  if (!group.rewards) return ["no log-probs recorded"];
  return ["likely ", ...[...UNLIKELY.keys()].map((place) => element("span", `token l${place + 1}`, ` ${UNLIKELY[place]} `)), " unlikely"];
}

function member(group, sample, chosen) {
  const ahead = group.rewards ? sample.reward - meanOf(group.rewards) : 0;
  const apart = ahead ? `, ${figure(Math.abs(ahead))} ${ahead < 0 ? "below" : "above"} the group's mean` : "";
  const ages = Object.entries(sample.ages).map(([age, count]) => `${figure(count)} of age ${age}`).join(", ");
  return element("article", `card${chosen ? " chosen" : ""}`,
    element("h2", "", `Member ${sample.sample_index}: reward ${figure(sample.reward)}, ${sample.outcome}`),
    element("p", "hint", `${figure(sample.tokens)} tokens (${ages})${apart}`),
    ...sample.turns.map((turn, place) => turnOf(group, turn, place, sample.turns.length)));
}

function turnOf(group, turn, place, count) {
  const metrics = Object.entries(turn.metrics).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
  const told = [`reward ${figure(turn.reward)}`, `generated in ${lasting(turn.generate_s)}`, `environment ${lasting(turn.env_s)}`, metrics, turn.branch ? `branch ${turn.branch}` : ""];
  const parts = [shortened(turn.observation, "shown"), responseOf(group, turn)];
  if (turn.note) parts.push(shortened(turn.note, "note"));
  return element("section", "turn", element("h3", "", count > 1 ? `Turn ${place + 1}` : ""), ...parts,
    element("p", "hint", visible(told.filter(Boolean).join(" · "))));
}

function shortened(text, kind) {
  const box = element("pre", kind, visible(text.slice(0, MOST_CHARACTERS)));
  if (text.length > MOST_CHARACTERS) box.append(more(`Show all ${figure(text.length)} characters`, () => box.replaceChildren(visible(text))));
  return box;
}

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

function more(text, act) {
  const button = element("button", "", text);
  button.onclick = act;
  return button;
}

function token(group, turn, place, text) {
  const age = group.step - turn.versions[place], logprob = turn.logprobs ? turn.logprobs[place] : null;
  const shade = colouring === "age" ? ` a${Math.max(0, Math.min(OLDEST, age))}`
    : colouring === "logprob" && logprob !== null ? ` l${UNLIKELY.filter((end) => logprob < end).length}` : "";
  const made = element("span", `token${shade}`, visible(text));
  made.title = `${logprob === null ? "" : `log-prob ${logprob}, `}version ${turn.versions[place]}, age ${age}`;
  return made;
}
