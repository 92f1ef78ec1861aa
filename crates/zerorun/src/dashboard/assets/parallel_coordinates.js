// Parallel coordinates: the trials of a sweep as lines across axes, one for each parameter and one for the metric.

import { DASHES, MARKERS, extent, swatch, ticks } from "./chart.js";
import { h, number, s, scientific, value } from "./dom.js";

const HEIGHT = 300;
const MARGIN = { left: 80, right: 100, top: 42, bottom: 14 };
/** The minimum distance between two axes. */
const MIN_GAP = 120;
const MAX_LABELS = 12;
/** The distance in pixels within which the pointer selects a line. */
const NEAR = 14;
/** The styles of lines by the state of the trial: states differ in dashes and markers, and not only in color. */
const STYLES = { complete: 0, paused: 1, running: 2, stopped: 3, ended: 4, replaced: 5, failed: 6 };

/** Returns a value of a parameter as text, with all its digits. */
export function exact(found) {
  if (typeof found === "number") return Number.isInteger(found) || Math.abs(found) >= 1e-3 ? String(found) : found.toExponential();
  return typeof found === "string" ? found : JSON.stringify(found);
}

const shortened = (text, most) => (text.length > most ? `…${text.slice(1 - most)}` : text);

/** Returns an axis: its labels, and a function from values to places between 0 and 1; null if a value has none. */
function axisOf({ name, values, low, high, log, note }, found) {
  if (values) {
    const known = new Map(values.map((one, index) => [JSON.stringify(one), index]));
    const part = (index) => (values.length === 1 ? 0.5 : index / (values.length - 1));
    const every = Math.ceil(values.length / MAX_LABELS);
    const labels = values.map((one, index) => ({ at: part(index), text: exact(one) })).filter((_, index) => index % every === 0);
    const place = (one) => {
      const index = known.get(JSON.stringify(one));
      return index === undefined ? null : part(index);
    };
    return { name, note: "choice", labels, place };
  }
  const ends = extent([low, high, ...found].filter((one) => typeof one === "number"), log);
  if (!ends) return { name, note, labels: [], place: () => null };
  const scale = (one) => (log ? Math.log10(one) : one);
  const [first, last] = ends.map(scale);
  const part = (one) => (scale(one) - first) / (last - first);
  const isSmall = Math.max(...ends.map(Math.abs)) < 0.01;
  const labels = ticks(...ends, log, 6).map((tick) => ({ at: part(tick), text: isSmall ? scientific(tick) : number(tick) }));
  const place = (one) => (typeof one === "number" && Number.isFinite(one) && (!log || one > 0) ? part(one) : null);
  return { name, note: note ?? (log ? "logarithmic" : "linear"), labels, place };
}

