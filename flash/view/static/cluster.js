// The cluster page: nodes, engines, samples on their way and failures, now or at the end of the run.
//
// A *picture* is a snapshot of the cluster (`Cluster` in flash/observe/cluster.py). Its times are Unix seconds. A *lease* is a sample that a
// node works on. A *mood* is a class of the style sheet: good, bad, hint, long or none ("").

import { $, ask, chooseRun, element, figure, lasting, visible } from "./tools.js";

const OLD_S = 15;           // A live run writes a snapshot every two seconds.
const MOST_SHOWN = 3000;    // Characters of a message before a button shows the rest.
// Moods of the states of nodes and engines.
const STATES = { serving: "good", here: "good", starting: "", loading: "", leaving: "", returning: "bad", silent: "bad", gone: "bad" };

let asking = false;        // True while a request is under way, so that a slow server does not get several at once.
let drawn = "";            // Snapshot that the tables show, as text.
const boxes = new Map();   // Card and table of each item of TABLES, by its id.

// Make the cards of the tables. The page calls this once.
export function prepare() {
  for (const [id, title, means, worry] of TABLES) {
    const table = element("table", "", element("thead"), element("tbody"));
    const wide = element("div", "wide", table);
    wide.tabIndex = 0;
    wide.setAttribute("role", "region");
    wide.setAttribute("aria-label", title);
    const box = element("article", "card", element("header", "", element("h2", "", title)), wide,
      element("p", "", means), element("p", "hint", `Worry when: ${worry}`));
    box.id = `cluster-${id}`;
    boxes.set(id, { box, table });
    $("cluster-tables").append(box);
  }
}

// Request the newest snapshot of the chosen run, and show it.
export async function draw(runs) {
  const run = chooseRun($("cluster-run"), runs);
  if (!run) return empty("Choose a run above.");
  if (asking) return undefined;
  asking = true;
  try {
    const came = await ask("/api/cluster", { run: run.number });
    if ($("cluster-run").value !== `${run.number}`) return undefined;  // The user has chosen another run meanwhile.
    if (!came.picture) {
      return empty(came.there ? "cluster.json cannot be read: another version of Flash wrote it, or it is damaged."
        : "This run has no snapshot of its cluster: it has only begun, or an older version of Flash made it.");
    }
    return show(run, came);
  } catch (error) {
    return empty(error.message);
  } finally {
    asking = false;
  }
}

// Show a text in place of a snapshot.
function empty(text) {
  $("cluster-state").textContent = text;
  $("cluster-state").className = "hint";
  $("cluster-body").hidden = true;
  drawn = "";
}

// Show the answer of the server (`ShownCluster` in flash/view/cluster.py). An unchanged snapshot only gets the present age.
function show(run, { picture, now, tiles, figures, engines }) {
  const age = Math.max(0, now - picture.at);
  const [text, mood] = stateOf(picture, age);
  $("cluster-state").textContent = visible(text);
  $("cluster-state").className = mood;
  $("cluster-body").hidden = false;
  const version = JSON.stringify([run.number, picture]);
  if (version === drawn) return;
  drawn = version;
  showTiles(tiles);
  for (const [id, , , , rowsOf] of TABLES) fill(boxes.get(id), rowsOf(picture, figures, engines));
  failures(run, picture);
  events(picture);
}

// The sentence at the top of the page and its mood. `age` is the age of the snapshot in seconds.
function stateOf(picture, age) {
  const error = picture.error ? ` ${picture.error}` : "";
  if (picture.ended === "failed") return [`The run failed ${lasting(age)} ago.${error}`, "bad"];
  if (picture.ended) return [`The run ${picture.ended === "finished" ? "has finished" : "was interrupted"}, ${lasting(age)} ago. The page shows its last state.`, "hint"];
  if (age > OLD_S) return [`This run has not reported for ${lasting(age)}: it was killed, its machine is stopped, or its event loop is blocked. The page shows its last report.`, "bad"];
  return [picture.hub ? `The last report came ${lasting(age)} ago. The run waits for ${picture.hub.doing}.` : "The run has only begun.", "hint"];
}

// The parts of a snapshot that most tables need: the state of the hub, all nodes, `members`, which are the nodes that are not gone, and
// their engines, each with its node. Before the first report there is no hub, and the lists are empty.
function facts(picture) {
  const hub = picture.hub, nodes = hub ? hub.nodes : [], members = nodes.filter((node) => node.state !== "gone");
  return { hub, nodes, members, engines: members.flatMap((node) => (node.status ? node.status.engines.map((engine) => ({ node, engine })) : [])) };
}

