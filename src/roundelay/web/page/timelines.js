// The view Timelines: recorded runs step by step, and the job that runs now.

import { draw, make } from "./kit.js";
import { Player, keys } from "./player.js";
import { segments, select } from "./controls.js";
import { words } from "./timelines-words.js";
import { LiveJobs } from "./timelines-live.js";

const RECORD = "roundelay run -n 2 --trace runs/first train.py\nroundelay web --runs runs";
const TAGS = new Set(["svg", "g", "rect", "path", "text", "title", "defs", "pattern", "marker"]);
const HATCH = ["defs", {},
  ["pattern", { id: "wait", width: "6", height: "6", patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    ["rect", { class: "hatched", width: "6", height: "6" }], ["path", { class: "hatch", d: "M0 0V6", "stroke-width": "4" }]],
  ["marker", { id: "tip", viewBox: "0 0 6 6", refX: "5", refY: "3", markerWidth: "6", markerHeight: "6", orient: "auto" },
    ["path", { class: "tip", d: "M0 0L6 3L0 6Z" }]]];

// Build a drawing of what Python says of it: known elements, attributes and text.
function grow(tree) {
  if (typeof tree === "string") return document.createTextNode(tree);
  const [tag, attributes, ...children] = tree;
  if (!TAGS.has(tag)) throw new Error(`No ${tag} in a drawing.`);
  const safe = Object.entries(attributes).filter(([name]) => !/^(on|href|style)/i.test(name));
  return draw(tag, Object.fromEntries(safe), ...children.map(grow));
}

function mount(root, tools) {
  return new Page(root, tools);
}

class Page {
  constructor(root, tools) {
    const { t } = tools;
    Object.assign(this, { tools, run: null, drawn: "", player: null, steps: [] });
    this.choice = segments({
      label: t("show"), options: [["runs", t("recorded")], ...(tools.live ? [["live", t("live")]] : [])], value: "runs",
      change: (show) => tools.set({ show: show === "runs" ? null : show }),
    });
    this.runs = select({ label: t("run"), options: [], change: (run) => tools.set({ run, step: null }) });
    this.again = make("button", { type: "button" }, t("look again"));
    this.again.addEventListener("click", () => this.list());
    this.bar = make("div", { class: "choices" }, make("div", { class: "runs-bar" }, this.runs.element, this.again));
    this.title = make("h2", {});
    this.about = make("p", { class: "about" });
    this.place = make("div", {});
    this.picture = make("div", { class: "scroll timeline", tabindex: 0 });
    this.table = make("div", { class: "scroll", tabindex: 0 });
    this.result = [this.title, this.about, this.place, this.picture, make("p", { class: "hint" }, t("hint")), this.table, keys()];
    this.recorded = make("section", {}, this.bar, ...this.result);
    this.none = make("section", { class: "card-section", hidden: true });
    this.live = new LiveJobs(tools);
    root.append(
      make("header", { class: "head" }, make("h1", {}, t("head")), make("p", { class: "lead" }, t("lead"))),
      make("div", { class: "which" }, this.choice.element), this.none, this.recorded, this.live.element);
  }

  async update() {
    const { tools } = this, live = tools.one("show", tools.live ? ["runs", "live"] : ["runs"]) === "live";
    this.choice.value = live ? "live" : "runs";
    this.live.watch(live);
    if (live) {
      this.player?.stop();
      this.recorded.hidden = this.none.hidden = true;
      return;
    }
    if (this.known === undefined) await this.list();
    await this.open();
  }

  async list() {
    // What is listed changes: no kept answer will do.
    const { given, runs } = await this.tools.ask("timelines", "runs", {}, { fresh: true });
    const { t } = this.tools;
    const before = this.known;
    this.known = runs;
    this.runs.options = runs.map((one) => [one.id, t("run said", one)]);
    if (!runs.length) this.none.replaceChildren(make("p", {}, t(given ? "no runs" : "no folder")), make("pre", {}, RECORD));
    this.none.hidden = runs.length > 0;
    this.recorded.hidden = !runs.length;
    if (before !== undefined) await this.open();
  }

  async open() {
    const { tools } = this;
    this.none.hidden = this.known.length > 0;
    this.recorded.hidden = !this.known.length;
    if (!this.known.length) return;
    const wanted = tools.state.run || this.known[0].id;
    this.runs.value = wanted;
    const fresh = wanted !== this.drawn;
    if (fresh) {
      this.drawn = "";
      const { title, about, steps } = await tools.ask("timelines", "run", { run: wanted }, { into: this.result });
      Object.assign(this, { run: wanted, drawn: wanted, steps });
      this.title.textContent = title;
      this.about.textContent = about;
      this.player?.leave();
      this.player = new Player({ last: steps.length - 1, show: (number) => this.show(number) });
      this.place.replaceChildren(this.player.element);
      this.player.element.hidden = steps.length < 2;
    }
    const step = tools.one("step", this.steps.map(({ key }) => key).reverse()); // the last, where none is named
    const at = this.steps.findIndex(({ key }) => key === step);
    if (fresh || at !== this.player.number) this.player.stopAndGo(at);
  }

  show(number) {
    const { key, name } = this.steps[number], { tools } = this;
    if ((tools.state.step ?? this.steps.at(-1).key) !== key) tools.set({ step: number === this.steps.length - 1 ? null : key }, { quiet: true });
    this.draw(key, name);
    return tools.t("of steps", { name, n: number + 1, last: this.steps.length });
  }

  async draw(key, name) {
    const { tools } = this;
    const { picture, head, rows } = await tools.ask("timelines", "step", { run: this.run, step: key }, { into: [this.picture, this.table] });
    const svg = grow(picture);
    svg.prepend(grow(HATCH));
    svg.setAttribute("aria-label", tools.t("picture", { name }));
    this.picture.dataset.step = key;
    this.picture.replaceChildren(svg);
    this.table.replaceChildren(make("table", { class: "plain" }, make("caption", {}, tools.t("table")),
      make("thead", {}, make("tr", {}, ...head.map((one) => make("th", { scope: "col" }, one)))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((one) => make("td", {}, one)))))));
  }

  unmount() {
    this.player?.leave();
    this.live.watch(false);
  }
}

export const view = { name: "timelines", words, mount };
