// The table "what each rank holds": built once, then only changed cells are written.

import { make, tint } from "./kit.js";
import { say } from "./words.js";

// Wider texts wrap, sooner where there are many columns; tables that don't fit show short forms,
// and the full text is a hover away.
const WIDEST = 18;
const WIDEST_OF_FEW = 72;
const LARGE = 200;

// How a cell is told, from all to least: a0+a1+a2, a0…2, 3/8.
const FORMS = [
  (entry) => entry.text,
  (entry) => entry.short,
  (entry, size) => (entry.ranks.length > 1 ? `${new Set(entry.ranks).size}/${size}` : entry.short),
];

// The lines that a sum takes when it is broken after + only.
function linesOf(text, widest) {
  let lines = 1, room = widest;
  for (const term of text.split(/(?<=\+)/)) {
    if (term.length > room && room < widest) [lines, room] = [lines + 1, widest];
    lines += Math.floor((term.length - 1) / widest);
    room -= ((term.length - 1) % widest) + 1;
  }
  return lines;
}

class Table {
  constructor(story) {
    this.story = story;
    this.cells = new Map();
    const { picture } = story;
    const { slots, chunks } = picture;
    this.aligned = slots.every((mine) => mine.length === chunks.length);
    this.large = slots.reduce((sum, mine) => sum + mine.length, 0) > LARGE;
    this.form = this.large ? 1 : 0;
    this.number = 0;
    this.wide = chunks.length <= 2 ? WIDEST_OF_FEW : WIDEST;
    this.table = make("table", { class: this.large ? "large" : null });
    if (this.large) {
      // All columns alike, so that the browser need not measure thousands of cells.
      this.table.style.setProperty("--wide", `${this.widest(() => true)}ch`);
      this.table.style.setProperty("--columns", Math.max(...slots.map((mine) => mine.length)));
    }
    this.table.style.setProperty("--most", `${this.wide}ch`);
    this.columns = [];
    if (this.aligned) this.table.append(make("thead", {}, this.header()));
    this.rows = picture.ranks.map((name, rank) => this.row(name, rank));
    this.table.append(make("tbody", {}, ...this.rows));
    this.element = make(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": say("what each holds") },
      this.table,
    );
    for (const key of this.cells.keys()) this.write(key, 0);
  }

  header() {
    const { chunks, hues } = this.story.picture;
    const names = chunks.map((name, chunk) => {
      const cell = make("th", { scope: "col" }, make("span", { class: "chunk" }, name));
      this.columns.push([cell, chunk]);
      return tint(cell, hues[chunk]);
    });
    return make("tr", {}, make("th", { scope: "col" }, say("rank")), ...names);
  }

  // The longest text these cells ever show, so that stepping never moves the columns.
  widest(among) {
    let most = 3;
    for (const [key, entries] of this.story.history) {
      if (!among(key)) continue;
      for (const entry of entries) most = Math.max(most, this.told(entry).length);
    }
    return Math.min(most, this.wide) + (this.form ? 1 : 3);
  }

  told(entry) {
    return FORMS[this.form](entry, this.story.size);
  }

  // Tell as much as the room allows; called when the window changes.
  fit() {
    if (this.large) return;
    for (const form of FORMS.keys()) {
      this.form = form;
      this.table.classList.toggle("tight", form > 0);
      for (const [cell, chunk] of this.columns) {
        cell.style.setProperty("--own", `${this.widest((key) => key.endsWith(`-${chunk}`))}ch`);
      }
      for (const [rank, row] of this.rows.entries()) {
        const texts = this.story.picture.slots[rank].flatMap((chunk) => this.story.entries(`${rank}-${chunk}`));
        row.style.setProperty("--lines", Math.max(1, ...texts.map((entry) => linesOf(this.told(entry), this.wide))));
      }
      for (const key of this.cells.keys()) this.write(key, this.number);
      if (this.element.scrollWidth <= this.element.clientWidth) return;
    }
  }

  row(name, rank) {
    const { slots, hues } = this.story.picture;
    const cells = slots[rank].map((chunk) => {
      const key = `${rank}-${chunk}`;
      const cell = tint(make("td", { "data-cell": key }), hues[chunk]);
      this.cells.set(key, cell);
      return cell;
    });
    return make("tr", {}, make("th", { scope: "row" }, name), ...cells);
  }

  write(key, number) {
    const cell = this.cells.get(key);
    const entry = this.story.at(key, number);
    cell.classList.toggle("done", entry !== null && entry.done);
    cell.classList.toggle("empty", entry === null);
    const text = entry ? entry.text : "";
    const shown = entry ? this.told(entry) : "";
    // A sum may be broken after +, never inside a name.
    const terms = shown.split(/(?<=\+)/);
    cell.replaceChildren(...terms.flatMap((term, at) => (at ? [make("wbr"), term] : [term])));
    if (!this.aligned) {
      const name = this.story.picture.chunks[Number(key.split("-")[1])];
      cell.dataset.name = text.startsWith(name) ? "" : name;
    }
    if (shown !== text) cell.title = text;
    else cell.removeAttribute("title");
  }

  show(number, from) {
    this.number = number;
    for (const key of this.story.between(number, from)) this.write(key, number);
    for (const cell of this.table.querySelectorAll(".changed, .bad")) cell.classList.remove("changed", "bad");
    for (const key of this.story.changed(number)) this.cells.get(key).classList.add("changed");
    for (const { key } of this.story.failures.get(number) || []) this.cells.get(key)?.classList.add("bad");
  }

  emphasize(message) {
    for (const cell of this.table.querySelectorAll(".hot")) cell.classList.remove("hot");
    if (message === null) return;
    const [src, dst, parts] = message;
    for (const [chunk] of parts) {
      for (const rank of [src, dst]) this.cells.get(`${rank}-${chunk}`)?.classList.add("hot");
    }
  }
}

export { Table };
