// The live strip: counters of the engine, sampled a few times a second while somebody looks, and
// its newest steps where the server lets this page watch them.

import { ask } from "./api.js";
import { idleShare, lanesPicture, svg } from "./lanes.js";
import { element } from "./tokens.js";

const WATCH_MS = 300, LIVE_MS = 500; // between two looks: with steps, and at counters alone
const KEPT_S = 30; // of history in the small curves
const REASONS_S = 30; // over which reasons are counted
const WHY = {
  after_idle: "the engine had nothing to do before it",
  drained: "the engine was told to stand still",
  serial: "lookahead is 0: the engine works step by step",
  nothing_to_plan: "until the steps in flight were booked, no request could go on",
  rolled_back: "the steps in flight were taken back",
  interrupted: "a step was cut short",
};
const NOBODY = {
  loading: "No replica has joined yet: the model is being loaded.",
  restarting: "The engine was lost, and is being started again. Questions wait for it.",
  dead: "The engine was lost, and does not come back.",
};
const PATIENCE_MS = 5000; // of a look
const by = (id) => document.getElementById(id);

let mayWatch = true;
let held = false;
let isGone = false; // the server was not reached by the last look
let history = []; // samples of the replica that is shown, oldest first
let shown = "";
let drawn = null; // the sample whose steps are in the picture, and the picture's width

// Look again and again, while the page is seen; `refused` is told of a key that is missing, and
// `found` when the server is there again: it may serve another model now.
export async function openEngine(refused, found) {
  by("hold").addEventListener("click", (event) => {
    held = !held;
    event.target.setAttribute("aria-pressed", String(held));
    event.target.textContent = held ? "Go on" : "Hold";
  });
  by("replica").addEventListener("change", (event) => show(event.target.value));
  for (;;) {
    const begun = performance.now();
    if (!document.hidden && !held) await look(refused, found);
    await new Promise((done) => setTimeout(done, Math.max(0, begun - performance.now() + (mayWatch ? WATCH_MS : LIVE_MS))));
  }
}

// A new key may open what the old one did not.
export function lookAgain() {
  mayWatch = true;
}

async function look(refused, found) {
  try {
    const patience = AbortSignal.timeout(PATIENCE_MS);
    const answer = mayWatch ? await ask("watch", {}, patience) : await ask("live", undefined, patience);
    take(await answer.json());
    if (isGone) found();
    isGone = false;
  } catch (error) {
    if (mayWatch && [401, 403].includes(error.status)) {
      mayWatch = false;
      return;
    }
    isGone ||= error.status === 0;
    gone(error.status === 0 ? "not reached" : "no answer", error.message);
    if (error.status === 401) refused(error);
    await new Promise((done) => setTimeout(done, 2000));
  }
}

function setState(text, isBad) {
  const state = by("state");
  state.textContent = text;
  state.classList.toggle("running", text === "running");
  state.classList.toggle("bad", Boolean(isBad));
}

// Numbers of before are not those of now: none are shown.
function gone(state, why) {
  setState(state, true);
  by("engine-note").textContent = why;
  by("engine").classList.add("gone");
  show(shown);
  tiles(["Tokens", "Steps", "Rows a step", "Waiting", "KV blocks", "Launched ahead", "Lookahead", "In flight"]
    .map((name) => [name, "\u2013", ""]));
  by("reasons").replaceChildren();
  by("reasons-note").textContent = by("lanes-note").textContent = "";
}

function show(name) {
  shown = name;
  history = [];
  drawn = null;
  by("lanes").replaceChildren();
}

function take(answer) {
  setState(answer.state, ["dead", "loading", "restarting"].includes(answer.state));
  const names = Object.keys(answer.replicas).sort();
  if (!names.length) {
    gone(answer.state, NOBODY[answer.state] ?? "No replica is there.");
    return;
  }
  by("engine").classList.remove("gone");
  if (!names.includes(shown)) show(names[0]);
  choices(names);
  const sample = { ...answer.replicas[shown], queued: answer.queued_requests, at: performance.now() / 1000 };
  if (history.length && sample.steps < history.at(-1).steps) history = []; // it was started again
  history.push(sample);
  history = history.filter((one) => one.at > sample.at - KEPT_S);
  draw(sample);
}

function choices(names) {
  const select = by("replica");
  select.parentElement.hidden = names.length < 2;
  if (select.options.length === names.length && names.every((name, i) => select.options[i].value === name)) return;
  select.replaceChildren(...names.map((name) => new Option(name, name, false, name === shown)));
}

