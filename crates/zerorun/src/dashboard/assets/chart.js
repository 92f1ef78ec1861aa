// Curves as SVG.

import { duration, h, number, s, scientific } from "./dom.js";
import { smoothed } from "./series.js";

const HEIGHT = 210;
const MARGIN = { left: 58, right: 14, top: 8, bottom: 24 };
/** The number of styles: colors, dashes and markers. */
export const STYLES = 8;
export const DASHES = ["", "7 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2", "1 4", "6 2 2 2 2 2"];
/** Markers around the origin. */
export const MARKERS = ["M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z", "M-3-3h6v6h-6z", "M0-4l4 7h-8z", "M0-4l4 4l-4 4l-4-4z", "M-4-2.5h8l-4 6.5z",
  "M-3.5 0h7M0-3.5v7", "M-3-3l6 6M-3 3l6-6", "M-4 0h8"];

/** Returns a small picture of a style, so that lines can be told apart without color. */
export function swatch(style) {
  const line = s("path", { d: "M0 7h30", class: `curve s${style}`, "stroke-dasharray": DASHES[style] });
  const marker = s("path", { d: MARKERS[style], class: `s${style} f${style}`, transform: "translate(15 7)" });
  return s("svg", { class: "swatch", width: 30, height: 14, "aria-hidden": "true" }, line, marker);
}

/** Returns round numbers between two ends. */
export function ticks(low, high, isLog, most) {
  if (isLog) {
    const out = [];
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const every = Math.max(1, Math.ceil((last - first) / most));
    const parts = last - first <= 2 ? [1, 2, 5] : [1];
    for (let power = first; power <= last; power += every) out.push(...parts.map((part) => part * 10 ** power));
    return out.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  }
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((part) => part * power).find((part) => part >= rough);
  const out = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) out.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return out;
}

/** Returns the ends of an axis for values. */
export function extent(values, isLog) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (!Number.isFinite(value) || (isLog && value <= 0)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return null;
  if (low === high) return isLog ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  return [low, high];
}

/** Returns the values without the highest and the lowest hundredths, which may be far away. */
function usual(values) {
  const sorted = values.filter((value) => Number.isFinite(value)).sort((a, b) => a - b);
  const cut = Math.floor(sorted.length / 50);
  return sorted.slice(cut, sorted.length - cut);
}

let charts = 0;

