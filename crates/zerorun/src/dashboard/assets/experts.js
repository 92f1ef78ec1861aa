// The loads of the experts of a mixture: a map with a row for each block and a column for each expert.

import { h, number, s, utc } from "./dom.js";

const LEFT = 64;
const TOP = 18;
/** The width of a cell, and the width from which a cell has a number in it. */
const CELL = { least: 7, most: 46, withNumber: 34 };
/** The number of shades, and the darkest one. */
const LEVELS = 12;
const DARKEST = 0.6;

const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}%`;

/** The picture and the table of the newest loads. */
export class ExpertMap {
  constructor() {
    this.place = null;
    this.blocks = [];
    this.cell = null;
    this.facts = h("p", { class: "quiet" });
    this.problem = h("p", { class: "problem" });
    this.caption = h("figcaption", { "aria-live": "polite" });
    this.svg = s("svg", { tabindex: 0, role: "application" });
    this.cursor = s("rect", { class: "cellcursor", visibility: "hidden" });
    this.table = h("table", {});
    this.numbers = h("details", { ontoggle: () => this.drawTable() }, h("summary", {}, "Shares in numbers"), h("div", { class: "scroll" }, this.table));
    const legend = h("ul", {},
      h("li", {}, s("svg", { class: "swatch", width: 60, height: 14, "aria-hidden": "true" }, Array.from({ length: 6 }, (_, at) => s("rect", { class: "load", x: 10 * at, width: 10, height: 14, "fill-opacity": (DARKEST * (at + 1)) / 6 }))), h("span", {}, "share of a block's choices, from 0 to the largest")),
      h("li", {}, s("svg", { class: "swatch", width: 14, height: 14, "aria-hidden": "true" }, s("path", { class: "unused", d: "M2 2l10 10M12 2l-10 10" })), h("span", {}, "unused: no token chose this expert")));
    this.figure = h("figure", { id: "expertmap" }, h("h3", {}, "Choices of the routers, by block and expert"), legend, h("div", { class: "scroll" }, this.svg), this.caption);
    this.svg.addEventListener("pointermove", (event) => this.choose(this.cellAt(event)));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    this.svg.addEventListener("blur", () => this.choose(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  /** Draws the loads of a step into an element. */
  draw(place, loads) {
    if (place.firstChild !== this.problem) place.replaceChildren(this.problem, this.facts, this.figure, this.numbers);
    this.problem.textContent = loads?.problem ?? "";
    this.blocks = (loads?.blocks ?? []).map(({ block, choices }) => {
      const all = choices.reduce((sum, one) => sum + one, 0);
      return { block, choices, all, shares: choices.map((one) => (all > 0 ? one / all : 0)) };
    });
    const columns = Math.max(0, ...this.blocks.map(({ choices }) => choices.length));
    const isEmpty = this.blocks.length === 0 || columns === 0;
    for (const element of [this.facts, this.figure, this.numbers]) element.hidden = isEmpty;
    if (isEmpty) return;
    const unused = this.blocks.reduce((sum, { choices }) => sum + choices.filter((one) => one === 0).length, 0);
    const most = Math.max(...this.blocks.flatMap(({ shares }) => shares));
    const top = this.blocks.find(({ shares }) => shares.includes(most));
    const summary = `After step ${number(loads.step)}: ${number(this.blocks.length)} ${this.blocks.length === 1 ? "block" : "blocks"}, up to ${number(columns)} experts in each, ${number(unused)} of all experts unused; the largest share is ${percent(most)} (block ${top.block}, expert ${top.shares.indexOf(most)}).`;
    this.facts.textContent = `${summary} Recorded at ${utc(loads.time)} UTC.`;
    this.svg.setAttribute("aria-label", `Loads of the experts. ${summary} Arrow keys move through the cells. The table below has the same numbers.`);
    this.drawMap(place.clientWidth, columns, most);
    this.drawTable();
    this.choose(this.cell);
  }

  drawMap(place, columns, most) {
    const width = Math.min(CELL.most, Math.max(CELL.least, Math.floor((place - LEFT - 30) / columns)));
    const height = this.blocks.length <= 24 ? 20 : 12;
    this.size = { width, height, columns };
    const full = [LEFT + columns * width + 4, TOP + this.blocks.length * height + 4];
    this.svg.setAttribute("width", full[0]);
    this.svg.setAttribute("height", full[1]);
    this.svg.setAttribute("viewBox", `0 0 ${full[0]} ${full[1]}`);
    // The cells of a shade are one path, because a mixture may have thousands of experts.
    const shades = Array.from({ length: LEVELS }, () => "");
    let unused = "";
    const texts = [];
    this.blocks.forEach(({ block, choices, shares }, row) => {
      const y = TOP + row * height;
      texts.push(s("text", { x: LEFT - 6, y: y + height / 2 + 4, "text-anchor": "end" }, `block ${block}`));
      shares.forEach((share, column) => {
        const x = LEFT + column * width;
        if (choices[column] === 0) unused += `M${x + 2} ${y + 2}L${x + width - 3} ${y + height - 3}M${x + width - 3} ${y + 2}L${x + 2} ${y + height - 3}`;
        else shades[Math.min(LEVELS - 1, Math.floor((LEVELS * share) / most))] += `M${x} ${y}h${width - 1}v${height - 1}h${1 - width}z`;
        if (choices[column] > 0 && width >= CELL.withNumber) texts.push(s("text", { class: "loadtext", x: x + width / 2, y: y + height / 2 + 4, "text-anchor": "middle" }, percent(share)));
      });
    });
    const every = Math.max(1, Math.ceil(30 / width));
    for (let column = 0; column < columns; column += every) texts.push(s("text", { x: LEFT + (column + 0.5) * width, y: TOP - 6, "text-anchor": "middle" }, String(column)));
    const cells = shades.map((d, level) => s("path", { class: "load", d, "fill-opacity": ((DARKEST * (level + 1)) / LEVELS).toFixed(3) }));
    this.svg.replaceChildren(...cells, s("path", { class: "unused", d: unused }), ...texts, this.cursor);
  }

  /** Draws the table if it is open. */
  drawTable() {
    if (!this.numbers.open) return;
    const scroll = this.table.parentElement;
    const [left, top] = [scroll.scrollLeft, scroll.scrollTop];
    const columns = Array.from({ length: this.size.columns }, (_, at) => at);
    const row = ({ block, choices, shares, all }) => h("tr", {}, h("th", { scope: "row" }, `block ${block}`), h("td", { class: "number" }, number(all)),
      columns.map((at) => h("td", { class: "number" }, at >= choices.length ? "" : choices[at] === 0 ? "✕ unused" : percent(shares[at]))));
    this.table.replaceChildren(
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Block"), h("th", { scope: "col", class: "number" }, "Choices"), columns.map((at) => h("th", { scope: "col", class: "number" }, `expert ${at}`)))),
      h("tbody", {}, this.blocks.map(row)));
    [scroll.scrollLeft, scroll.scrollTop] = [left, top];
  }

  cellAt(event) {
    const box = this.svg.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - LEFT) / this.size.width);
    const row = Math.floor((event.clientY - box.top - TOP) / this.size.height);
    return this.blocks[row]?.choices[column] === undefined ? null : { row, column };
  }

  key(event) {
    const { row, column } = this.cell ?? { row: 0, column: 0 };
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -Infinity], End: [0, Infinity] };
    const move = moves[event.key];
    if (!move || this.blocks.length === 0) return;
    event.preventDefault();
    // The first key shows the first cell.
    const [down, right] = this.cell || move[1] === Infinity ? move : [0, 0];
    const to = Math.min(this.blocks.length - 1, Math.max(0, row + down));
    this.choose({ row: to, column: Math.min(this.blocks[to].choices.length - 1, Math.max(0, column + right)) });
  }

  /** Marks a cell and describes it, or none. */
  choose(cell) {
    const found = cell && this.blocks[cell.row]?.choices[cell.column] !== undefined;
    this.cell = found ? cell : null;
    this.cursor.setAttribute("visibility", found ? "visible" : "hidden");
    if (!found) {
      this.caption.textContent = "";
      return;
    }
    const { width, height } = this.size;
    const at = { x: LEFT + cell.column * width - 1, y: TOP + cell.row * height - 1, width: width + 1, height: height + 1 };
    for (const [name, number] of Object.entries(at)) this.cursor.setAttribute(name, number);
    const { block, choices, shares, all } = this.blocks[cell.row];
    const own = choices[cell.column];
    const share = own === 0 ? "unused, no token chose it" : `${percent(shares[cell.column])} of the choices (${number(own)} of ${number(all)})`;
    this.caption.textContent = `Block ${block}, expert ${cell.column}: ${share}; an equal share is ${percent(1 / choices.length)}.`;
  }
}
