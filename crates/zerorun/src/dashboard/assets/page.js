// The page: the list of runs, the selection, live updates and actions.

import { Chart, STYLES, swatch } from "./chart.js";
import { byId, duration, h, number, utc, value } from "./dom.js";
import { ExpertMap } from "./experts.js";
import { drawAbout, drawConfig, drawEvents, drawLog, drawRanks, drawSamples } from "./panels.js";
import { RunRows } from "./series.js";
import { SweepPanel } from "./sweep.js";

/** The charts that are always in front: a title, and the values of which the first that exists is drawn, or their sum. */
const FRONT = [
  { title: "Loss", names: ["loss"] },
  { title: "Validation loss", names: ["val_loss", "validation_loss", "eval_loss", "Validation/loss", "eval/loss"] },
  { title: "Learning rate", names: ["lr"] },
  { title: "Gradient norm", names: ["grad_norm"] },
  { title: "Tokens per second", names: ["tokens_per_s"] },
  { title: "Time of a step (ms)", names: ["forward_ms", "backward_ms", "step_ms"], isSum: true },
];
const LIST_INTERVAL = 3000;
const DRAW_INTERVAL = 200;
const MAX_LINES = 2000;
const MAX_ENTRIES = 2000;

const page = {
  token: null,
  list: [],
  /** The runs that are shown, by id: { id, style, details, rows, positions }. */
  shown: new Map(),
  focused: null,
  charts: new Map(),
  /** What the panels show. */
  panels: new Map(),
  sweep: new SweepPanel(get, (id) => focus(id)),
  experts: new ExpertMap(),
  stream: null,
  hasChosen: false,
  drawn: 0,
  isDrawPlanned: false,
};

async function get(path) {
  const response = await fetch(path, { cache: "no-store" });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function say(text, isBad = false) {
  byId("connection").textContent = text;
  byId("connection").className = isBad ? "problem" : "";
}

/** Takes the token and the runs from the address, and removes the token from it, so that a copied address has none. */
function readAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const token = parts.get("token");
  if (token) sessionStorage.setItem("token", token);
  page.token = token ?? sessionStorage.getItem("token");
  page.sweep.name = parts.get("sweep");
  return parts.getAll("run");
}

function writeAddress() {
  const parts = new URLSearchParams();
  if (page.sweep.name !== null && page.sweep.names.length !== 1) parts.append("sweep", page.sweep.name);
  const first = page.shown.get(page.focused);
  for (const { id } of [first, ...[...page.shown.values()].filter((run) => run !== first)].filter((run) => run)) parts.append("run", id);
  history.replaceState(null, "", `#${parts}`);
}

/** Reads the list of runs. Returns whether that was possible. */
async function loadList() {
  try {
    const { folder, runs, sweeps, problems } = await get("/api/runs");
    byId("folder").textContent = folder;
    page.list = runs.sort((a, b) => (b.created ?? 0) - (a.created ?? 0) || b.id.localeCompare(a.id));
    drawList();
    await page.sweep.load(sweeps, page.list, problems);
    page.sweep.draw(page.focused);
    if (!page.hasChosen && page.list.length > 0) {
      page.hasChosen = true;
      const first = page.list.find((run) => run.state === "running") ?? page.list.find((run) => run.state !== "damaged");
      if (first) await focus(first.id);
    }
    if (page.shown.size === 0) say(page.list.length === 0 ? "no runs yet" : "ready");
    return true;
  } catch (error) {
    say(`no connection to zerorun: ${error.message}; the page shows the data that it has`, true);
    return false;
  }
}

