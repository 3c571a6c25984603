// The view Training: one step under a strategy, or under two, on one clock.

import { bounded } from "./address.js";
import { make } from "./kit.js";
import { Player, keys } from "./player.js";
import { row, select, slider } from "./controls.js";
import { TrainingPanel, legend } from "./training-panel.js";
import { words } from "./training-words.js";

const DEFAULTS = { strategy: "ddp", ranks: 4, layers: 4, buckets: 2, precision: "bf16", straggler: "none", staleness: 1 };
const SHARED = ["ranks", "layers", "buckets", "straggler", "staleness", "cluster"];
const PAUSE = 1500;

async function mount(root, tools) {
  return new Page(root, tools, await tools.ask("training", "choices"));
}

class Page {
  constructor(root, tools, choices) {
    const { t } = tools;
    Object.assign(this, { tools, choices, player: null, panels: [], drawn: "" });
    this.controls = this.makeControls();
    this.place = make("div", {});
    this.deck = make("div", { class: "steps-drawn" });
    this.foot = make("footer", {});
    root.append(
      make("header", { class: "head" }, make("h1", {}, t("head")), make("p", { class: "lead" }, t("lead"))),
      this.form, this.place, this.deck, this.foot);
    this.watch = new ResizeObserver(() => requestAnimationFrame(() => this.fit()));
    this.watch.observe(this.deck);
  }

  makeControls() {
    const { choices, tools } = this, { t, set } = tools;
    const named = choices.strategies.map(({ name, words: said }) => [name, said]);
    const precisions = choices.precisions.map((name) => [name, name]);
    const made = {
      strategy: select({ label: t("strategy"), options: named, change: (strategy) => set({ strategy, step: null }) }),
      precision: select({ label: t("precision"), options: precisions, change: (precision) => set({ precision, step: null }) }),
      compare: select({ label: t("compare"), options: [["none", t("with none")], ...named], change: (to) => set({ compare: to === "none" ? null : to, step: null }) }),
      other: select({ label: t("other precision"), options: precisions, change: (other) => set({ other, step: null }) }),
      ranks: slider({ label: t("ranks"), value: DEFAULTS.ranks, low: 1, high: choices.most.ranks, change: (ranks) => set({ ranks, straggler: this.late(ranks), step: null }) }),
      layers: slider({ label: t("layers"), value: DEFAULTS.layers, low: 1, high: choices.most.layers, change: (layers) => set({ layers, step: null }) }),
      buckets: slider({ label: t("buckets"), value: DEFAULTS.buckets, low: 1, high: choices.most.layers, change: (buckets) => set({ buckets, step: null }) }),
      straggler: select({ label: t("straggler"), options: [], change: (to) => set({ straggler: to === "none" ? null : to, step: null }) }),
      staleness: slider({ label: t("staleness"), value: DEFAULTS.staleness, low: 0, high: choices.most.staleness, change: (staleness) => set({ staleness, step: null }) }),
      cluster: select({ label: t("cluster"), options: choices.clusters.map((name) => [name, name]), change: (cluster) => set({ cluster, step: null }) }),
    };
    this.form = make("form", { class: "choices", "aria-label": t("choices") },
      row(made.strategy, made.precision, made.compare, made.other), row(made.ranks, made.layers, made.buckets, made.straggler, made.staleness, made.cluster));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    return made;
  }

  // The straggler among so many ranks: none, where there is none of its number.
  late(ranks) {
    const now = this.tools.state.straggler;
    return now !== undefined && Number(now) < ranks ? now : null;
  }

  get at() {
    const { state } = this.tools;
    const found = { cluster: this.choices.cluster, compare: "none", ...DEFAULTS, ...state };
    return { ...found, other: state.other || found.precision, step: this.tools.step() };
  }

  async update() {
    const { controls, tools } = this, { t } = tools, at = this.at;
    const length = bounded(at.ranks, 1, this.choices.most.ranks, DEFAULTS.ranks);
    controls.straggler.options = [["none", t("nobody")], ...Array.from({ length }, (_, n) => [String(n), t("rank", { n })])];
    for (const [name, control] of Object.entries(controls)) control.value = at[name];
    const shown = [at.strategy, at.compare];
    controls.other.element.hidden = at.compare === "none";
    controls.staleness.element.hidden = !shown.includes("ps-ssp");
    controls.buckets.element.hidden = !shown.some((name) => /^(ddp|zero[12])$/.test(name));
    await this.draw(at);
  }

  async draw(at) {
    const { tools } = this;
    const shared = Object.fromEntries(SHARED.filter((name) => tools.state[name]).map((name) => [name, tools.state[name]]));
    const asked = [{ ...shared, strategy: at.strategy, precision: at.precision }];
    if (at.compare !== "none") asked.push({ ...shared, strategy: at.compare, precision: at.other });
    const key = JSON.stringify(asked);
    if (key === this.drawn) return this.player.number !== at.step && this.player.stopAndGo(at.step);
    this.drawn = "";
    const into = [this.place, this.deck, this.foot];
    const steps = await Promise.all(asked.map((one, slot) => tools.ask("training", "step", one, { slot: `step ${slot}`, into })));
    this.drawn = key;
    this.player?.leave();
    this.times = moments(steps);
    const scale = { peak: Math.max(...steps.map((one) => one.peak)), ms: Math.max(...steps.map((one) => one.milliseconds)) };
    this.panels = steps.map((one, index) => new TrainingPanel(one, tools, { scale, index, jump: (ms) => this.jump(ms) }));
    this.deck.className = `steps-drawn ${steps.length > 1 ? "pair" : "single"}`;
    this.deck.replaceChildren(...this.panels.map((panel) => panel.element));
    this.player = new Player({ last: this.times.length - 1, show: (number) => this.show(number), pause: PAUSE });
    this.place.replaceChildren(this.player.element);
    this.foot.replaceChildren(legend(tools, steps), make("p", { class: "about" }, tools.t("about time", { cluster: steps[0].cluster, tokens: steps[0].tokens })), keys());
    this.fit();
    this.player.go(Math.min(at.step, this.times.length - 1));
  }

  show(number) {
    const { ms, frames } = this.times[number];
    this.panels.forEach((panel, index) => panel.show(frames[index], ms));
    if (number !== this.at.step) this.tools.set({ step: number || null }, { quiet: true });
    return this.tools.t("moment", { n: number, last: this.times.length - 1, ms: ms.toFixed(1) });
  }

  jump(ms) {
    const after = this.times.findIndex((one, number) => number > 0 && one.ms > ms + 1e-6);
    this.player.stopAndGo(after < 0 ? this.times.length - 1 : after - 1);
  }

  fit() {
    for (const panel of this.panels) panel.fit();
  }

  unmount() {
    this.watch.disconnect();
    this.player?.leave();
  }
}

// Every time at which something begins or ends under any strategy, with the frame of each by then.
function moments(steps) {
  const found = [{ ms: 0, frames: steps.map(() => 0) }];
  const times = [...new Set(steps.flatMap((one) => one.frames.slice(1).map(({ at }) => at)))].sort((a, b) => a - b);
  for (const ms of times) {
    found.push({ ms, frames: steps.map(({ frames }) => Math.max(1, frames.findLastIndex(({ at }, index) => index > 0 && at <= ms))) });
  }
  return found;
}

export const view = { name: "training", words, mount };
