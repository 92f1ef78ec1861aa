// Everything about runs except the list and the curves: ranks, log, samples, configuration, events.

import { bytes, duration, h, milliseconds, number, s, utc } from "./dom.js";

const PATTERNS = 6;

/** Returns the fills of bars: colors with patterns, so that they can be told apart without color. */
function patterns(prefix, count) {
  const marks = ["", "M0 8L8 0", "M0 4H8", "M4 0V8", "M0 0L8 8M0 8L8 0", "M4 4h.01"];
  return s("defs", {}, Array.from({ length: count }, (_, index) => {
    const mark = s("path", { d: marks[index % PATTERNS], class: "mark", stroke: "var(--back)", "stroke-width": index % PATTERNS === 5 ? 3 : 1.3, "stroke-linecap": "round" });
    return s("pattern", { id: `${prefix}${index}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
      s("rect", { width: 8, height: 8, class: `f${index % 8}` }), mark);
  }));
}

/** Returns bars, one for each row, whose parts are { name, value }. Bars have the same scale. */
function bars(prefix, rows, names, text, label, width) {
  const [left, height] = [58, 22];
  const most = Math.max(...rows.map(({ parts }) => parts.reduce((all, part) => all + part.value, 0)), Number.MIN_VALUE);
  const scale = (width - left - 90) / most;
  const picture = s("svg", { width, height: rows.length * height + 2, role: "img", "aria-label": label }, patterns(prefix, names.length));
  rows.forEach(({ title, parts }, row) => {
    const y = row * height + 2;
    picture.append(s("text", { x: left - 6, y: y + 14, "text-anchor": "end" }, title));
    let x = left;
    for (const { name, value } of parts) {
      if (!(value > 0)) continue;
      picture.append(s("rect", { x, y, width: Math.max(value * scale, 0.5), height: height - 5, fill: `url(#${prefix}${names.indexOf(name)})` }, s("title", {}, `${title}: ${name} ${text(value)}`)));
      x += value * scale;
    }
    picture.append(s("text", { x: x + 6, y: y + 14 }, text(parts.reduce((all, part) => all + part.value, 0))));
  });
  const legend = h("ul", {}, names.map((name, index) => h("li", {},
    s("svg", { class: "swatch", width: 22, height: 12, "aria-hidden": "true" }, s("rect", { width: 22, height: 12, fill: `url(#${prefix}${index})` })), h("span", {}, name))));
  return h("figure", { class: "bars" }, h("h3", {}, label), legend, picture);
}

/** Returns the state of each rank: from the launcher's record of this start, and from the last report of the ranks. */
export function rankStates(details, now) {
  const starts = details.launch.filter((event) => event.event === "start");
  const engine = details.events.filter((event) => event.event === "start").at(-1);
  let start = starts.at(-1);
  // A run that was continued without a launcher has older entries.
  if (start && engine && start.time < engine.time) start = undefined;
  const ended = new Map();
  let failure = null;
  if (start) {
    for (const event of details.launch.slice(details.launch.lastIndexOf(start))) {
      if (event.event === "rank") ended.set(event.rank, event);
      if (event.event === "failure") failure = event;
    }
  }
  const report = details.ranks && engine && details.ranks.time >= engine.time ? details.ranks : null;
  const reports = new Map((report?.ranks ?? []).map((rank) => [rank.rank, rank]));
  const count = Math.max(reports.size, start?.ranks ?? engine?.world_size ?? details.info.world_size ?? 0, ...[...ended.keys()].map((rank) => rank + 1));
  const state = details.run.state;
  const states = Array.from({ length: Math.min(count, 4096) }, (_, rank) => {
    const [end, own] = [ended.get(rank), reports.get(rank)];
    const out = { rank, host: own?.host ?? end?.host ?? "", report: own, text: "", kind: "quiet" };
    // If ranks end together, the launcher's record says which one failed first.
    const isFirst = !failure || failure.rank === rank || !ended.has(failure.rank);
    if (end?.outcome === "failed" && isFirst) [out.kind, out.text] = ["failed", `✕ dead: ${end.how}`];
    else if (end && end.outcome !== "ended") out.text = `■ ${end.how}`;
    else if (end) out.text = "✓ ended";
    else if (state === "running") out.text = own ? `● running` : "● starting";
    else if (state === "killed") [out.kind, out.text] = ["failed", "? unknown: the job was killed"];
    else out.text = `✓ ended (run ${state})`;
    return out;
  });
  const age = report && state === "running" ? Math.max(0, now - report.time) : null;
  return { states, report, failure, age };
}

/** Draws the ranks: their states, memory by kind, and the parts of their last step. */
export function drawRanks(place, details, now) {
  const { states, report, failure, age } = rankStates(details, now);
  const width = Math.min(900, Math.max(240, place.clientWidth - 20));
  const open = new Set([...place.querySelectorAll("details[open]")].map((element) => element.dataset.name));
  const failed = failure ? [h("p", { class: "problem" }, failure.message)] : [];
  const head = ["Rank", "Host", "State", "Process", "Resident", "Waiting"].map((name, at) => h("th", { scope: "col", class: at > 3 ? "number" : null }, name));
  const row = ({ rank, host, report: own, text, kind }) => h("tr", {},
    h("td", {}, String(rank)), h("td", {}, host), h("td", { class: kind === "failed" ? "state failed" : "state" }, text), h("td", {}, own ? String(own.pid) : "–"),
    h("td", { class: "number" }, own ? bytes(own.rss_bytes) : "–"),
    h("td", { class: "number" }, own ? milliseconds(own.comm_ms + own.disk_ms) : "–"));
  const table = h("div", { class: "scroll" }, h("table", { id: "rankstates" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, states.map(row))));
  const parts = [...failed, table];
  if (report) {
    const title = (rank) => `rank ${rank.rank}`;
    const note = age !== null && age > 10 ? `, ${duration(age)} ago` : "";
    parts.push(h("p", { class: "quiet" }, `Last report of the ranks: after step ${number(report.step)}${note}.`));
    const kinds = [...new Set(report.ranks.flatMap((rank) => Object.keys(rank.memory)))];
    const of = (rank, part) => kinds.map((name) => ({ name, value: rank.memory[name]?.[part] ?? 0 }));
    const sum = (part) => report.ranks.reduce((all, rank) => all + of(rank, part).reduce((total, { value }) => total + value, 0), 0);
    parts.push(bars("kind", report.ranks.map((rank) => ({ title: title(rank), parts: of(rank, "held") })), kinds, bytes, "Model state in memory, by kind, between steps", width));
    if (sum("file") > 0) parts.push(bars("file", report.ranks.map((rank) => ({ title: title(rank), parts: of(rank, "file") })), kinds, bytes, "Model state in files, by kind", width));
    const cell = ({ held, peak, file } = { held: 0, peak: 0, file: 0 }) => h("td", { class: "number" }, `${bytes(held)}, at most ${bytes(peak)}${file > 0 ? `, ${bytes(file)} in files` : ""}`);
    parts.push(h("details", { "data-name": "numbers", open: open.has("numbers") }, h("summary", {}, "Memory in numbers"),
      h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Kind"), report.ranks.map((rank) => h("th", { scope: "col", class: "number" }, title(rank))))),
        h("tbody", {}, kinds.map((kind) => h("tr", {}, h("td", {}, kind), report.ranks.map((rank) => cell(rank.memory[kind])))),
          h("tr", {}, h("td", {}, "resident memory"), report.ranks.map((rank) => h("td", { class: "number" }, `${bytes(rank.rss_bytes)}, at most ${bytes(rank.rss_peak_bytes)}`))))))));
    const phases = [["forward", "forward_ms"], ["backward", "backward_ms"], ["step", "step_ms"]];
    const waits = [["for other ranks", "comm_ms"], ["for files", "disk_ms"]].filter(([, key]) => report.ranks.some((rank) => rank[key] > 0));
    const times = (all) => report.ranks.map((rank) => ({ title: title(rank), parts: all.map(([name, key]) => ({ name, value: rank[key] })) }));
    parts.push(bars("phase", times(phases), phases.map(([name]) => name), milliseconds, "Time of the last step, by phase", width));
    if (waits.length > 0) parts.push(bars("wait", times(waits), waits.map(([name]) => name), milliseconds, "Of this, waiting", width));
  }
  place.replaceChildren(...parts);
}

/** Draws the lines of the log that contain a text. The view stays at the end if it was there. */
export function drawLog(place, lines, filter) {
  const wasAtEnd = place.scrollTop + place.clientHeight >= place.scrollHeight - 8;
  const shown = filter ? lines.filter((line) => line.toLowerCase().includes(filter.toLowerCase())) : lines;
  place.textContent = shown.length > 0 ? shown.join("\n") : lines.length > 0 ? "No line contains this text." : "No output was recorded: zerorun records the output of jobs with several ranks, and of jobs with --dashboard.";
  if (wasAtEnd) place.scrollTop = place.scrollHeight;
}

/** Draws the newest samples first. */
export function drawSamples(place, samples) {
  const sample = ({ step, prompt, text, time }) => h("div", { class: "sample" },
    h("p", { class: "quiet" }, `step ${number(step)}, ${utc(time)}`), h("pre", {}, h("strong", {}, String(prompt ?? "")), String(text ?? "")));
  place.replaceChildren(...(samples.length > 0 ? samples.slice(-50).reverse().map(sample) : [h("p", { class: "quiet" }, "This run has recorded no samples.")]));
}

/** Draws the configurations of runs side by side. Rows that differ are marked. */
export function drawConfig(place, runs, onlyDifferences) {
  const names = [...new Set(runs.flatMap(({ config }) => config.map(([name]) => name)))].sort();
  const tables = runs.map(({ config }) => new Map(config));
  const text = (found) => (found === undefined ? "–" : typeof found === "string" ? found : JSON.stringify(found));
  const rows = names.map((name) => ({ name, values: tables.map((table) => text(table.get(name))) }));
  const differs = ({ values }) => values.some((found) => found !== values[0]);
  const shown = onlyDifferences ? rows.filter(differs) : rows;
  const row = (entry) => h("tr", { class: differs(entry) ? "marked" : null }, h("td", {}, `${differs(entry) ? "≠ " : ""}${entry.name.replace(/^(configuration|settings)\./, "")}`), entry.values.map((found) => h("td", {}, found)));
  if (shown.length === 0) {
    place.replaceChildren(h("p", { class: "quiet" }, runs.length < 2 && onlyDifferences ? "Select two runs to see what differs." : "Nothing differs."));
    return;
  }
  place.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Setting"), runs.map(({ run }) => h("th", { scope: "col" }, run.id)))), h("tbody", {}, shown.map(row))));
}

/** Draws the events and what the launcher has recorded, newest first. */
export function drawEvents(place, details) {
  const text = (event) => {
    switch (event.event) {
      case "start": return event.pid ? `start with ${number(event.world_size)} ranks, process ${event.pid} on ${event.host}${event.loaded ? `, from ${event.loaded}` : ""}` : `zerorun started ${number(event.ranks)} ranks${event.restart ? ` (restart ${event.restart})` : ""}`;
      case "checkpoint": return `checkpoint after step ${number(event.step)}: ${event.path}`;
      case "load": return `continues after step ${number(event.step)}, from ${event.path}`;
      case "request": return `asked to ${event.request} after step ${number(event.step)}`;
      case "rank": return `rank ${event.rank} ${event.how}`;
      case "failure": return event.message;
      case "end": return `${event.outcome} after step ${number(event.step)}${event.message ? `: ${event.message}` : ""}`;
      default: return `${event.event}${event.step === undefined ? "" : ` after step ${number(event.step)}`}${event.message ? `: ${event.message}` : ""}`;
    }
  };
  const all = [...details.events, ...details.launch].sort((a, b) => b.time - a.time).slice(0, 500);
  place.replaceChildren(...all.map((event) => h("li", {}, `${utc(event.time)}  ${text(event)}`)));
}

/** Draws the machine, the command and the versions. */
export function drawAbout(place, { run, info }) {
  const machine = info.machine ?? {};
  const git = info.git ? `${info.git.commit}${info.git.branch ? ` (${info.git.branch})` : ""}` : null;
  const rows = [
    ["folder", run.folder], ["command", (info.command ?? []).join(" ")], ["directory", info.directory],
    ["machine", `${machine.host}: ${machine.processor}, ${number(machine.cores)} cores (${machine.simd}), ${bytes(machine.memory_bytes ?? 0)}, ${machine.system}`],
    ["candle-zero", `${info.versions?.candle_zero}${info.versions?.debug ? " (built with debug assertions)" : ""}`], ["git", git],
    ["checkpoints", run.checkpoints ? `${run.checkpoints}, the last one after step ${number(run.checkpoint_step)}` : null],
  ];
  place.replaceChildren(...rows.filter(([, value]) => value).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]));
}
