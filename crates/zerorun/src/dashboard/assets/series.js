// The metrics of a run in the browser: columns of numbers that grow, and series that the charts draw.

import { value } from "./dom.js";

/** The maximum number of rows that the page keeps of a run; twice as many are merged in pairs. */
const MAX_ROWS = 3000;

/** The rows of a run. A missing value is null. */
export class RunRows {
  constructor() {
    this.steps = [];
    this.times = [];
    this.columns = new Map();
  }

  /** Drops the rows after a step, because the run repeats them. */
  forgetAfter(step) {
    let keep = this.steps.length;
    while (keep > 0 && this.steps[keep - 1] > step) keep--;
    if (keep === this.steps.length) return;
    this.steps.length = keep;
    this.times.length = keep;
    for (const column of this.columns.values()) for (const part of Object.values(column)) part.length = keep;
  }

  /** Adds rows in the form in which the server sends them. Rows of a known step add values to it. */
  add(rows) {
    const names = Object.keys(rows.values);
    rows.steps.forEach((step, row) => {
      let at = this.steps.length;
      while (at > 0 && this.steps[at - 1] > step) at--;
      if (at === 0 || this.steps[at - 1] !== step) {
        this.steps.splice(at, 0, step);
        this.times.splice(at, 0, rows.times[row]);
        for (const column of this.columns.values()) for (const part of Object.values(column)) part.splice(at, 0, null);
      } else {
        at -= 1;
      }
      for (const name of names) {
        const mean = value(rows.values[name][row]);
        if (mean === null) continue;
        const column = this.column(name);
        column.mean[at] = mean;
        column.low[at] = value(rows.low?.[name]?.[row]) ?? mean;
        column.high[at] = value(rows.high?.[name]?.[row]) ?? mean;
      }
    });
    if (this.steps.length > 2 * MAX_ROWS) this.halve();
  }

  column(name) {
    if (!this.columns.has(name)) {
      const empty = () => new Array(this.steps.length).fill(null);
      this.columns.set(name, { mean: empty(), low: empty(), high: empty() });
    }
    return this.columns.get(name);
  }

  /** Merges the rows in pairs. */
  halve() {
    const last = (column) => column.filter((_, row) => row % 2 === 1 || row + 1 === column.length);
    const pairs = (column, merged) => {
      const out = [];
      for (let row = 0; row < column.length; row += 2) {
        const [a, b] = [column[row], column[row + 1] ?? null];
        out.push(a === null || b === null ? a ?? b : merged(a, b));
      }
      return out;
    };
    this.steps = last(this.steps);
    this.times = last(this.times);
    for (const [name, { mean, low, high }] of this.columns) {
      this.columns.set(name, { mean: pairs(mean, (a, b) => (a + b) / 2), low: pairs(low, Math.min), high: pairs(high, Math.max) });
    }
  }

  /** Returns the points of a value, or of a sum of values. */
  points(names, axis) {
    const columns = names.map((name) => this.columns.get(name)).filter((column) => column);
    const out = { x: [], y: [], low: [], high: [] };
    if (columns.length === 0) return out;
    this.steps.forEach((step, row) => {
      const sum = (part) => columns.reduce((all, column) => (column[part][row] === null ? all : (all ?? 0) + column[part][row]), null);
      const mean = sum("mean");
      if (mean === null) return;
      out.x.push(axis === "time" ? this.times[row] - this.times[0] : step);
      out.y.push(mean);
      out.low.push(sum("low"));
      out.high.push(sum("high"));
    });
    return out;
  }

  names() {
    return [...this.columns.keys()];
  }
}

/** Returns the exponential moving average of values, which begins without a bias. */
export function smoothed(values, factor) {
  let [average, weight] = [0, 0];
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    average = factor * average + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return average / weight;
  });
}
