"use strict";
// The live page: asks for the status whenever it has changed, and draws it. All text is set as text, never as HTML.

const $ = (id) => document.getElementById(id);
const WAIT_S = 25;
const RETRY_MS = 2000;
const ROWS = 24, COLUMNS = 100;

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function fill(table, rows, empty) {
  const columns = $(table).tHead.rows[0].cells.length;
  const body = rows.map((cells) => {
    const row = element("tr");
    for (const cell of cells) {
      const td = element("td");
      td.append(cell instanceof Node ? cell : String(cell));
      row.append(td);
    }
    return row;
  });
  if (!body.length) {
    const row = element("tr"), cell = element("td", empty);
    cell.colSpan = columns;
    row.append(cell);
    body.push(row);
  }
  $(table).tBodies[0].replaceChildren(...body);
}

function meter(part, whole, text) {
  const made = element("span", undefined, "load");
  const bar = element("span", undefined, "meter"), inner = element("i");
  const share = whole ? Math.min(1, part / whole) : 0;
  inner.style.width = `${100 * share}%`;
  if (share > 0.95) inner.className = "full";
  bar.append(inner);
  made.append(bar, text);
  return made;
}

const ago = (seconds) => seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
const percent = (share) => share === null ? "–" : `${Math.round(100 * share)} %`;
const rounded = (number) => Math.round(10 * number) / 10;
const gib = (mib) => rounded(mib / 1024);
const MOOD = { ready: "ok", failed: "bad", closed: "bad", queued: "wait", starting: "wait" };

function drawTiles(status) {
  const number = (state) => status.states[state] || 0;
  const waiting = Object.values(status.queue).reduce((sum, each) => sum + each, 0);
  const failures = Object.values(status.failures).reduce((sum, each) => sum + each, 0);
  const tiles = [
    [number("ready"), "ready", "ok"], [number("starting"), "starting", "wait"], [waiting, "waiting", "wait"],
    [failures, "failures", "bad"], [status.hosts.reduce((sum, host) => sum + host.warm, 0), "warm", ""],
    [percent(status.hit_rate), "warm hit rate", ""],
  ];
  $("tiles").replaceChildren(...tiles.map(([value, name, mood]) => {
    const tile = element("div", undefined, value ? `tile ${mood}` : "tile");
    tile.append(element("b", value), element("span", name));
    return tile;
  }));
}

function draw(status) {
  $("service").textContent = status.service;
  drawTiles(status);
  fill("hosts", status.hosts.map((host) => [
    host.name,
    host.load && host.load.cpus_busy !== null ? meter(host.load.cpus_busy, host.load.cpus, `${rounded(host.load.cpus_busy)} of ${host.load.cpus}`) : "–",
    host.load ? meter(host.load.memory_used_mib, host.load.memory_mib, `${gib(host.load.memory_used_mib)} of ${gib(host.load.memory_mib)} GiB`) : "–",
    meter(host.cpus_promised, host.cpus, `${rounded(host.cpus_promised)} of ${rounded(host.cpus)}`),
    meter(host.memory_mib_promised, host.memory_mib, `${gib(host.memory_mib_promised)} of ${gib(host.memory_mib)} GiB`),
    host.sandboxes, host.warm, host.hits + host.misses ? `${percent(host.hits / (host.hits + host.misses))} of ${host.hits + host.misses}` : "–",
    host.orphans_removed,
    host.why_not ? element("span", host.why_not, "bad") : element("span", "takes sandboxes", "ok"),
  ]), "There are no hosts.");
  fill("queue", Object.entries(status.queue), "Nobody waits.");
  const last = {};
  for (const failure of status.recent_failures) last[failure.cause] = failure.message;
  const failures = Object.entries(status.failures).map(([cause, number]) => [cause, number, last[cause] || ""]);
  for (const [image, why] of Object.entries(status.images_put_aside)) failures.push([`image ${image} is put aside`, "", why]);
  fill("failures", failures, "None since the start.");
  fill("sandboxes", status.sandboxes.map((box) => {
    const open = element("button", "Open");
    open.dataset.sandbox = box.id;
    open.onclick = () => show(box.id);
    const state = element("span", box.state, MOOD[box.state]);
    state.title = box.waiting_for || box.reason;
    return [element("code", box.id), state, box.owner, box.spec.image, box.spec.profile,
      `${box.spec.cpus} CPU, ${box.spec.memory_mib} MiB`, box.host, ago(Date.now() / 1000 - box.created_at), open];
  }), "None.");
}

