// The picture: ranks as cards, chunks as cells that fill up, messages as arrows.

import { calm, draw, tint } from "./kit.js";
import { say } from "./words.js";
import { opOf, shorten } from "./story.js";
import { LETTER, TINY } from "./layout.js";
import { arrange } from "./shapes.js";
import { arc, beside, num } from "./arrows.js";

// More arrows than this are drawn thin and unlabelled, and nothing moves along them.
const MANY = 80;

// More labels than this only hide the arrows; the list beside the picture says it all.
const LABELLED = 40;

class Stage {
  constructor(story, onEmphasis) {
    this.story = story;
    this.onEmphasis = onEmphasis;
    this.number = 0;
    this.svg = draw("svg", { class: "stage", role: "img", "aria-label": story.picture.title });
  }

  // Draw everything anew for a width; called when the window changes, not when stepping.
  build(width) {
    this.width = width;
    this.layout = arrange(this.story, width);
    this.spots = new Map();
    this.lines = draw("g", { class: "lines" });
    this.labels = draw("g", { class: "labels" });
    const cards = this.layout.stations.map((station) => this.card(station));
    this.svg.replaceChildren(
      ...this.ground(), this.lines, draw("g", { class: "cards" }, ...cards), this.labels,
    );
    for (const key of this.spots.keys()) this.paint(key, this.number);
    this.mark(this.number);
    this.arrows(this.number, false);
  }

  // Show in a box at least as high as needed, so that pictures side by side end together.
  frame(width, height) {
    const over = Math.max(0, height - this.layout.height);
    this.svg.setAttribute("viewBox", `0 ${num(-over / 2)} ${width} ${num(this.layout.height + over)}`);
  }

  // What stands still behind it all: the boxes of hosts, the branches of trees.
  *ground() {
    const { boxes = [], edges = [] } = this.layout;
    for (const { x, y, width, height, name } of boxes) {
      yield draw("g", { class: "host" },
        draw("rect", { x: num(x), y: num(y), width: num(width), height: num(height), rx: 12 }),
        draw("text", { x: num(x + 12), y: num(y + 17) }, shorten(name, 24)));
    }
    for (const [from, to] of edges) {
      yield draw("path", { class: "branch", d: `M${num(from.x)} ${num(from.y)}L${num(to.x)} ${num(to.y)}` });
    }
  }

  card({ x, y, rank, slots }) {
    const { card } = this.layout;
    const name = this.story.picture.ranks[rank];
    const group = draw("g", {
      class: "card",
      transform: `translate(${num(x - card.width / 2)} ${num(y - card.height / 2)})`,
    });
    group.append(
      draw("rect", { class: "sheet", width: num(card.width), height: num(card.height), rx: Math.min(10, card.pad + 2) }),
      draw("text", { x: num(card.width / 2), y: card.pad + card.font * 0.82, "font-size": card.font }, shorten(name, 14)),
    );
    slots.forEach((chunk, slot) => group.append(this.spot(rank, chunk, slot)));
    return group;
  }

  spot(rank, chunk, slot) {
    const { card } = this.layout;
    const { cell, gap } = card;
    const x = card.pad + card.inset + (slot % card.columns) * (cell + gap);
    const y = card.top + Math.floor(slot / card.columns) * (cell + gap);
    const key = `${rank}-${chunk}`;
    const spot = cell < TINY
      ? draw("rect", { class: "grain", "data-spot": key, x: num(x), y: num(y), width: cell, height: cell })
      : this.cell(key, chunk, x, y);
    this.spots.set(key, tint(spot, this.story.picture.hues[chunk]));
    return spot;
  }

  cell(key, chunk, x, y) {
    const { cell } = this.layout.card;
    const group = draw("g", { class: "spot", "data-spot": key, transform: `translate(${num(x)} ${num(y)})` });
    group.append(
      draw("rect", { class: "base", width: cell, height: cell, rx: cell >= LETTER ? 4 : 2 }),
      draw("path", { class: "fill" }),
    );
    if (cell >= LETTER) {
      const { chunks, adds } = this.story.picture;
      const letter = shorten(chunks[chunk], 7);
      const font = Math.min(15, cell * 0.5, (cell - 3) / (0.62 * letter.length));
      const y = num(cell * (adds ? 0.32 : 0.5));
      if (font >= 5) group.append(draw("text", { x: cell / 2, y, dy: "0.35em", "font-size": num(font) }, letter));
    }
    return group;
  }

