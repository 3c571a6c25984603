// One strategy: its ranks as cards, a rail on which things travel, and lanes of time below.

import { calm, draw, make, tint } from "./kit.js";
import { TimeLanes } from "./training-lanes.js";

const PARTS = ["parameters", "gradients", "optimizer"];
const HELD = [...PARTS, "transient"];
const LEAST = 140, MOST = 340; // of a card's width
const GAP = 14, RAIL = 58, PAD = 12, EDGE = 10;
const CELL = 13, BETWEEN = 4, HEAD = 34, NAMES = 22, FOOT = 56, SENT = 17;

const hueOf = (rank, ranks) => (250 + Math.floor((rank * 360) / ranks)) % 360;
const text = (x, y, words, kind = "") => draw("text", { x, y, class: kind }, words);

// The width that words take, roughly: Chinese ones are square.
const wide = (words, size = 12) => [...words].reduce((sum, one) => sum + (one > "\u2e80" ? 1 : 0.56), 0) * size;

class TrainingPanel {
  constructor(step, tools, { scale, index, jump }) {
    Object.assign(this, { step, tools, scale, index, number: 0, ms: 0, width: 0 });
    const { t } = tools;
    this.served = step.server !== null;
    this.title = make("h3", { class: "moment" });
    this.words = make("p", { class: "words" });
    this.stage = draw("svg", { class: "ranks", role: "img" });
    this.lanes = new TimeLanes(step, tools, scale.ms, jump);
    this.element = make("section", { class: "strategy", "aria-label": `${step.name} · ${step.precision}` },
      make("h2", {}, step.name, make("span", { class: "precision" }, step.precision),
        make("small", {}, t("model about", { n: step.units.length, params: step.parameters_text }))),
      this.costs(), make("div", { class: "told", "aria-live": "polite" }, this.title, this.words), this.stage, this.lanes.element);
    this.stage.setAttribute("aria-label", t("lanes"));
  }

  costs() {
    const { step, tools: { t } } = this, last = step.frames.at(-1);
    const most = (all) => last.sent_text[all.indexOf(Math.max(...all))];
    const facts = [
      [t(/^ps-/.test(step.strategy) ? "the steps take" : "step takes"), step.seconds],
      [t("most waited"), step.most_waited], [t("most sent"), most(last.sent)], [t("peak"), step.peak_text],
    ];
    return make("dl", { class: "costs" }, ...facts.map(([name, said]) => make("div", {}, make("dt", {}, name), make("dd", {}, said))));
  }

  get cards() {
    return this.step.ranks + this.served;
  }

  // Lay out for the room there is.
  fit() {
    const width = Math.floor(this.element.clientWidth);
    if (width === this.width || width < 50) return;
    this.width = width;
    const room = width - 2 * EDGE;
    const most = Math.max(1, Math.floor((room + GAP) / (LEAST + GAP)));
    this.rows = Math.ceil(this.cards / most);
    this.columns = Math.ceil(this.cards / this.rows);
    this.card = Math.min(MOST, (room - GAP * (this.columns - 1)) / this.columns);
    this.left = EDGE + (room - this.card * this.columns - GAP * (this.columns - 1)) / 2;
    this.narrow = this.card < 210; // what was sent has a line of its own there
    this.foot = FOOT + (this.narrow ? SENT : 0);
    this.tall = HEAD + NAMES + this.step.units.length * (CELL + BETWEEN) + this.foot;
    this.build();
    this.lanes.fit(width);
    this.show(this.number, this.ms);
  }

  place(card) {
    const row = Math.floor(card / this.columns);
    const top = row * (RAIL + this.tall + GAP) + RAIL;
    return { x: this.left + (card % this.columns) * (this.card + GAP), top, rail: top - 22 };
  }

  cardOf(rank) {
    return rank + this.served;
  }