async function ask(path) {
  const answer = await fetch(path, { credentials: "same-origin" });
  if (answer.status === 401) location.reload();
  if (!answer.ok) throw new Error((await answer.json()).detail);
  return answer.json();
}

async function follow() {
  let version = -1;
  for (;;) {
    try {
      const status = await ask(`/v1/status?since=${version}&wait=${version < 0 ? 0 : WAIT_S}`);
      version = status.version;
      draw(status);
      $("link").textContent = "live";
      $("link").className = "ok";
    } catch (error) {
      $("link").textContent = `no connection: ${error.message}`;
      $("link").className = "bad";
      version = -1;
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
  }
}

// ---- one sandbox

let shown = null, socket = null, refresh = null;

function show(id) {
  hide();
  shown = id;
  $("detail").hidden = false;
  $("detail-id").textContent = id;
  drawTimeline();
  refresh = setInterval(drawTimeline, RETRY_MS);
  $("detail").scrollIntoView();
}

function hide() {
  clearInterval(refresh);
  if (socket) socket.close();
  socket = shown = null;
  $("screen").hidden = true;
  $("screen-note").textContent = "";
  $("detail").hidden = true;
}

async function drawTimeline() {
  const id = shown;
  try {
    const { events } = await ask(`/v1/sandboxes/${id}/timeline`);
    if (id !== shown) return;
    drawBars(events);
    fill("timeline", events.slice().reverse().map((event) => {
      const good = ["exit 0", "ok", "ready", "started"].includes(event.outcome);
      return [new Date(1000 * event.at).toLocaleTimeString(), event.kind, element("code", event.text),
        event.seconds.toFixed(3), element("span", event.outcome, good ? "ok" : event.kind === "state" ? "wait" : "bad")];
    }), "Nothing yet.");
  } catch (error) {
    clearInterval(refresh);
    $("screen-note").textContent = error.message;
  }
}

function drawBars(events) {
  const begin = Math.min(...events.map((event) => event.at)), end = Math.max(...events.map((event) => event.at + event.seconds));
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const whole = Math.max(end - begin, 0.001);
  svg.setAttribute("viewBox", "0 0 1000 20");
  svg.setAttribute("preserveAspectRatio", "none");
  for (const event of events) {
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    bar.setAttribute("x", 1000 * (event.at - begin) / whole);
    bar.setAttribute("width", Math.max(2, 1000 * event.seconds / whole));
    bar.setAttribute("y", 2);
    bar.setAttribute("height", 16);
    bar.setAttribute("fill", event.kind === "state" ? "#888" : ["exit 0", "ok", "started"].includes(event.outcome) ? "#3b78c4" : "#c33");
    svg.append(bar);
  }
  $("bars").replaceChildren(svg);
}

function attach() {
  if (socket) socket.close();
  const screen = new Screen(ROWS, COLUMNS);
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  const opened = socket = new WebSocket(`${scheme}://${location.host}/v1/sandboxes/${shown}/terminal?rows=${ROWS}&columns=${COLUMNS}`);
  opened.binaryType = "arraybuffer";
  const encoder = new TextEncoder();
  const send = (text) => { if (opened.readyState === WebSocket.OPEN) opened.send(encoder.encode(text)); };
  const target = $("screen");
  target.hidden = false;
  screen.draw(target);
  target.focus();
  let due = false;
  opened.onmessage = (event) => {
    screen.feed(new Uint8Array(event.data));
    if (!due) {
      due = true;
      requestAnimationFrame(() => { due = false; screen.draw(target); });
    }
  };
  opened.onopen = () => { $("screen-note").textContent = "Connected. Click the terminal and type."; };
  opened.onclose = (event) => { if (opened === socket) $("screen-note").textContent = `Closed: ${event.reason || "the connection ended"}`; };
  target.onkeydown = (event) => {
    const text = keyBytes(event);
    if (text === null || (event.ctrlKey && event.shiftKey)) return;
    event.preventDefault();
    send(text);
  };
  target.onpaste = (event) => {
    event.preventDefault();
    send(event.clipboardData.getData("text"));
  };
}

$("attach").onclick = attach;
$("detail-close").onclick = hide;
follow();