/** A chart of one value of several runs. */
export class Chart {
  constructor(title) {
    this.title = title;
    this.inside = `inside${charts++}`;
    this.legend = h("ul", {});
    this.caption = h("figcaption", { "aria-live": "polite" });
    this.svg = s("svg", { height: HEIGHT, tabindex: 0, role: "img" });
    this.element = h("figure", {}, h("h3", {}, title), this.legend, this.svg, this.caption);
    this.cursor = null;
    this.series = [];
    this.svg.addEventListener("pointermove", (event) => this.point(event.clientX - this.svg.getBoundingClientRect().left));
    this.svg.addEventListener("pointerleave", () => this.show(null));
    this.svg.addEventListener("blur", () => this.show(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  /** Draws series: { label, style, points }. */
  draw(series, settings) {
    this.series = series.filter(({ points }) => points.x.length > 0);
    this.settings = settings;
    const width = Math.max(220, this.element.clientWidth - 20 || 400);
    this.width = width;
    const lines = this.series.map(({ points }) => (settings.smoothing > 0 ? smoothed(points.y, settings.smoothing) : points.y));
    this.lines = lines;
    const xs = extent(this.series.flatMap(({ points }) => [points.x.find((x) => !settings.logx || x > 0), points.x.at(-1)]), settings.logx);
    const ys = extent(this.series.flatMap(({ points }, index) => (settings.smoothing > 0 ? lines[index].concat(usual(points.y)) : points.low.concat(points.high))), settings.logy);
    const inside = [width - MARGIN.left - MARGIN.right, HEIGHT - MARGIN.top - MARGIN.bottom];
    const scale = ([low, high], isLog, from, length) => {
      const place = isLog ? Math.log10 : (value) => value;
      const [first, last] = [place(low), place(high)];
      return (value) => from + (length * (place(value) - first)) / (last - first);
    };
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    if (!xs || !ys) {
      this.place = null;
      this.svg.replaceChildren(s("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "no values that can be drawn"));
      this.legend.replaceChildren();
      return;
    }
    const x = scale(xs, settings.logx, MARGIN.left, inside[0]);
    const y = scale(ys, settings.logy, HEIGHT - MARGIN.bottom, -inside[1]);
    this.place = x;
    const parts = [s("clipPath", { id: this.inside }, s("rect", { x: MARGIN.left, y: MARGIN.top, width: inside[0], height: inside[1] }))];
    const isSmall = Math.max(...ys.map(Math.abs)) < 0.01;
    for (const tick of ticks(...ys, settings.logy, 5)) {
      parts.push(s("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }));
      parts.push(s("text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, isSmall ? scientific(tick) : number(tick)));
    }
    const across = ticks(...xs, settings.logx, Math.max(2, Math.floor(width / 90)));
    for (const tick of across) {
      const anchor = x(tick) > width - 24 ? "end" : "middle";
      const text = settings.axis === "time" ? duration(tick) : number(tick);
      parts.push(s("line", { class: "grid", x1: x(tick), x2: x(tick), y1: HEIGHT - MARGIN.bottom, y2: HEIGHT - MARGIN.bottom + 4 }));
      parts.push(s("text", { x: Math.min(x(tick), width - 2), y: HEIGHT - 6, "text-anchor": anchor }, text));
    }
    let missing = 0;
    this.series.forEach(({ points, style }, index) => {
      missing += points.y.filter((value) => !Number.isFinite(value)).length;
      const visible = (value, isLog) => Number.isFinite(value) && (!isLog || value > 0);
      const path = (values) => this.path(points.x, values, x, y, visible);
      const reduced = points.y.some((value, at) => points.low[at] !== value && Number.isFinite(value));
      if (reduced && settings.smoothing === 0) parts.push(s("path", { class: `band f${style}`, d: this.band(points, x, y, visible) }));
      if (settings.smoothing > 0) parts.push(s("path", { class: `curve raw s${style}`, d: path(points.y), "clip-path": `url(#${this.inside})` }));
      parts.push(s("path", { class: `curve s${style}`, d: path(lines[index]), "stroke-dasharray": this.series.length > 1 ? DASHES[style] : "" }));
      parts.push(...this.markers(points.x, lines[index], x, y, visible, style));
    });
    this.line = s("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
    this.svg.replaceChildren(...parts, this.line);
    this.missing = missing === 0 ? "" : `${missing} ${missing === 1 ? "value is" : "values are"} not finite`;
    const last = this.series.map(({ label, points }) => `${label}: ${number(points.y.at(-1))}`);
    this.svg.setAttribute("aria-label", `${this.title}. Last values: ${last.join("; ")}. Arrow keys move along the curve.`);
    this.legend.replaceChildren(...this.series.map(({ label, style, points }) =>
      h("li", {}, swatch(style), h("span", {}, `${label}  ${number(points.y.at(-1))}`))));
    this.show(this.cursor);
  }

  /** Returns a path through values, with gaps at those that cannot be drawn, and at most four points per pixel. */
  path(xs, ys, x, y, visible) {
    const { logx, logy } = this.settings;
    let [out, isDown, column, kept] = ["", false, null, []];
    const flush = () => {
      for (const [px, py] of kept) {
        out += `${isDown ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`;
        isDown = true;
      }
      kept = [];
    };
    xs.forEach((value, at) => {
      if (!visible(value, logx) || !visible(ys[at], logy)) {
        flush();
        isDown = false;
        return;
      }
      const point = [x(value), y(ys[at])];
      if (Math.floor(point[0]) !== column) {
        flush();
        column = Math.floor(point[0]);
      }
      if (kept.length < 4) kept.push(point);
      else {
        // The first, the lowest, the highest and the last point of a pixel.
        const [first, ...rest] = [...kept, point];
        const last = rest.at(-1);
        const lowest = rest.reduce((a, b) => (b[1] < a[1] ? b : a));
        const highest = rest.reduce((a, b) => (b[1] > a[1] ? b : a));
        kept = [first, lowest, highest, last];
      }
    });
    flush();
    return out;
  }

  /** Returns the outline of the ranges. */
  band({ x: xs, low, high }, x, y, visible) {
    const { logx, logy } = this.settings;
    const rows = xs.map((_, at) => at).filter((at) => visible(xs[at], logx) && visible(low[at], logy) && visible(high[at], logy));
    if (rows.length < 2) return "";
    const point = (values) => (at) => `${x(xs[at]).toFixed(1)} ${y(values[at]).toFixed(1)}`;
    return `M${rows.map(point(high)).join("L")}L${rows.reverse().map(point(low)).join("L")}Z`;
  }

  /** Returns markers: at each point of a short curve, else at a few of them. */
  markers(xs, ys, x, y, visible, style) {
    const { logx, logy } = this.settings;
    const rows = xs.map((_, at) => at).filter((at) => visible(xs[at], logx) && visible(ys[at], logy));
    const few = rows.length <= 12;
    if (!few && this.series.length < 2) return [];
    const chosen = few ? rows : Array.from({ length: 7 }, (_, part) => rows[Math.round((part * (rows.length - 1)) / 6)]);
    return chosen.map((at) => s("path", { d: MARKERS[style], class: `s${style} f${style}`, transform: `translate(${x(xs[at]).toFixed(1)} ${y(ys[at]).toFixed(1)})` }));
  }

  /** Moves the cursor to the point nearest to a pixel. */
  point(pixel) {
    if (!this.place) return;
    const all = this.series.flatMap(({ points }) => points.x);
    this.show(all.reduce((a, b) => (Math.abs(this.place(b) - pixel) < Math.abs(this.place(a) - pixel) ? b : a), all[0]));
  }

  key(event) {
    const all = [...new Set(this.series.flatMap(({ points }) => points.x))].sort((a, b) => a - b);
    if (all.length === 0) return;
    const at = this.cursor === null ? all.length - 1 : all.findIndex((x) => x >= this.cursor);
    const by = { ArrowLeft: at - Math.max(1, Math.round(all.length / 100)), ArrowRight: at + Math.max(1, Math.round(all.length / 100)), Home: 0, End: all.length - 1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    this.show(all[Math.min(all.length - 1, Math.max(0, by))]);
  }

  /** Shows the values at a place, or nothing. */
  show(at) {
    this.cursor = at;
    if (!this.line || !this.place) return;
    this.line.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at === null) {
      this.caption.textContent = this.missing;
      return;
    }
    const x = this.place(at);
    if (!Number.isFinite(x)) return;
    this.line.setAttribute("x1", x);
    this.line.setAttribute("x2", x);
    const values = this.series.map(({ label, points }, index) => {
      let row = points.x.findIndex((x) => x > at);
      row = (row < 0 ? points.x.length : row) - 1;
      return row < 0 ? null : `${this.series.length > 1 ? `${label} ` : ""}${number(this.lines[index][row])}`;
    });
    const place = this.settings.axis === "time" ? `after ${duration(at)}` : `step ${number(at)}`;
    this.caption.textContent = `${place}: ${values.filter((value) => value).join("; ")}`;
  }
}