// Show a card for each number of the whole cluster (`ShownNumber`).
function showTiles(tiles) {
  $("cluster-tiles").replaceChildren(...tiles.map(({ title, means, worry, text }) => element("article", "card",
    element("header", "", element("h2", "", title), element("span", "now", visible(text))),
    element("p", "", means), element("p", "hint", `Worry when: ${worry}`))));
}

// -- tables -----------------------------------------------------------------------------------------------------------

// `ago` and `since` are texts for the seconds between a time and the snapshot; a dash without a time. `state` and `long` make cells of a
// table with a mood. Each function below returns the head of a table and its rows. A cell is a text, or an object of `text` and `mood`.
const ago = (picture, time) => (time === null || time === undefined ? "–" : `${lasting(Math.max(0, picture.at - time))} ago`);
const since = (picture, time) => (time === null || time === undefined ? "–" : lasting(Math.max(0, picture.at - time)));
const state = (name) => ({ text: name, mood: STATES[name] ?? "" });
const long = (text) => ({ text, mood: "long" });

// Tables: id, title, meaning, sentence that completes "worry when", and the function that makes the head and the rows.
const TABLES = [
  ["nodes", "Nodes", "Each row is a process of the run that has engines or trainer ranks. Nodes that are gone come last.",
    "a node is silent or gone, its last report is old, or its oldest sample has taken far longer than an episode should take.", nodeRows],
  ["engines", "Engines", "State, version and reported numbers of each engine. Point at the head of a column to read its explanation.",
    "its version stays behind the others'; its KV cache is full while requests wait; it has died; a swap takes a large part of a step.", engineRows],
  ["stocks", "Sandboxes", "Resources that the environments of a node share, such as sandboxes: in use (also while they start or are cleaned), warm, and requests that wait.",
    "requests wait all the time: raise the pool's parallel, or judge fewer samples at once. If many are started and few are in use, they cannot be used again.", stockRows],
  ["ranks", "Trainer ranks", "The processes that train, and the process of the hub.",
    "one is missing: all ranks start again, and repeat the steps since the last checkpoint.", rankRows],
  ["leases", "Oldest samples on their way", "Samples that nodes have worked on for the longest time. A long answer or a slow environment takes long, too.",
    "one is as old as deadlines.episode, and the same group stays on top: something hangs there.", leaseRows],
];

function nodeRows(picture) {
  const now = facts(picture);
  const rows = now.nodes.map((node) => {
    const ranks = now.hub.ranks.filter((rank) => rank.node === node.node && rank.process !== null).length, status = node.status;
    const alive = node.state !== "gone";
    // A node without engines reports no status. The name of its machine is then known from its trainer ranks.
    const host = status ? status.host : node.node === 0 ? picture.host : now.hub.ranks.find((rank) => rank.node === node.node)?.host;
    return [`${node.node}`, state(node.state), host || "–", status ? `${status.process}` : "–",
      since(picture, status ? status.since : null), alive ? figure(ranks) : "–", status ? figure(status.engines.length) : "–",
      figure(status && alive ? status.episodes : 0), figure(node.leases), since(picture, node.oldest_lease), ago(picture, node.heard_at),
      long(alive ? "" : `${ago(picture, node.gone_at)}: ${node.why}`)];
  });
  return [["Node", "State", "Host", "Process", "Running for", "Trainer ranks", "Engines", "Environments", "Samples", "Oldest sample", "Last report", "End"], rows];
}

// `figures` are the heads of the numbers that engines report, and `texts` these numbers, by the number of the engine.
function engineRows(picture, figures, texts) {
  const now = facts(picture), newest = now.hub ? now.hub.published : -1;
  const rows = now.engines.map(({ node, engine }) => [`${engine.number}`, `${node.node}`, state(engine.state),
    engine.version < 0 ? "none" : engine.version < newest ? `${engine.version} (${newest - engine.version} behind)` : `${engine.version}`,
    ...(texts[engine.number] ?? figures.map(() => "–")), ago(picture, engine.loaded_at),
    figure(engine.deaths), long(engine.deaths ? `${ago(picture, engine.died_at)}: ${engine.why}` : "")]);
  return [["Engine", "Node", "State", "Version", ...figures, "Weights loaded", "Deaths", "Last death"], rows];
}

function stockRows(picture) {
  const rows = facts(picture).members.flatMap((node) => (node.status ? node.status.stocks : []).map((stock) => [`${node.node}`, stock.name,
    figure(stock.in_use), figure(stock.ready), figure(stock.waiting), figure(stock.most), figure(stock.made)]));
  return [["Node", "Resource", "In use", "Warm", "Waiting", "At most", "Started"], rows];
}