/** The picture of a sweep's trials. `open` shows a trial's run. */
export class ParallelPlot {
  constructor(open) {
    this.open = open;
    this.lines = [];
    this.chosen = null;
    this.hint = "";
    this.legend = h("ul", {});
    this.caption = h("figcaption", { "aria-live": "polite" });
    this.over = s("path", { class: "over" });
    this.svg = s("svg", { height: HEIGHT, tabindex: 0, role: "application" });
    this.element = h("figure", { id: "parallel" }, h("h3", {}, "Trials by their values"), this.legend, h("div", { class: "scroll" }, this.svg), this.caption);
    this.svg.addEventListener("pointermove", (event) => this.choose(this.nearest(event)));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    this.svg.addEventListener("blur", () => this.choose(null));
    this.svg.addEventListener("click", (event) => this.openTrial(this.nearest(event)));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  /** Draws the trials of a sweep, which are sorted, the best first. */
  draw(sweep, width) {
    const { parameters, trials, metric, mode, best } = sweep;
    const metrics = trials.map((trial) => value(trial.value));
    const axes = parameters.map((parameter, at) => axisOf(parameter, trials.map((trial) => trial.values?.[at])));
    axes.push(axisOf({ name: metric, log: false, note: mode === "max" ? "high is good" : "low is good" }, metrics));
    const full = Math.max(width - 20, MARGIN.left + MARGIN.right + MIN_GAP * (axes.length - 1));
    const x = (at) => MARGIN.left + (at * (full - MARGIN.left - MARGIN.right)) / (axes.length - 1);
    const y = (part) => HEIGHT - MARGIN.bottom - part * (HEIGHT - MARGIN.top - MARGIN.bottom);
    this.svg.setAttribute("width", full);
    this.svg.setAttribute("viewBox", `0 0 ${full} ${HEIGHT}`);
    this.lines = trials.map((trial, row) => {
      const points = axes.map((axis, at) => {
        const part = axis.place(at < parameters.length ? trial.values?.[at] : metrics[row]);
        return part === null ? null : [x(at), y(part)];
      });
      return { trial, points, text: this.describe(sweep, trial) };
    });
    const labels = axes.flatMap((axis, at) => [
      s("line", { class: "axis", x1: x(at), x2: x(at), y1: y(0), y2: y(1) }),
      s("text", { class: "axisname", x: x(at), y: 14, "text-anchor": "middle" }, shortened(axis.name, 18), s("title", {}, axis.name)),
      s("text", { x: x(at), y: 28, "text-anchor": "middle" }, axis.note),
    ]);
    const marks = axes.flatMap((axis, at) => axis.labels.map(({ at: part, text }) =>
      s("text", { class: "halo", x: x(at) - 5, y: y(part) + 4, "text-anchor": "end" }, shortened(text, 13), s("title", {}, text))));
    // The best trial is drawn last, over the others.
    const drawn = [...this.lines].reverse().flatMap((line) => this.line(line, line.trial.trial === best));
    this.svg.replaceChildren(...labels, ...drawn, ...marks, this.over);
    const states = [...new Set(trials.map((trial) => trial.state))];
    const bold = best === null ? [] : [h("li", { class: "bestkey" }, s("svg", { class: "swatch", width: 30, height: 14, "aria-hidden": "true" }, s("path", { d: "M0 7h30", class: "trialline best s0" })), h("span", {}, "thick: the best trial"))];
    this.legend.replaceChildren(...states.map((state) => h("li", {}, swatch(STYLES[state] ?? 7), h("span", {}, state))), ...bold);
    const left = sweep.begun - trials.length;
    this.hint = left > 0 ? `${number(left)} more trials, which are worse, are left out here and in the table.` : "";
    const top = this.lines.find((line) => line.trial.trial === best);
    this.svg.setAttribute("aria-label", `Trials by their values.${top ? ` Best: ${top.text}.` : ""} Arrow keys move through the trials, the best first; Enter shows the run. The table below has the same values.`);
    this.choose(this.lines.some((line) => line.trial.trial === this.chosen) ? this.chosen : null);
  }

  /** Returns the elements of a line. */
  line({ trial, points, text }, isBest) {
    const style = STYLES[trial.state] ?? 7;
    const end = points.findLast((point) => point);
    const kind = isBest ? "trialline best" : "trialline";
    const parts = [s("path", { class: `${kind} s${style}`, d: this.path(points), "stroke-dasharray": DASHES[style], "data-trial": trial.trial, "data-state": trial.state }, s("title", {}, text))];
    if (!end) return parts;
    parts.push(s("path", { d: MARKERS[style], class: `s${style} f${style}`, transform: `translate(${end[0].toFixed(1)} ${end[1].toFixed(1)})` }));
    if (isBest) parts.push(s("text", { class: "halo besttext", x: end[0] + 9, y: end[1] + 4 }, `best: trial ${trial.trial}`));
    return parts;
  }

  /** Returns a path through points, with gaps at those that are missing. */
  path(points) {
    return points.map((point, at) => (point ? `${points[at - 1] ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}` : "")).join("");
  }

  describe({ metric, parameters }, { trial, state, step, value: result, values }) {
    const all = values ? parameters.map(({ name }, at) => `${name} ${exact(values[at])}`).join(", ") : "values unknown";
    return `trial ${trial}, ${state}, step ${number(step)}: ${metric} ${number(value(result))}; ${all}`;
  }

  /** Returns the number of the trial whose line is nearest to the pointer, or null if none is near. */
  nearest(event) {
    const box = this.svg.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    let [found, distance] = [null, NEAR];
    const look = (line, far) => {
      if (far < distance) [found, distance] = [line.trial.trial, far];
    };
    for (const line of this.lines) {
      line.points.forEach((point, at) => {
        const next = line.points[at + 1];
        if (point) look(line, Math.hypot(point[0] - px, point[1] - py));
        if (point && next && point[0] <= px && px <= next[0]) look(line, Math.abs(point[1] + ((next[1] - point[1]) * (px - point[0])) / (next[0] - point[0]) - py));
      });
    }
    return found;
  }

  key(event) {
    if (this.lines.length === 0) return;
    if (event.key === "Enter") {
      this.openTrial(this.chosen);
      return;
    }
    const at = this.lines.findIndex((line) => line.trial.trial === this.chosen);
    const to = { ArrowDown: at + 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowLeft: at - 1, Home: 0, End: this.lines.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.choose(this.lines[Math.min(this.lines.length - 1, Math.max(0, to))].trial.trial);
  }

  openTrial(number) {
    const line = this.lines.find(({ trial }) => trial.trial === number);
    if (line) this.open(line.trial);
  }

  /** Marks the line of a trial and describes it, or none. */
  choose(number) {
    this.chosen = number;
    const line = this.lines.find(({ trial }) => trial.trial === number);
    this.over.setAttribute("d", line ? this.path(line.points) : "");
    this.caption.textContent = line ? line.text : this.hint;
  }
}