  paint(key, number) {
    const spot = this.spots.get(key);
    const entry = this.story.at(key, number);
    spot.classList.toggle("empty", entry === null);
    spot.classList.toggle("done", entry !== null && entry.done);
    if (this.layout.card.cell < TINY) {
      const share = entry === null ? 1 : entry.done ? 1 : 0.15 + (0.6 * entry.ranks.length) / this.story.size;
      spot.setAttribute("fill-opacity", num(100 * share) / 100);
    } else {
      spot.querySelector(".fill").setAttribute("d", entry ? this.bars(entry) : "");
    }
  }

  // Bars thinner than this say nothing; one bar for the share then says more.
  get gauges() {
    return this.layout.card.cell / this.story.size < 4.5;
  }

  get signs() {
    if (!this.story.picture.adds || this.layout.card.cell < TINY) return "";
    return this.gauges ? "gauge" : "bars";
  }

  // One bar per contributing rank, or one for the share of all that are in.
  bars({ ranks, done }) {
    if (!this.story.picture.adds && !done) return "";
    const { cell } = this.layout.card;
    const edge = cell >= LETTER ? 1.5 : 0;
    const inner = cell - 2 * edge, wide = inner / this.story.size;
    const present = new Set(ranks);
    if (done) return `M${edge} ${edge}h${inner}v${inner}h${-inner}z`;
    // Under the letter, where there is one.
    const room = cell >= LETTER ? inner * 0.45 : inner;
    if (this.gauges) {
      const share = num(Math.max(1.5, inner * present.size / this.story.size));
      return `M${edge} ${num(cell - edge - room)}h${share}v${num(room)}h${-share}z`;
    }
    const thick = num(wide > 3 ? wide - 0.8 : wide), tall = num(room), y = num(cell - edge - room);
    return [...present].map((rank) => `M${num(edge + rank * wide)} ${y}h${thick}v${tall}h${-thick}z`).join("");
  }

  mark(number) {
    for (const spot of this.svg.querySelectorAll(".changed, .bad")) spot.classList.remove("changed", "bad");
    for (const key of this.story.changed(number)) this.spots.get(key).classList.add("changed");
    for (const { key } of this.story.failures.get(number) || []) this.spots.get(key)?.classList.add("bad");
  }

  show(number, from) {
    for (const key of this.story.between(number, from)) this.paint(key, number);
    this.number = number;
    this.mark(number);
    const moving = number === from + 1 && !calm();
    this.arrows(number, moving && this.story.messages(number).length <= MANY);
  }

  arrows(number, moving) {
    const messages = this.story.messages(number);
    this.svg.classList.toggle("crowded", messages.length > MANY);
    this.pairs = new Set(messages.map(([src, dst]) => `${src}-${dst}`));
    this.drawn = messages.flatMap(([src, dst, parts], index) =>
      this.ways(src, dst, parts).map((way) => this.arrow([src, dst, way], index, messages.length)));
    this.lines.replaceChildren(...this.drawn.map(({ group }) => group));
    this.labels.replaceChildren(...this.drawn.flatMap(({ label }) => (label ? [label] : [])));
    if (moving) this.travel(number);
  }

  // A message is one arrow, or one in each tree that its chunks travel along.
  ways(src, dst, parts) {
    const found = new Map();
    for (const part of parts) {
      const { tree } = this.station(src, part[0]);
      if (!found.has(tree)) found.set(tree, []);
      found.get(tree).push(part);
    }
    return [...found.values()];
  }

  station(rank, chunk) {
    const { where } = this.layout;
    return where.get(`${rank}-${chunk}`) || where.get(rank);
  }