function matches(run) {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter((word) => word);
  const text = `${run.id} ${run.name ?? ""} ${run.state}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

function drawList() {
  const runs = page.list.filter(matches);
  byId("count").textContent = `${runs.length} of ${page.list.length} runs; select several to compare them`;
  const active = document.activeElement?.dataset?.key;
  const fact = (name, found) => (found ? `${name} ${number(value(found.value) ?? NaN)}` : null);
  const rows = runs.slice(0, 500).map((run) => {
    const shown = page.shown.get(run.id);
    const box = h("input", { type: "checkbox", "aria-label": `Show ${run.id}`, "data-key": `box ${run.id}`, onchange: (event) => (event.target.checked ? show(run.id) : hide(run.id)) });
    box.checked = Boolean(shown);
    const name = h("button", { type: "button", "data-key": run.id, onclick: () => focus(run.id) }, run.id);
    const steps = run.steps === undefined ? "–" : run.total_steps ? `${number(run.steps)}/${number(run.total_steps)}` : number(run.steps);
    const isBad = ["failed", "killed", "damaged"].includes(run.state);
    const facts = [`${steps} steps`, fact("loss", run.loss), fact("validation", run.val_loss)].filter((text) => text);
    return h("tr", { class: page.focused === run.id ? "focused" : null, title: run.damaged ?? run.error ?? null },
      h("td", { class: "shown" }, box, shown ? swatch(shown.style) : null),
      h("td", { class: "name" }, name, h("p", { class: "quiet" }, h("span", { class: isBad ? "failed" : null }, run.state), ` · ${facts.join(" · ")}`)));
  });
  byId("runs").tBodies[0].replaceChildren(...rows);
  if (active) [...document.querySelectorAll("[data-key]")].find((element) => element.dataset.key === active)?.focus();
}

/** Shows a run beside the others. */
async function show(id) {
  if (page.shown.has(id)) return;
  const used = new Set([...page.shown.values()].map((run) => run.style));
  const style = Array.from({ length: STYLES }, (_, index) => index).find((index) => !used.has(index));
  if (style === undefined) {
    say(`at most ${STYLES} runs can be shown together`, true);
    drawList();
    return;
  }
  const run = { id, style, rows: new RunRows(), details: null, positions: [0, 0, 0, 0, 0] };
  page.shown.set(id, run);
  try {
    await load(run);
  } catch (error) {
    page.shown.delete(id);
    byId("problem").textContent = error.message;
  }
  if (!page.focused) page.focused = id;
  changed();
}

/** Reads everything about a run. */
async function load(run) {
  const query = `id=${encodeURIComponent(run.id)}`;
  run.details = await get(`/api/run?${query}`);
  // The duration of a running run is counted from here.
  run.begun = Date.now() / 1000 - (run.details.run.seconds ?? 0);
  const metrics = await get(`/api/metrics?${query}`);
  run.rows = new RunRows();
  run.rows.add(metrics.rows);
  run.problem = metrics.problem;
  run.positions = [metrics.position, ...run.details.positions.slice(1)];
}

function hide(id) {
  page.shown.delete(id);
  if (page.focused === id) page.focused = page.shown.keys().next().value ?? null;
  changed();
}

/** Shows the details of a run. If the run was not shown, it replaces the one that was. */
async function focus(id) {
  const before = page.focused;
  if (!page.shown.has(id)) {
    await show(id);
    if (page.shown.has(id) && before && before !== id && page.shown.size <= 2) page.shown.delete(before);
  }
  if (page.shown.has(id)) page.focused = id;
  changed();
}

/** Draws a changed selection, and watches it. */
function changed() {
  writeAddress();
  drawList();
  draw();
  watch();
}

function watch() {
  page.stream?.close();
  page.stream = null;
  if (page.shown.size === 0) return;
  const runs = [...page.shown.values()].map(({ id, positions }) => `run=${encodeURIComponent(`${id}@${positions.join(".")}`)}`);
  const stream = new EventSource(`/api/live?${runs.join("&")}`);
  stream.onopen = () => say("live");
  stream.onerror = () => {
    say("no connection to zerorun; the page shows the data that it has", true);
    // The browser repeats an interrupted request, but not one that was refused, for example because a run was removed.
    if (stream.readyState === EventSource.CLOSED) setTimeout(() => page.stream === stream && watchAgain(), LIST_INTERVAL);
  };
  stream.onmessage = (event) => {
    for (const news of JSON.parse(event.data).runs) update(news);
    for (const reached of new URLSearchParams(event.lastEventId).getAll("run")) {
      const at = reached.lastIndexOf("@");
      const run = page.shown.get(reached.slice(0, at));
      if (run) run.positions = reached.slice(at + 1).split(".");
    }
    plan();
  };
  page.stream = stream;
}

/** Hides runs that no longer exist, and watches the others again. */
async function watchAgain() {
  if (await loadList()) {
    for (const id of [...page.shown.keys()]) if (!page.list.some((run) => run.id === id)) hide(id);
  }
  watch();
}

/** Adds news of a run. */
function update(news) {
  const run = page.shown.get(news.id);
  if (!run?.details) return;
  if (news.reload) {
    load(run).then(changed, (error) => say(error.message, true));
    return;
  }
  if (news.rows) {
    if (news.after !== null) run.rows.forgetAfter(news.after);
    run.rows.add(news.rows);
    const loss = run.rows.columns.get("loss")?.mean.findLast((found) => found !== null);
    run.details.run = { ...run.details.run, steps: run.rows.steps.at(-1), loss: loss === undefined ? run.details.run.loss : { value: loss } };
  }
  if (news.run) run.details.run = { ...news.run, seconds: news.run.seconds ?? run.details.run.seconds };
  if (news.ranks) run.details.ranks = news.ranks;
  if (news.experts) run.details.experts = news.experts;
  for (const list of ["events", "launch", "samples"]) if (news[list]) run.details[list] = [...run.details[list], ...news[list]].slice(-MAX_ENTRIES);
  if (news.log) run.details.log = [...run.details.log, ...news.log].slice(-MAX_LINES);
}

/** Draws soon, but at most a few times a second. */
function plan() {
  if (page.isDrawPlanned) return;
  page.isDrawPlanned = true;
  setTimeout(() => requestAnimationFrame(() => {
    page.isDrawPlanned = false;
    draw();
  }), Math.max(0, page.drawn + DRAW_INTERVAL - performance.now()));
}

function settings() {
  return {
    smoothing: Number(byId("smoothing").value), axis: byId("axis").value,
    logx: byId("logx").checked, logy: byId("logy").checked,
  };
}

function draw() {
  page.drawn = performance.now();
  drawCharts();
  page.sweep.draw(page.focused);
  drawFocused();
}

function drawCharts() {
  const runs = [...page.shown.values()].filter((run) => run.details);
  const names = [...new Set(runs.flatMap((run) => run.rows.names()))];
  const front = FRONT.map(({ title, names: wanted, isSum }) => {
    const found = wanted.filter((name) => names.includes(name));
    return { title, of: (run) => (isSum ? found : found.filter((name) => run.rows.columns.has(name)).slice(0, 1)), isThere: found.length > 0 };
  }).filter(({ isThere }) => isThere);
  const others = names.filter((name) => !FRONT.some((chart) => chart.names.includes(name)) || ["forward_ms", "backward_ms", "step_ms"].includes(name));
  place(byId("charts"), front, runs);
  place(byId("others"), byId("more").open ? others.sort().map((name) => ({ title: name, of: () => [name] })) : [], runs);
  byId("more").hidden = others.length === 0;
}

/** Puts charts into a place, and draws them. Existing charts are kept, and with them the keyboard's focus and the cursor. */
function place(element, wanted, runs) {
  const charts = wanted.map(({ title, of }) => {
    const key = `${element.id} ${title}`;
    if (!page.charts.has(key)) page.charts.set(key, new Chart(title));
    return { chart: page.charts.get(key), of };
  });
  const elements = charts.map(({ chart }) => chart.element);
  if (elements.length !== element.children.length || elements.some((child, at) => element.children[at] !== child)) element.replaceChildren(...elements);
  const display = settings();
  for (const { chart, of } of charts) {
    chart.draw(runs.map((run) => ({ label: run.id, style: run.style, points: run.rows.points(of(run), display.axis) })), display);
  }
}

function drawFocused() {
  const run = page.shown.get(page.focused);
  const details = run?.details;
  for (const id of ["ranks", "log", "samples", "config", "events", "about"]) byId(id).hidden = !details;
  byId("experts").hidden = !details?.experts;
  byId("title").textContent = details ? run.id : "No run";
  if (!details) {
    byId("facts").textContent = page.list.length > 0 ? "Choose a run." : "Runs appear here when they begin.";
    drawActions(null);
    return;
  }
  const { state, steps, total_steps: total, seconds, loss, best_val_loss: best, error, damaged, created } = details.run;
  const now = Date.now() / 1000;
  const took = state === "running" ? now - run.begun : seconds;
  const facts = [state, `${number(steps)}${total ? ` of ${number(total)}` : ""} steps`, took ? duration(took) : null, loss ? `loss ${number(value(loss.value) ?? NaN)}` : null,
    best ? `best validation ${number(value(best.value) ?? NaN)} (step ${number(best.step)})` : null, `began ${utc(created)} UTC`];
  byId("facts").textContent = facts.filter((fact) => fact).join(" · ");
  byId("problem").textContent = [error, damaged, run.problem].filter((text) => text).join("\n");
  drawActions(details);
  const { ranks, launch, events, log, samples, config, info } = details;
  panel("ranks", [ranks, launch, events, state, Math.floor(now / 5), byId("charts").clientWidth], () => drawRanks(byId("ranks").querySelector("div"), details, now));
  panel("experts", [details.experts, byId("charts").clientWidth], () => page.experts.draw(byId("experts").querySelector("div"), details.experts));
  panel("log", [log, byId("logfilter").value], () => drawLog(byId("log").querySelector("pre"), log, byId("logfilter").value));
  panel("samples", [samples], () => drawSamples(byId("samples").querySelector("div"), samples));
  const others = [...page.shown.values()].filter((other) => other !== run && other.details).map((other) => other.details);
  const different = byId("different").checked;
  panel("config", [different, config, ...others.map((other) => other.config)], () => drawConfig(byId("config").querySelector(".scroll"), [details, ...others], different));
  panel("events", [events, launch], () => drawEvents(byId("events").querySelector("ol"), details));
  panel("about", [info, details.run.checkpoint_step], () => drawAbout(byId("about").querySelector("dl"), details));
}

/** Draws an open panel if what it shows has changed, so that a selection of text in it is kept. */
function panel(id, inputs, draw) {
  const known = page.panels.get(id);
  if (!byId(id).open || (known?.length === inputs.length && inputs.every((input, at) => input === known[at]))) return;
  page.panels.set(id, inputs);
  draw();
}

function drawActions(details) {
  for (const what of ["save", "stop"]) {
    const answers = details?.ranks?.answers ?? [];
    const reason = !details || details.run.state !== "running" ? "The run is not running."
      : !page.token ? "Open the link with the token, which zerorun has printed in the terminal."
      : !answers.includes(what) ? "The program has not checked for this request so far." : "";
    byId(what).disabled = reason !== "";
    byId(what).title = reason;
  }
}

async function act(what) {
  const id = page.focused;
  byId("acted").textContent = "sending";
  try {
    const response = await fetch(`/api/request?id=${encodeURIComponent(id)}&what=${what}`, { method: "POST", headers: { Authorization: `Bearer ${page.token}` } });
    const answer = await response.json();
    byId("acted").textContent = response.ok ? (what === "save" ? "A checkpoint was requested; it will appear under Events." : "The run was asked to stop after the current step.") : answer.error;
  } catch (error) {
    byId("acted").textContent = `not sent: ${error.message}`;
  }
}

function listen() {
  byId("filter").addEventListener("input", drawList);
  byId("logfilter").addEventListener("input", drawFocused);
  byId("different").addEventListener("change", drawFocused);
  byId("controls").addEventListener("input", () => {
    byId("smoothed").textContent = byId("smoothing").value;
    plan();
  });
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  for (const element of document.querySelectorAll("main > details")) element.addEventListener("toggle", draw);
  byId("sweeps").addEventListener("change", (event) => {
    page.sweep.choose(event.target.value);
    writeAddress();
    loadList();
  });
  for (const what of ["save", "stop"]) byId(what).addEventListener("click", () => act(what));
  let width = 0;
  new ResizeObserver(() => {
    if (width !== byId("charts").clientWidth) plan();
    width = byId("charts").clientWidth;
  }).observe(byId("charts"));
  document.addEventListener("keydown", (event) => {
    const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) && event.target.type !== "checkbox";
    if (event.key === "/" && !isTyping) {
      event.preventDefault();
      byId("filter").focus();
    }
    const names = [...document.querySelectorAll("td.name button")];
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const at = names.indexOf(document.activeElement);
    if (by && (at >= 0 || document.activeElement === byId("filter"))) {
      event.preventDefault();
      names[Math.min(names.length - 1, Math.max(0, at + by))]?.focus();
    }
  });
}

async function begin() {
  listen();
  const chosen = readAddress();
  writeAddress();
  page.hasChosen = chosen.length > 0;
  await loadList();
  for (const id of chosen.slice(0, STYLES)) await show(id);
  setInterval(() => {
    if (!document.hidden) loadList();
  }, LIST_INTERVAL);
  // Ages of reports change without news.
  setInterval(plan, 5000);
}

begin();