// The change of a counter between the newest sample and one about `seconds` before it.
function since(seconds) {
  const now = history.at(-1);
  const before = history.findLast((one) => one.at <= now.at - seconds) ?? history[0];
  const passed = Math.max(now.at - before.at, 1e-3);
  return {
    of: (name) => now[name] - before[name],
    rate: (name) => (now[name] - before[name]) / passed,
    reasons: () => Object.entries(now.no_overlap)
      .map(([reason, count]) => [reason, count - (before.no_overlap[reason] ?? 0)])
      .filter(([, count]) => count > 0)
      .sort((a, b) => b[1] - a[1]),
  };
}

function draw(sample) {
  const second = since(1);
  sample.tokens = second.rate("generated_tokens");
  sample.width = second.of("steps") ? second.of("rows") / second.of("steps") : 0;
  const overlapped = second.of("steps") ? (100 * second.of("overlapped_steps")) / second.of("steps") : null;
  const waiting = sample.waiting_requests + sample.queued;
  tiles([
    ["Tokens", sample.tokens.toFixed(0), "/s", "tokens"],
    ["Steps", second.rate("steps").toFixed(0), "/s"],
    ["Rows a step", second.of("steps") ? sample.width.toFixed(1) : "\u2013", `of ${sample.slots}`, "width"],
    ["Waiting", waiting, waiting === 1 ? "request" : "requests"],
    ["KV blocks", sample.kv_blocks_in_use, `of ${sample.kv_blocks}`, "kv_blocks_in_use"],
    ["Launched ahead", overlapped === null ? "\u2013" : overlapped.toFixed(0), overlapped === null ? "" : "% of steps"],
    ["Lookahead", sample.lookahead, sample.lookahead === 1 ? "step" : "steps"],
    ["In flight", sample.in_flight ?? "\u2013", sample.in_flight === undefined ? "" : "now"],
  ]);
  reasons();
  lanes(sample, second.of("steps"));
}

function tiles(values) {
  const list = by("tiles");
  while (list.children.length < values.length) {
    const box = element("div");
    box.append(element("dt"), element("dd"));
    list.append(box);
  }
  values.forEach(([name, value, unit, curve], place) => {
    const box = list.children[place];
    const [term, told] = box.children;
    term.textContent = name;
    told.replaceChildren(String(value), " ", element("small", "", unit));
    box.children[2]?.remove();
    if (curve) box.append(spark(curve));
  });
}

// The history of one value as a small curve.
function spark(name) {
  const newest = history.at(-1).at;
  const values = history.map((one) => one[name] ?? 0);
  const most = Math.max(...values, 1e-9);
  const points = history.map((one, i) => `${(100 * (1 - (newest - one.at) / KEPT_S)).toFixed(1)},${(21 - (19 * values[i]) / most).toFixed(1)}`);
  const root = svg("svg", { viewBox: "0 0 100 22", preserveAspectRatio: "none", "aria-hidden": "true" });
  root.append(svg("polyline", { class: "spark", points: points.join(" ") }));
  return root;
}

function reasons() {
  const found = since(REASONS_S).reasons();
  by("reasons-note").textContent = found.length ? `in the last ${REASONS_S} s` : `none in the last ${REASONS_S} s`;
  by("reasons").replaceChildren(...found.map(([reason, count]) => {
    const row = element("li");
    row.append(element("span", "", reason.replaceAll("_", " ")), element("b", "", String(count)));
    if (WHY[reason]) row.append(element("span", "why", WHY[reason]));
    return row;
  }));
}

function lanes(sample, steps) {
  const note = by("engine-note");
  if (!mayWatch) {
    note.textContent = "Steps are shown to the admin key alone; these are the counters.";
    by("lanes").parentElement.hidden = true;
    return;
  }
  by("lanes").parentElement.hidden = false;
  const width = Math.max(by("lanes").clientWidth, 300);
  let picture = lanesPicture(sample, width, !drawn);
  if (picture) drawn = { sample, width };
  else if (drawn && drawn.width !== width) {
    drawn.width = width; // the window has another size
    picture = lanesPicture(drawn.sample, width, true);
  }
  if (picture) {
    by("lanes").replaceChildren(picture);
    const idle = idleShare(drawn.sample.spans);
    by("lanes-note").textContent = idle === null ? "" : `device idle ${(100 * idle).toFixed(0)} % of the time`;
  } else if (!by("lanes").firstChild) {
    const empty = svg("svg", { viewBox: `0 0 ${width} 156` });
    empty.append(svg("rect", { class: "lane", x: 0, y: 10, width, height: 88, rx: 3 }));
    empty.append(svg("text", { class: "empty", x: width / 2, y: 58 }, "Steps appear here when the engine works"));
    by("lanes").replaceChildren(empty);
  }
  note.textContent = steps ? "At work." : drawn ? "Idle. These are the last steps that were seen." : "Idle.";
  if (!steps && !sample.steps) note.textContent = "Idle: nothing was asked yet.";
}
