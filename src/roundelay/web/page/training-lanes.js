// Lanes of time: for each rank what it computes, below that what it sends, and whom it waits for.

import { draw, make } from "./kit.js";

const ROW = 15, THIN = 9, GAP = 9, TOP = 8, AXIS = 24;
const COMPUTES = ["forward", "backward", "step", "wait"];

class TimeLanes {
  constructor(step, tools, ms, jump) {
    Object.assign(this, { step, tools, ms });
    this.svg = draw("svg", { class: "lanes", role: "img", "aria-label": tools.t("lanes") });
    this.svg.addEventListener("click", (event) => {
      const { left } = this.svg.getBoundingClientRect();
      const at = ((event.clientX - left - this.left) / this.room) * this.ms;
      if (at >= 0 && at <= this.ms) jump(at);
    });
    this.element = make("div", {}, this.svg);
    this.served = step.lanes.some(({ lane }) => lane === "server");
  }

  x(ms) {
    return this.left + (ms / this.ms) * this.room;
  }

  top(rank, lane) {
    const from = TOP + (this.served ? ROW + GAP : 0);
    if (lane === "server") return TOP;
    return from + rank * (ROW + 2 + THIN + GAP) + (lane === "network" ? ROW + 2 : 0);
  }

  fit(width) {
    const { step, tools: { t } } = this;
    this.left = width < 500 ? 56 : 66;
    this.room = width - this.left - 10;
    const bottom = this.top(step.ranks, "compute"), height = bottom + AXIS;
    for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height })) this.svg.setAttribute(name, value);
    this.now = draw("rect", { class: "now", y: TOP - 6, height: bottom - TOP + 4 });
    this.cursor = draw("path", { class: "cursor" });
    this.bottom = bottom;
    const label = (y, words) => draw("text", { x: this.left - 10, y, class: "lane-name", "text-anchor": "end" }, words);
    const parts = [this.hatch(), this.now];
    if (this.served) parts.push(label(this.top(0, "server") + 12, t("server")), this.ground(this.top(0, "server"), ROW));
    for (let rank = 0; rank < step.ranks; rank++) {
      const late = step.straggler === rank;
      const name = label(this.top(rank, "compute") + 12, t("rank", { n: rank }));
      if (late) name.classList.add("late");
      parts.push(name, this.ground(this.top(rank, "compute"), ROW), this.ground(this.top(rank, "network"), THIN));
    }
    this.spans = step.lanes.map((span) => [span, this.bar(span)]);
    parts.push(...this.spans.map(([, bar]) => bar), ...this.axis(), this.cursor);
    this.svg.replaceChildren(...parts);
  }

  hatch() {
    return draw("defs", {}, draw("pattern", { id: "wait", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      draw("rect", { class: "hatched-wait", width: 6, height: 6 }), draw("path", { class: "hatch-wait", d: "M0 0V6", "stroke-width": 3 })));
  }

  ground(y, height) {
    return draw("rect", { class: "ground", x: this.left, y, width: this.room, height, rx: 2 });
  }

  bar(span) {
    const { t } = this.tools, thin = span.lane === "network";
    const kind = COMPUTES.includes(span.kind) ? span.kind : "network";
    const first = this.x(span.start), last = this.x(span.end);
    const units = span.units.map((unit) => this.step.units[unit]);
    const whole = span.units.length === this.step.units.length && units.length > 1;
    const told = [t(span.kind), ...(whole || !units.length ? [] : [units.join(", ")]), `${(span.end - span.start).toFixed(2)} ms`];
    if (span.for >= 0) told.push(t("rank", { n: span.for }));
    const bar = draw("rect", { class: `span ${kind}`, x: first, y: this.top(span.rank, span.lane), width: Math.max(1, last - first - 0.6), height: thin ? THIN : ROW, rx: 2 },
      draw("title", {}, told.join(" · ")));
    return bar;
  }

  axis() {
    const step = 10 ** Math.floor(Math.log10(this.ms)), each = [5, 2, 1, 0.5, 0.2].map((by) => by * step).findLast((one) => this.ms / one >= 1.5 && (this.room * one) / this.ms > 56) ?? step * 5;
    const ticks = [];
    for (let at = 0; at <= this.ms + 1e-9; at += each) {
      const x = this.x(at);
      ticks.push(draw("path", { class: "tick", d: `M${x} ${this.bottom - 6}v5` }),
        draw("text", { x, y: this.bottom + 14, class: "at", "text-anchor": at === 0 ? "start" : at > this.ms * 0.96 ? "end" : "middle" }, at === 0 ? "0" : `${Number(at.toPrecision(3))} ms`));
    }
    return ticks;
  }

  // Mark what is under way from a frame to the next.
  show(frame, until, ms) {
    const x = this.x(frame.at), clock = this.x(Math.min(ms, this.ms));
    this.now.setAttribute("x", x);
    this.now.setAttribute("width", Math.max(0, this.x(until) - x));
    this.cursor.setAttribute("d", `M${clock} ${TOP - 6}V${this.bottom - 2}`);
    for (const [span, bar] of this.spans) bar.classList.toggle("on", until > frame.at && span.start <= frame.at + 1e-6 && span.end > frame.at + 1e-6);
  }
}

export { TimeLanes };
