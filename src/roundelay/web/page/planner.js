// The view Planner: `roundelay plan` with sliders.

import { make } from "./kit.js";
import { row, select } from "./controls.js";
import { coded } from "./coded.js";
import { Drawing } from "./drawing.js";
import { words } from "./planner-words.js";

const PARTS = ["parameters", "gradients", "optimizer", "activations", "transient"];
const POWERS = (low, high) => Array.from({ length: high - low + 1 }, (_, at) => 2 ** (low + at));
const MANTISSAS = [1, 1.3, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 7.5, 8, 9];
const PLACES = {
  params: [7, 8, 9, 10, 11, 12].flatMap((power) => MANTISSAS.map((each) => Number(`${each}e${power}`))),
  layers: [1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 72, 80, 96, 112, 126, 128, 160, 192],
  hidden: [128, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 16384, 20480, 24576],
  sequence: POWERS(9, 20),
  gpus: POWERS(0, 17),
  memory: [8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 141, 180, 186, 192, 256, 288, 384, 512],
  batch: POWERS(0, 17),
};
const SCALES = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];
const PAUSE = 200; // before the curves are drawn anew, while a slider moves

function short(number) {
  const [size, letter] = SCALES.find(([each]) => number >= each) || [1, ""];
  return `${Number((number / size).toPrecision(3))}${letter}`;
}

function readNumber(text) {
  const found = /^([0-9.]+(?:e[+]?\d{1,2})?)\s*([kmbgt]?)b?$/i.exec(text.trim());
  const value = found ? Number(found[1]) * ({ k: 1e3, m: 1e6, b: 1e9, g: 1e9, t: 1e12 }[found[2].toLowerCase()] || 1) : NaN;
  return Number.isFinite(value) && value > 0 ? value : null;
}

// A slider over places, and a field beside it for any number; an empty field is left to the planner.
class Knob {
  constructor(name, tools, { unit = "", large = false, change }) {
    const places = PLACES[name], id = `knob-${name}`;
    Object.assign(this, { name, places, large });
    this.field = make("input", { type: "text", id, class: "exact", size: 7, inputmode: large ? "text" : "numeric", autocomplete: "off", spellcheck: "false" });
    this.range = make("input", { type: "range", class: "range", min: 0, max: places.length - 1, step: 1, "aria-label": tools.t(name) });
    this.element = make("div", { class: "control knob" },
      make("span", { class: "control-head" }, make("label", { for: id }, tools.t(name)), make("span", { class: "amount" }, this.field, unit)),
      this.range);
    this.range.addEventListener("input", () => {
      this.place();
      change(name, places[this.range.valueAsNumber]);
    });
    this.field.addEventListener("change", () => {
      const value = this.field.value.trim() === "" ? null : readNumber(this.field.value);
      change(name, value === null ? null : large ? value : Math.round(value));
    });
  }

  place() {
    this.range.style.setProperty("--at", this.range.valueAsNumber / (this.places.length - 1));
  }

  // What the address says, and what holds where it says nothing.
  show(given, usual) {
    const value = given ?? usual;
    const text = this.large ? short(value) : String(value);
    this.field.placeholder = text;
    if (document.activeElement !== this.field) this.field.value = given === undefined ? "" : text;
    const near = this.places.reduce((best, each, at) =>
      (Math.abs(Math.log(each / value)) < Math.abs(Math.log(this.places[best] / value)) ? at : best), 0);
    if (document.activeElement !== this.range || given === undefined) this.range.value = near;
    this.range.setAttribute("aria-valuetext", text);
    this.element.classList.toggle("usual", given === undefined);
    this.place();
  }
}

function stacked(option, memory, scale, t) {
  const bar = make("div", { class: "bar", role: "img", "aria-label": PARTS.map((name) => `${t(name)} ${option.texts[name]}`).join(", ") });
  for (const name of PARTS) {
    if (!option.bytes[name]) continue;
    const part = make("i", { class: `part ${name}`, title: `${t(name)}: ${option.texts[name]}` });
    part.style.setProperty("--share", option.bytes[name] / scale);
    bar.append(part);
  }
  const limit = make("b", { class: "limit", title: t("limit", { memory }) });
  bar.append(limit);
  bar.classList.toggle("over", option.bytes.total > scale);
  return bar;
}

