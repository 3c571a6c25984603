// The table "what each rank holds": built once, then only changed cells are written.

// Wider texts wrap; large tables show short forms, and the full text is a hover away.
const WIDEST = 18;
const LARGE = 200;

class Table {
  constructor(story) {
    this.story = story;
    this.cells = new Map();
    const { picture } = story;
    const { slots, chunks } = picture;
    this.aligned = slots.every((mine) => mine.length === chunks.length);
    this.large = slots.reduce((sum, mine) => sum + mine.length, 0) > LARGE;
    this.table = make("table", { class: this.large ? "large" : null });
    if (this.large) {
      // All columns alike, so that the browser need not measure thousands of cells.
      this.table.style.setProperty("--wide", `${this.widest(() => true)}ch`);
      this.table.style.setProperty("--columns", Math.max(...slots.map((mine) => mine.length)));
    }
    if (this.aligned) this.table.append(make("thead", {}, this.header()));
    const rows = picture.ranks.map((name, rank) => this.row(name, rank));
    this.table.append(make("tbody", {}, ...rows));
    this.element = make(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "What each rank holds" },
      this.table,
    );
    for (const key of this.cells.keys()) this.write(key, 0);
  }

  header() {
    const { chunks, hues } = this.story.picture;
    const names = chunks.map((name, chunk) => {
      const cell = make("th", { scope: "col" }, make("span", { class: "chunk" }, name));
      if (!this.large) cell.style.setProperty("--own", `${this.widest((key) => key.endsWith(`-${chunk}`))}ch`);
      return tint(cell, hues[chunk]);
    });
    return make("tr", {}, make("th", { scope: "col" }, "rank"), ...names);
  }

  // The longest text these cells ever show, so that stepping never moves the columns.
  widest(among) {
    let most = 3;
    for (const [key, entries] of this.story.history) {
      if (!among(key)) continue;
      for (const { text, short } of entries) most = Math.max(most, (this.large ? short : text).length);
    }
    return Math.min(most, WIDEST) + 3;
  }

  row(name, rank) {
    const { slots, hues } = this.story.picture;
    let lines = 1;
    const cells = slots[rank].map((chunk) => {
      const key = `${rank}-${chunk}`;
      for (const { text } of this.story.entries(key)) lines = Math.max(lines, Math.ceil(text.length / WIDEST));
      const cell = tint(make("td", { "data-cell": key }), hues[chunk]);
      this.cells.set(key, cell);
      return cell;
    });
    const row = make("tr", {}, make("th", { scope: "row" }, name), ...cells);
    row.style.setProperty("--lines", this.large ? 1 : lines);
    return row;
  }

  write(key, number) {
    const cell = this.cells.get(key);
    const entry = this.story.at(key, number);
    cell.classList.toggle("done", entry !== null && entry.done);
    cell.classList.toggle("empty", entry === null);
    const text = entry ? entry.text : "";
    const shown = this.large && entry ? entry.short : text;
    cell.textContent = shown;
    if (!this.aligned) {
      const name = this.story.picture.chunks[Number(key.split("-")[1])];
      cell.dataset.name = text.startsWith(name) ? "" : name;
    }
    if (shown !== text) cell.title = text;
    else cell.removeAttribute("title");
  }

  show(number, from) {
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