  build() {
    const { step, stage, width } = this, height = this.rows * (RAIL + this.tall + GAP) - GAP + 4;
    stage.setAttribute("viewBox", `0 0 ${width} ${height}`);
    stage.setAttribute("width", width);
    stage.setAttribute("height", height);
    this.label = text(this.left, 18, "", "travels");
    this.rails = draw("g", { class: "rail" });
    this.flying = draw("g", { class: "flying" });
    this.drawn = Array.from({ length: step.ranks }, (_, rank) => this.rank(rank));
    stage.replaceChildren(this.patterns(), this.rails, ...(this.served ? [this.server()] : []), ...this.drawn.map((one) => one.element), this.label, this.flying);
  }

  patterns() {
    const { step, index } = this;
    return draw("defs", {}, ...Array.from({ length: step.ranks }, (_, rank) => tint(
      draw("pattern", { id: `own-${index}-${rank}`, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        draw("rect", { class: "hatched", width: 5, height: 5 }), draw("path", { class: "hatch", d: "M0 0V5", "stroke-width": 3.4 })), hueOf(rank, step.ranks))));
  }

  sheet(card, name, hue) {
    const { x, top } = this.place(card);
    const dot = hue === null ? [] : [tint(draw("circle", { class: "dot", cx: x + PAD + 5, cy: top + 18, r: 5 }), hue)];
    const element = draw("g", {}, draw("rect", { class: "sheet", x, y: top, width: this.card, height: this.tall, rx: 10 }),
      ...dot, text(x + PAD + (dot.length ? 16 : 0), top + 22, name, "name"));
    return { element, x, top };
  }

  server() {
    const { t } = this.tools, { ranks } = this.step;
    const { element, x, top } = this.sheet(0, t(this.card > 190 ? "server at" : "server"), null);
    const middle = x + this.card / 2;
    this.version = text(middle, top + HEAD + 34, "", "version");
    const size = Math.min(22, (this.card - 2 * PAD) / ranks - 4);
    const from = middle - (ranks * (size + 4) - 4) / 2;
    this.inbox = Array.from({ length: ranks }, (_, rank) => tint(
      draw("rect", { class: "inbox", x: from + rank * (size + 4), y: top + HEAD + 48, width: size, height: size, rx: 4 }), hueOf(rank, ranks)));
    element.append(...(this.step.strategy === "ps" ? this.inbox : [this.version]));
    return element;
  }

  rank(rank) {
    const { step, tools: { t } } = this, hue = hueOf(rank, step.ranks);
    const { element, x, top } = this.sheet(this.cardOf(rank), t("rank", { n: rank }), hue);
    const inner = this.card - 2 * PAD, numbers = 14, column = (inner - numbers - 2 * 8) / 3;
    const doing = draw("text", { x: x + this.card - PAD, y: top + 22, class: "doing", "text-anchor": "end" });
    element.append(doing);
    const cells = PARTS.map((part, place) => {
      const at = x + PAD + numbers + place * (column + 8);
      const named = t(part);
      element.append(draw("rect", { class: `swatch ${part}`, x: at, y: top + HEAD + 13, width: column, height: 3, rx: 1.5 }));
      element.append(text(at, top + HEAD + 9, wide(named, 11) <= column + 5 ? named : t(`short ${part}`), "part"));
      return step.units.map((_, unit) => this.cell(element, rank, at, top + HEAD + NAMES + unit * (CELL + BETWEEN), column));
    });
    step.units.forEach((_, unit) => element.append(text(x + PAD, top + HEAD + NAMES + unit * (CELL + BETWEEN) + 10.5, String(unit + 1), "unit")));
    const y = top + this.tall - this.foot + 10;
    const bars = HELD.map((part) => draw("rect", { class: `held ${part}`, y, height: 12 }));
    const total = draw("text", { x: x + PAD, y: y + 30, class: "total" });
    const sent = this.narrow ? text(x + PAD, y + 30 + SENT, "", "sent")
      : draw("text", { x: x + this.card - PAD, y: y + 30, class: "sent", "text-anchor": "end" });
    const title = draw("title");
    element.prepend(title);
    element.append(draw("rect", { class: "room", x: x + PAD, y, width: inner, height: 12, rx: 3 }), ...bars, total, sent);
    return { element, cells, bars, total, sent, doing, title, x: x + PAD, inner };
  }

  cell(element, rank, x, y, width) {
    const { step, index } = this, count = step.frames[0].cells[0][0][0].length, each = width / count;
    const slices = Array.from({ length: count }, (_, shard) => {
      const slice = draw("rect", { x: x + shard * each, y, width: each, height: CELL });
      return tint(slice, hueOf(count > 1 ? shard : rank, step.ranks));
    });
    const frame = draw("rect", { class: "cell", x, y, width, height: CELL, rx: 2 });
    element.append(...slices, frame);
    return { frame, slices, own: `url(#own-${index}-${rank})`, plain: count === 1 && step.ranks > 1 ? " plain" : "" };
  }

  // Show a moment; `ms` is what the clock says, which may be later than its begin.
  show(number, ms) {
    const changed = number !== this.number;
    Object.assign(this, { number, ms });
    const { step, tools: { t } } = this, frame = step.frames[number];
    this.title.textContent = frame.title;
    this.words.textContent = frame.words;
    if (!this.drawn) return;
    this.lanes.show(frame, step.frames[number + 1]?.at ?? frame.at, ms);
    this.drawn.forEach((one, rank) => {
      const takesPart = ({ kind, pairs }) => pairs.some(([src, dst]) => (src === rank && kind !== "pull") || (dst === rank && kind !== "push"));
      const moving = (part, unit) => frame.moves.some((move) => move.part === part && move.units.includes(unit) && takesPart(move));
      one.cells.forEach((column, part) => column.forEach((cell, unit) => paint(cell, frame.cells[rank][part][unit], moving(PARTS[part], unit))));
      let at = one.x;
      one.bars.forEach((bar, part) => {
        const length = (frame.memory[rank][part] / this.scale.peak) * one.inner;
        bar.setAttribute("x", at);
        bar.setAttribute("width", length);
        at += length;
      });
      one.total.textContent = frame.total[rank];
      one.sent.textContent = t("sent", { bytes: frame.sent_text[rank] });
      const version = frame.versions[rank];
      one.doing.textContent = version === undefined ? "" : t("version", { n: version });
      one.title.textContent = t("card", { rank: t("rank", { n: rank }), held: frame.total[rank], sent: t("sent", { bytes: frame.sent_text[rank] }) });
    });
    if (this.served) {
      const version = frame.versions["-1"];
      this.version.textContent = version === undefined ? "" : t("version", { n: version });
      this.inbox.forEach((one, rank) => one.classList.toggle("full", frame.inbox.includes(rank)));
    }
    this.travel(frame.moves, changed);
  }

  // The rail: who sends and who receives now.
  travel(moves, changed) {
    const { t } = this.tools, pairs = moves.flatMap((move) => move.pairs.map(([src, dst]) => this.between(move, src, dst)));
    const [out, into] = [new Set(pairs.map(([src]) => src)), new Set(pairs.map(([, dst]) => dst))];
    this.label.textContent = moves.map((move) => t("moves", { what: t(move.kind), bytes: move.text })).join("   ");
    const parts = [];
    for (let row = 0; row < this.rows; row++) {
      const first = this.place(row * this.columns), last = this.place(Math.min((row + 1) * this.columns, this.cards) - 1);
      const busy = moves.length ? "line busy" : "line";
      parts.push(draw("path", { class: busy, d: `M${this.rows > 1 ? 4 : first.x + this.card / 2} ${first.rail}H${last.x + this.card / 2 + (moves.length ? 8 : 0)}` }));
      if (row) parts.push(draw("path", { class: busy, d: `M4 ${this.place((row - 1) * this.columns).rail}V${first.rail}` }));
    }
    for (let card = 0; card < this.cards; card++) {
      const { x, top, rail } = this.place(card), middle = x + this.card / 2, rank = card - this.served;
      const both = out.has(card) && into.has(card) ? 7 : 0;
      const hue = rank < 0 ? null : hueOf(rank, this.step.ranks);
      const port = (at, up) => {
        const arrow = draw("g", { class: "port" }, draw("path", { class: "stem", d: up ? `M${at} ${top}V${rail + 7}` : `M${at} ${rail}V${top - 8}` }),
          draw("path", { class: "head", d: up ? `M${at - 5} ${rail + 9}h10l-5 -9z` : `M${at - 5} ${top - 9}h10l-5 9z` }));
        return hue === null ? arrow : tint(arrow, hue);
      };
      if (out.has(card)) parts.push(port(middle - both, true));
      if (into.has(card)) parts.push(port(middle + both, false));
      if (!out.has(card) && !into.has(card)) parts.push(draw("path", { class: "line", d: `M${middle} ${top}V${rail}` }));
    }
    this.rails.replaceChildren(...parts);
    this.flying.replaceChildren();
    if (changed && !calm()) for (const [src, dst] of pairs) this.fly(src, dst);
  }

  // From card to card; pushes go to the server's, pulls come from there.
  between(move, src, dst) {
    if (!this.served) return [src, dst];
    return move.kind === "push" ? [this.cardOf(src), 0] : [0, this.cardOf(dst)];
  }

  fly(src, dst) {
    const from = this.place(src), to = this.place(dst), half = this.card / 2;
    const points = [[from.x + half, from.top], [from.x + half, from.rail]];
    if (from.rail !== to.rail) points.push([4, from.rail], [4, to.rail]);
    points.push([to.x + half, to.rail], [to.x + half, to.top]);
    const rank = this.served ? Math.max(src, dst) - 1 : src;
    const dot = tint(draw("circle", { class: "packet", r: 4.5 }), hueOf(rank, this.step.ranks));
    this.flying.append(dot);
    const flight = dot.animate(points.map(([x, y]) => ({ transform: `translate(${x}px, ${y}px)` })), { duration: 1100, easing: "ease-in-out" });
    flight.onfinish = () => dot.remove();
  }
}

// 0 nothing, 1 the rank's own gradient, 2 what all share, 3 the same after the update.
function paint({ frame, slices, own, plain }, cell, moving) {
  slices.forEach((slice, shard) => {
    const code = cell[shard];
    slice.setAttribute("class", `slice c${code}${plain}`);
    slice.style.fill = code === "1" ? own : "";
  });
  frame.setAttribute("class", moving ? "cell moving" : "cell");
}

function legend({ t }, steps) {
  const sample = (kind, hue, fill = "") => {
    const slice = tint(draw("rect", { class: `slice ${kind}`, x: 1, y: 4, width: 22, height: 14 }), hue);
    if (fill) slice.style.fill = fill;
    return draw("svg", { viewBox: "0 0 24 22", "aria-hidden": "true" }, slice, draw("rect", { class: "cell", x: 1, y: 4, width: 22, height: 14, rx: 2 }));
  };
  const lane = (kind) => draw("svg", { viewBox: "0 0 24 22", "aria-hidden": "true" }, draw("rect", { class: `span ${kind}`, x: 1, y: 5, width: 22, height: 12, rx: 2 }));
  const divided = steps.some(({ strategy }) => strategy.startsWith("zero"));
  const items = [
    [sample("c1", 250, "url(#own-0-0)"), t("own")], [sample("c2 plain", 250), t("there")],
    ...(divided ? [[sample("c2", 340), t("owned")]] : []), [sample(divided ? "c3" : "c3 plain", 340), t("new")],
    ...["forward", "backward", "step", "network", "wait"].map((kind) => [lane(kind), t(kind)]),
    ...HELD.slice(3).map((part) => [draw("svg", { viewBox: "0 0 24 22", "aria-hidden": "true" }, draw("rect", { class: `held ${part}`, x: 1, y: 5, width: 22, height: 12 })), t(part)]),
  ];
  return make("ul", { class: "legend", "aria-label": t("legend") }, ...items.map(([sign, said]) => make("li", {}, sign, said)));
}

export { TrainingPanel, legend };
