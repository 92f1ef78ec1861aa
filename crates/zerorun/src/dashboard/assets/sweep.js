// A sweep: its trials as a table and as parallel coordinates, and the best value so far.

import { Chart } from "./chart.js";
import { byId, h, number, value } from "./dom.js";
import { ParallelPlot, exact } from "./parallel_coordinates.js";

const STATES = {
  running: "● running", ended: "◐ ended, waits for the results of others", paused: "‖ paused", complete: "✓ complete",
  stopped: "■ stopped early", replaced: "→ replaced", failed: "✕ failed",
};

/** The part of the page about a sweep. `get` requests JSON, and `open` shows a run. */
export class SweepPanel {
  constructor(get, open) {
    this.get = get;
    this.open = open;
    this.names = [];
    this.choose(null);
    this.plot = new ParallelPlot((trial) => this.show(trial));
  }

  /** Chooses the sweep that is shown. */
  choose(name) {
    this.name = name;
    this.sweep = null;
    this.error = "";
    this.problems = [];
    this.runs = new Map();
    this.live = "";
    this.curve = null;
    this.drawn = null;
  }

  /** Reads the sweep if it has changed. `runs` is the list of runs, the newest first. */
  async load(names, runs, problems) {
    this.names = names;
    if (!names.includes(this.name)) this.choose(names[0] ?? null);
    if (this.name === null) return;
    const { name } = this;
    try {
      const sweep = await this.get(`/api/sweep?name=${encodeURIComponent(name)}&known=${this.sweep?.version ?? ""}`);
      // Another sweep may have been chosen in the meantime.
      if (this.name !== name) return;
      if (!sweep.unchanged) this.sweep = sweep;
      this.error = "";
    } catch (error) {
      this.error = error.message;
    }
    this.problems = problems;
    this.runs = new Map();
    const prefix = this.sweep?.prefix ?? "";
    for (const run of runs) if (run.id.startsWith(`${prefix}${run.name}-`) && !this.runs.has(run.name)) this.runs.set(run.name, run);
    // The page draws the trials again if one of these has changed.
    this.live = JSON.stringify((this.sweep?.trials ?? []).map((trial) => {
      const run = this.runs.get(trial.run);
      return run ? [run.id, run.state, trial.state === "running" ? run.steps : 0] : null;
    }));
  }

  /** Shows the run of a trial, if it has a record. */
  show(trial) {
    const run = this.runs.get(trial.run);
    if (run) this.open(run.id);
  }

  /** Draws what has changed. `focused` is the id of the run whose details are shown. */
  draw(focused) {
    const place = byId("sweep");
    place.hidden = this.names.length === 0;
    if (place.hidden || !place.open) return;
    const width = byId("sweepcharts").clientWidth;
    const inputs = [this.name, this.names.join("\n"), this.sweep, this.error, this.problems.join("\n"), this.live, focused, width];
    if (this.drawn?.every((known, at) => known === inputs[at])) return;
    this.drawn = inputs;
    this.drawNames();
    const { sweep } = this;
    byId("sweepproblem").textContent = [this.error, sweep?.problem, ...this.problems].filter((text) => text).join("\n");
    byId("sweepfacts").textContent = sweep ? this.facts(sweep) : "";
    if (!sweep) {
      byId("sweepcharts").replaceChildren();
      byId("trials").replaceChildren();
      return;
    }
    if (!this.curve) {
      this.curve = new Chart(`Best ${sweep.metric} so far, by steps trained in all trials`);
      byId("sweepcharts").replaceChildren(this.plot.element, this.curve.element);
    }
    this.plot.draw(sweep, width);
    this.drawCurve(sweep);
    this.drawTrials(sweep, focused);
  }

  drawNames() {
    byId("sweepname").textContent = this.name;
    byId("sweeps").hidden = this.names.length < 2;
    const select = byId("sweeps").querySelector("select");
    if ([...select.options].map((option) => option.value).join("\n") !== this.names.join("\n")) {
      select.replaceChildren(...this.names.map((name) => h("option", { value: name }, name)));
    }
    select.value = this.name;
  }