class Planner {
  constructor(root, tools, choices) {
    const { t } = tools;
    Object.assign(this, { root, tools, choices, timer: 0 });
    const change = (name, value) => tools.set({ [name]: value, ...(name === "params" ? { layers: null, hidden: null } : {}) });
    this.knobs = [
      new Knob("params", tools, { large: true, change }),
      new Knob("layers", tools, { change }),
      new Knob("hidden", tools, { change }),
      new Knob("sequence", tools, { change }),
      new Knob("batch", tools, { change }),
      new Knob("gpus", tools, { change }),
      new Knob("memory", tools, { unit: "GB", change }),
    ];
    this.network = select({ label: t("network"), options: choices.networks.map(({ name }) => [name, name]), change: (network) => tools.set({ network, memory: null, precision: null }) });
    this.precision = select({ label: t("precision"), options: [], change: (precision) => tools.set({ precision: precision === "usual" ? null : precision }) });
    this.form = make("form", { class: "choices", "aria-label": t("choices") },
      row(...this.knobs.slice(0, 5)), row(...this.knobs.slice(5), this.network, this.precision));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.best = make("p", { class: "best", "aria-live": "polite" });
    this.about = make("p", { class: "about" });
    this.table = make("table", { class: "plan" });
    this.command = make("code", { class: "command" });
    this.why = make("dl", { class: "why" });
    this.whyTitle = make("summary", {}, t("why"));
    this.details = make("details", { class: "card-section" }, this.whyTitle, make("p", { class: "about" }, t("why about")), this.why);
    this.details.addEventListener("toggle", () => tools.set({ why: this.details.open ? 1 : null }, { quiet: true }));
    this.drawing = new Drawing();
    this.source = make("p", { class: "source" });
    this.result = [this.best, this.about,
      make("div", { class: "key", "aria-hidden": "true" }, ...PARTS.map((name) => make("span", {}, make("i", { class: `part ${name}` }), t(name))), make("span", {}, make("b", { class: "limit" }), t("memory limit"))),
      this.table,
      make("p", { class: "about foot" }, t("again")),
      make("p", { class: "shell" }, t("in a terminal"), " ", this.command), this.details, this.source];
    this.scales = make("section", { class: "card-section curve" }, make("h2", {}, t("scales")), make("p", { class: "about" }, t("scales about")), make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("scales") }, this.drawing.element));
    root.append(
      make("header", { class: "head" }, make("h1", {}, t("title")), make("p", { class: "lead" }, ...coded(t("lead")))),
      this.form, ...this.result);
    this.details.before(this.scales);
  }

  get asked() {
    const { why, ...rest } = this.tools.state;
    return rest;
  }

  async update(state) {
    const { tools, choices } = this, { t } = tools;
    const name = state.network || "h100-ib";
    const network = choices.networks.find((each) => each.name === name) || choices.networks[0];
    this.network.value = network.name;
    this.precision.options = choices.precisions.filter((each) => ["usual", "all"].includes(each) || network.precisions.includes(each)).map((each) => [each, t(`precision ${each}`)]);
    this.precision.value = state.precision || "usual";
    this.source.textContent = t("source", { name: network.name, source: network.source });
    this.details.open = tools.one("why", ["", "1"]) === "1";
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.curve(), this.drawn ? PAUSE : 0);
    const found = await tools.ask("planner", "plan", this.asked, { into: [...this.result, this.scales] });
    this.show(found, state);
  }

  show(found, state) {
    const { t } = this.tools;
    const usual = { params: found.model.params, layers: found.model.layers, hidden: found.model.hidden, sequence: found.sequence, gpus: found.gpus, memory: found.memory / 1e9, batch: found.batch };
    for (const knob of this.knobs) knob.show(state[knob.name] === undefined ? undefined : Number(state[knob.name]), usual[knob.name]);
    this.best.replaceChildren(...(found.best ? [make("b", {}, t("best")), " "] : []), found.reason);
    this.best.classList.toggle("bad", !found.best);
    this.about.textContent = t("looked", { n: found.looked_at, fitting: found.fitting });
    this.rows(found);
    this.command.textContent = found.command;
    this.why.replaceChildren(...found.why.flatMap((term) => [
      make("dt", {}, term.what, make("span", {}, term.text)),
      make("dd", {}, make("span", { class: "formula" }, `= ${term.formula}`), make("span", { class: "numbers" }, `= ${term.numbers}`))]));
  }

  rows(found) {
    const { t } = this.tools;
    const several = new Set(found.options.map((each) => each.precision)).size > 1;
    const heads = ["strategy", ...(several ? ["precision"] : []), "mesh", "rows", "memory of a rank", ...PARTS, "total", "spare", "step", "waits"];
    const most = Math.max(...found.options.map((each) => each.bytes.total));
    const scale = Math.max(found.memory * 1.06, Math.min(most, found.memory * 1.6));
    this.table.style.setProperty("--limit", found.memory / scale);
    const cells = (option) => heads.map((head) => {
      const label = t(head);
      if (head === "memory of a rank") return make("td", { class: "bars" }, stacked(option, found.texts.memory, scale, t));
      const text = head === "strategy" || head === "precision" ? option[head] : option.texts[head];
      const tag = head === "strategy" ? "th" : "td";
      return make(tag, { class: `${head}${PARTS.includes(head) ? " piece" : ""}`, "data-label": label, scope: tag === "th" ? "row" : null }, text);
    });
    const body = found.options.map((option) => {
      const line = make("tr", { class: [option.best ? "chosen" : "", option.fits ? "" : "too-large"].join(" ").trim() || null }, ...cells(option));
      if (option.best) line.querySelector("th").prepend(make("span", { class: "mark", title: t("best") }, "▸"), " ");
      return [option.alone, line];
    });
    this.table.replaceChildren(
      make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col", class: PARTS.includes(head) ? "piece" : head === "memory of a rank" ? "bars" : null }, t(head))))),
      make("tbody", {}, ...body.filter(([alone]) => alone).map(([, line]) => line)),
      make("tbody", {}, ...body.filter(([alone]) => !alone).map(([, line]) => line)));
    for (const empty of this.table.querySelectorAll("tbody:empty")) empty.remove();
  }

  async curve() {
    const found = await this.tools.ask("planner", "scaling", this.asked, { into: [this.scales] });
    this.drawing.show(found);
    this.drawn = true;
  }

  unmount() {
    clearTimeout(this.timer);
    this.drawing.leave();
  }
}

async function mount(root, tools) {
  return new Planner(root, tools, await tools.ask("planner", "choices"));
}

export const view = { name: "planner", words, mount };