  arrow([src, dst, parts], index, count) {
    const { card, edges } = this.layout;
    const [from, to] = [src, dst].map((rank) => this.station(rank, parts[0][0]));
    const apart = Math.abs(src - dst);
    const near = Boolean(edges) || Boolean(from.grid) || apart === 1 || apart === this.story.size - 1;
    const bothWays = this.pairs.has(`${dst}-${src}`);
    const center = { x: this.width / 2, y: this.layout.height / 2 };
    const curve = arc(from, to, card, near || bothWays ? null : center);
    const op = opOf(parts);
    const group = draw("g", { class: `arrow ${op}`, "data-message": index });
    if (parts.length === 1) tint(group, this.story.picture.hues[parts[0][0]]).classList.add("tinted");
    const { end, via } = curve;
    const turn = (Math.atan2(end.y - via.y, end.x - via.x) * 180) / Math.PI;
    const head = count > MANY || card.cell < 8 ? "M-5 -2.5L0 0L-5 2.5z" : "M-10 -5.5L1 0L-10 5.5z";
    group.append(
      draw("path", { class: "reach", d: curve.d }),
      draw("path", { class: "line", d: curve.d }),
      draw("path", { class: "head", d: head, transform: `translate(${num(end.x)} ${num(end.y)}) rotate(${num(turn)})` }),
    );
    const label = count > LABELLED || card.cell < 10 ? null : this.label(parts, op, curve, index, near);
    this.listen(group, index);
    if (label) this.listen(label, index);
    return { group, label, curve, parts };
  }

  label(parts, op, curve, index, near) {
    const { chunks, hues } = this.story.picture;
    const { start, end } = curve;
    const room = Math.hypot(end.x - start.x, end.y - start.y) - 40;
    const spelled = parts.map(([chunk]) => chunks[chunk]).join(" ");
    const counted = room < 76 ? `${parts.length}×` : say("chunks", { n: parts.length });
    const names = parts.length <= 3 && (parts.length === 1 || spelled.length * 7 + 10 < room) ? spelled : counted;
    const text = op === "copy" ? names : `+${names}`;
    const { x, y } = beside(curve, near);
    const wide = text.length * 7 + 10;
    const group = draw("g", { class: `label ${op}`, "data-message": index, transform: `translate(${num(x)} ${num(y)})` });
    if (parts.length === 1) tint(group, hues[parts[0][0]]).classList.add("tinted");
    group.append(
      draw("rect", { x: -wide / 2, y: -9, width: wide, height: 18, rx: 9 }),
      draw("text", { dy: "0.35em" }, text),
    );
    return group;
  }

  listen(element, index) {
    for (const [event, value] of [["pointerenter", index], ["pointerleave", null], ["click", index]]) {
      element.addEventListener(event, () => this.onEmphasis(value));
    }
  }

  // Decoration only: what is shown is already the state after the step.
  travel(number) {
    const easing = { duration: 520, easing: "cubic-bezier(.3,.1,.2,1)" };
    this.drawn.forEach(({ curve, group, parts }) => {
      const packet = draw("circle", { class: "packet", r: 6 });
      if (parts.length === 1) tint(packet, this.story.picture.hues[parts[0][0]]).classList.add("tinted");
      packet.style.offsetPath = `path("${curve.d}")`;
      group.append(packet);
      packet.animate([{ offsetDistance: "0%" }, { offsetDistance: "100%" }], easing).finished
        .then(() => packet.remove(), () => packet.remove());
    });
    for (const key of this.story.changed(number)) {
      const spot = this.spots.get(key);
      (spot.querySelector(".fill") || spot).animate([{ opacity: 0.15 }, { opacity: 1 }], { duration: 320, delay: 360, fill: "backwards" });
    }
  }

  emphasize(index) {
    this.svg.classList.toggle("focused", index !== null);
    for (const element of this.svg.querySelectorAll(".hot")) element.classList.remove("hot");
    if (index === null) return;
    for (const element of this.svg.querySelectorAll(`[data-message="${index}"]`)) element.classList.add("hot");
    const [src, dst, parts] = this.story.messages(this.number)[index];
    for (const [chunk] of parts) {
      for (const rank of [src, dst]) this.spots.get(`${rank}-${chunk}`)?.classList.add("hot");
    }
  }
}

export { Stage };