  facts({ begun, trial_count: count, running, failed, trials, best, metric, scheduler, steps }) {
    const top = trials.find((trial) => trial.trial === best);
    return [
      `${number(begun)} trials begun${scheduler === "pbt" ? ", with branches" : ` of ${number(count)}`}`, `${number(running)} running`, failed > 0 ? `${number(failed)} failed` : null,
      `scheduler ${scheduler}`, `${number(steps)} steps in a complete trial`,
      top ? `best: trial ${best}, ${metric} ${number(value(top.value))} after step ${number(top.step)}` : "no result yet",
    ].filter((fact) => fact).join(" · ");
  }

  drawCurve({ best_so_far: { steps, improvements } }) {
    const [x, y] = [[], []];
    const add = (at, result) => {
      x.push(at);
      y.push(result);
    };
    improvements.forEach(({ steps: at, value: result }, index) => {
      // The value stays until the next improvement.
      if (index > 0) add(at, value(improvements[index - 1].value));
      add(at, value(result));
    });
    const last = improvements.at(-1);
    if (last && steps > last.steps) add(steps, value(last.value));
    const label = last ? `trial ${last.trial}` : "";
    this.curve.draw([{ label, style: 0, points: { x, y, low: y, high: y } }], { smoothing: 0, axis: "step", logx: false, logy: false });
  }

  drawTrials(sweep, focused) {
    const active = document.activeElement?.dataset?.opens;
    const numbers = sweep.parameters.map((parameter) => !parameter.values);
    const head = ["Trial", "State", "Step", sweep.metric, ...sweep.parameters.map(({ name }) => name)];
    const isNumber = (at) => at === 2 || at === 3 || numbers[at - 4];
    const rows = sweep.trials.map((trial) => {
      const run = this.runs.get(trial.run);
      const title = `${trial.trial}${trial.trial === sweep.best ? " ★ best" : ""}`;
      const name = run ? h("button", { type: "button", "data-opens": trial.trial, title: `Show ${run.id}`, onclick: () => this.show(trial) }, title) : title;
      const values = sweep.parameters.map((_, at) => h("td", { class: numbers[at] ? "number" : "text" }, trial.values ? exact(trial.values[at]) : "unknown"));
      return h("tr", { class: run && run.id === focused ? "focused" : null, "data-state": trial.state },
        h("td", { class: trial.trial === sweep.best ? "trial best" : "trial" }, name), h("td", { class: trial.state === "failed" ? "text failed" : "text" }, this.state(trial, run)),
        h("td", { class: "number" }, this.step(trial, run)), h("td", { class: "number" }, number(value(trial.value))), values);
    });
    byId("trials").replaceChildren(
      h("caption", { class: "hidden" }, "The trials, the best first"),
      h("thead", {}, h("tr", {}, head.map((name, at) => h("th", { scope: "col", class: isNumber(at) ? "number" : null }, name)))), h("tbody", {}, rows));
    if (active) [...byId("trials").querySelectorAll("[data-opens]")].find((element) => element.dataset.opens === active)?.focus();
  }

  state(trial, run) {
    const more = [];
    if (trial.by) more.push(` by ${trial.by}`);
    if (trial.host && trial.state === "running") more.push(` on ${trial.host}`);
    if (trial.branch_of) more.push(`, branch of ${trial.branch_of}`);
    // A sweep that was killed cannot record that its trials have ended.
    if (trial.state === "running" && run && run.state !== "running") more.push(` (its run: ${run.state})`);
    if (trial.error) more.push(`: ${trial.error}`);
    return `${STATES[trial.state] ?? trial.state}${more.join("")}`;
  }

  step(trial, run) {
    if (trial.state !== "running") return number(trial.step);
    return `${number(Math.max(trial.step, run?.steps ?? 0))} of ${number(trial.to)}`;
  }
}