// The last row is the process of the hub, which every run has.
function rankRows(picture) {
  const hub = picture.hub, rows = (hub ? hub.ranks : []).map((rank) => [`${rank.rank}`, `${rank.node}`,
    rank.process === null ? { text: picture.ended ? "left" : "not there", mood: picture.ended ? "" : "bad" } : { text: "here", mood: "good" },
    rank.process === null ? "–" : `${rank.process}`, rank.process === null ? "–" : since(picture, rank.since)]);
  return [["Rank", "Node", "State", "Process", "Running for"], [...rows, ["hub", "0", { text: picture.ended || "here", mood: "" }, `${picture.process}`, since(picture, picture.since)]]];
}

function leaseRows(picture) {
  const rows = (picture.hub ? picture.hub.leases : []).map((lease) => [since(picture, lease.since), `${lease.node}`, lease.split,
    `${lease.group_id}`, `${lease.sample_index}`, `${lease.attempt + 1}`]);
  return [["Age", "Node", "Split", "Group", "Member", "Attempt"], rows];
}

// The head of a column: `one` is a text, or a number with its explanation (`ShownNumber`), which becomes the tooltip.
function head(one) {
  const cell = element("th", "", one.title ?? one);
  if (one.means) cell.title = one.worry ? `${one.means} Worry when: ${one.worry}` : one.means;
  return cell;
}

// Fill a table, and hide its card if it has no rows.
function fill({ box, table }, [titles, rows]) {
  box.hidden = !rows.length;
  table.tHead.replaceChildren(element("tr", "", ...titles.map(head)));
  table.tBodies[0].replaceChildren(...rows.map((row) => element("tr", "", ...row.map((cell) => (typeof cell === "string"
    ? element("td", "", visible(cell)) : element("td", cell.mood, visible(cell.text)))))));
}

// -- failures and events ----------------------------------------------------------------------------------------------

// Explanations of kinds of failures. Kinds that are not here, such as those of a later version, have none.
const KINDS = {
  env_error: "the environment raised, or broke its interface", env_timeout: "the environment took too long",
  reward_error: "the reward is missing, or its verifier failed", engine_error: "an engine failed the request, or took too long",
  engine_killed: "engines died under this sample", engine_died: "an engine died", node_lost: "a node is gone",
  node_silent: "a node did not answer", trainers_lost: "a trainer rank is gone or hangs", run_failed: "all processes ended with this error",
  hub_lost: "the hub ended without a last report",
};
const opened = new Set();  // Messages that the user has opened: the number of the run and the kind.
const clock = (time) => new Date(1000 * time).toLocaleString("en-GB");

// How often and when a kind of failure (`FailureKind`) has happened.
const happened = (picture, kind) => `${figure(kind.count)} ×, last ${ago(picture, kind.last)} (${clock(kind.last)})${kind.count > 1 ? `, first ${ago(picture, kind.first)}` : ""}`;

// Show the failures by kind. The elements of unchanged failures stay in the page, because somebody may be reading or copying them: only
// their times are written again.
function failures(run, picture) {
  const list = picture.failures, target = $("cluster-failures"), version = JSON.stringify([run.number, list]);
  if (target.dataset.version === version) {
    [...target.querySelectorAll(".failure > p")].forEach((line, place) => { line.textContent = happened(picture, list[place]); });
    return;
  }
  target.dataset.version = version;
  target.replaceChildren(...(list.length ? list.map((kind) => element("section", "failure",
    element("h3", "", visible(kind.kind), KINDS[kind.kind] ? `: ${KINDS[kind.kind]}` : ""),
    element("p", "hint", happened(picture, kind)), message(`${run.number} ${kind.kind}`, kind.message)))
    : [element("p", "hint", "Nothing has failed.")]));
}

// The element with a failure's message. A long one is cut, and has a button that shows the rest; `name` remembers that in `opened`.
function message(name, text) {
  const whole = opened.has(name) || text.length <= MOST_SHOWN, box = element("pre", "note", visible(whole ? text : text.slice(0, MOST_SHOWN)));
  if (whole) return box;
  const button = element("button", "", `Show all ${figure(text.length)} characters`);
  button.onclick = () => { opened.add(name); box.replaceChildren(visible(text)); };
  box.append(button);
  return box;
}

// Show the last lines of the run's output, the newest first. Unchanged ones stay in the page, as those of failures do.
function events(picture) {
  const version = JSON.stringify(picture.events);
  if ($("cluster-events").dataset.version === version) return;
  $("cluster-events").dataset.version = version;
  $("cluster-events").replaceChildren(...picture.events.toReversed().map((event) => element("tr", "",
    element("td", "", clock(event.at)), element("td", "long", visible(event.text)))));
  $("cluster-lines").hidden = !picture.events.length;
}
