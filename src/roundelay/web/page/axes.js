// The view Axes: the cube of a product, pipelines, attention over ranks, and a mesh of them all.

import { make } from "./kit.js";
import { row, segments, select, slider } from "./controls.js";
import { Player } from "./player.js";
import { Drawing } from "./drawing.js";
import { words } from "./axes-words.js";

const SHOWS = ["cube", "pipeline", "attention", "mesh"];
// One product in the light at a time; what stands for the others steps back.
const CUBE = ".frame{transition:opacity .2s}.frame.away{opacity:.22}";

function form(tools, ...rows) {
  const element = make("form", { class: "choices", "aria-label": tools.t("choices") }, ...rows);
  element.addEventListener("submit", (event) => event.preventDefault());
  return element;
}

// What every part has: controls by name, a drawing, a player where there are frames.
class Part {
  constructor(tools, choices) {
    Object.assign(this, { tools, choices, player: null });
    this.drawing = new Drawing();
    this.title = make("h2", {});
    this.words = make("p", { class: "words" });
    this.about = make("p", { class: "about" });
    this.command = make("code", { class: "command" });
    this.place = make("div", { class: "player-place" });
    this.controls = this.makeControls();
    this.result = [this.title, this.about, this.place, this.words,
      make("div", { class: "scroll sheet-of", tabindex: 0, role: "region", "aria-label": tools.t("drawing") }, this.drawing.element),
      make("p", { class: "shell" }, tools.t("in a terminal"), " ", this.command)];
    this.element = make("section", { class: `axes-${this.constructor.part}` },
      form(tools, row(...Object.values(this.controls))), ...this.result);
  }

  choice(name, options, { change = () => ({}), say = (each) => this.tools.t(`${name} ${each}`) } = {}) {
    return select({ label: this.tools.t(name), options: options.map((each) => [each, say(each)]), change: (to) => this.tools.set({ [name]: to, step: null, ...change(to) }) });
  }

  range(name, low, high) {
    return slider({ label: this.tools.t(name), value: low, low, high, change: (to) => this.tools.set({ [name]: to, step: null }) });
  }

  get asked() {
    const { show, step, ...rest } = this.tools.state;
    return Object.fromEntries(Object.entries(rest).filter(([name]) => name in this.usual));
  }

  async update() {
    const state = { ...this.usual, ...this.asked };
    for (const [name, control] of Object.entries(this.controls)) control.value = state[name];
    this.adapt?.(state);
    const key = JSON.stringify(this.asked);
    const step = this.tools.step();
    if (key === this.drawn) return this.player && this.player.number !== step && this.player.stopAndGo(step);
    this.drawn = "";
    const found = await this.tools.ask("axes", this.constructor.part, this.asked, { slot: "drawing", into: this.result });
    this.drawn = key;
    this.found = found;
    this.title.textContent = found.title || "";
    this.command.textContent = found.command;
    this.player?.leave();
    this.player = null;
    this.show(found);
    if (!found.frames) return this.place.replaceChildren();
    this.player = new Player({ last: found.frames.length - 1, pause: 2200, show: (number) => this.frame(number) });
    this.place.replaceChildren(this.player.element);
    this.player.go(step);
  }

  at(number) {
    this.tools.set({ step: number || null }, { quiet: true });
  }

  leave() {
    this.player?.leave();
    this.drawing.leave();
  }
}

class Cube extends Part {
  static part = "cube";

  get usual() {
    return { split: "batch", ranks: 2, second: "-", ranks2: 2 };
  }

  makeControls() {
    const { dims, most } = this.choices;
    const say = (each) => this.tools.t(`split ${each}`);
    return {
      split: this.choice("split", dims, { say }),
      ranks: this.range("ranks", 1, most.cut),
      second: this.choice("second", ["-", ...dims], { say }),
      ranks2: this.range("ranks2", 1, most.cut),
    };
  }

  adapt({ second, split }) {
    this.controls.ranks2.element.hidden = second === "-";
    this.controls.second.options = ["-", ...this.choices.dims.filter((each) => each !== split)].map((each) => [each, this.tools.t(`split ${each}`)]);
    this.controls.second.value = second;
  }

  show(found) {
    this.drawing.show(found, CUBE);
    // The drawing's own title stands above it already.
    const { svg } = this.drawing, box = svg.viewBox.baseVal;
    svg.setAttribute("viewBox", `${box.x} 74 ${box.width} ${box.height - 74}`);
  }

  frame(number) {
    const [title, text] = this.found.frames[number];
    this.words.textContent = text;
    for (const each of this.drawing.svg.querySelectorAll(".frame")) each.classList.toggle("away", number > 0 && Number(each.dataset.frame) !== number);
    // Where it is wider than the window, the products are brought into sight.
    const sheet = this.drawing.element.parentElement, { width } = this.drawing.svg.viewBox.baseVal;
    sheet.scrollLeft = number ? (sheet.scrollWidth * 440) / width : 0;
    this.at(number);
    return title;
  }
}

class Pipeline extends Part {
  static part = "pipeline";

  get usual() {
    return { schedule: "1f1b", ranks: 4, micro_batches: 8 };
  }

  makeControls() {
    const { schedules, most } = this.choices;
    return {
      schedule: this.choice("schedule", schedules, { say: (each) => each }),
      ranks: this.range("ranks", 1, most.stages),
      micro_batches: this.range("micro_batches", 1, most.micro_batches),
    };
  }

  show(found) {
    this.about.textContent = this.tools.t("pipeline about");
    this.drawing.show(found, "text.title{display:none}");
    const { svg } = this.drawing, box = svg.viewBox.baseVal;
    svg.setAttribute("viewBox", `${box.x} 60 ${box.width} ${box.height - 60}`);
  }
}

class Attention extends Part {
  static part = "attention";

  get usual() {
    return { method: "ring", layout: "contiguous", mask: "causal", ranks: 4 };
  }

  makeControls() {
    const { methods, layouts, most } = this.choices;
    return {
      method: this.choice("method", methods),
      layout: this.choice("layout", layouts),
      mask: this.choice("mask", ["causal", "full"]),
      ranks: this.range("ranks", 1, most.attention),
    };
  }

  show(found) {
    this.about.textContent = `${found.about} ${found.ending}`;
  }

  frame(number) {
    const { svg, head, told } = this.found.frames[number];
    this.drawing.show({ svg, style: this.found.style }, ".head,.head~.soft{display:none}");
    const root = this.drawing.svg, box = root.viewBox.baseVal;
    root.setAttribute("viewBox", `20 52 ${box.width - 72} ${box.height - 92}`);
    this.words.textContent = told;
    this.at(number);
    return head;
  }
}

class Mesh extends Part {
  static part = "mesh";

  get usual() {
    return { dp: 2, tp: 2, cp: 1, pp: 2, along: "tp" };
  }

  makeControls() {
    const { axes, most } = this.choices;
    return {
      ...Object.fromEntries(["dp", "tp", "cp", "pp"].map((name) => [name, this.range(name, 1, most.along)])),
      along: this.choice("along", axes, { say: (each) => this.tools.t(each) }),
    };
  }

  show(found) {
    this.words.textContent = found.words;
    this.drawing.show(found);
    this.drawing.element.style.setProperty("--own", `${this.drawing.svg.viewBox.baseVal.width * 1.15}px`);
  }
}

const PARTS = { cube: Cube, pipeline: Pipeline, attention: Attention, mesh: Mesh };

class Axes {
  constructor(root, tools, choices) {
    const { t } = tools;
    Object.assign(this, { tools, choices, part: null });
    this.tabs = segments({ label: t("show"), options: SHOWS.map((name) => [name, t(`show ${name}`)]), change: (show) => this.change(show) });
    this.lead = make("p", { class: "lead" });
    this.place = make("div", {});
    root.append(make("header", { class: "head" }, make("h1", {}, t("heading")), this.lead), make("div", { class: "tabs" }, this.tabs.element), this.place);
  }

  // Another picture has other controls: nothing of the last one stays in the address.
  change(show) {
    const gone = Object.fromEntries(Object.keys(this.tools.state).map((name) => [name, null]));
    this.tools.set({ ...gone, show });
  }

  async update() {
    const { tools } = this, name = tools.one("show", SHOWS);
    this.tabs.value = name;
    this.lead.textContent = tools.t(`lead ${name}`);
    if (!(this.part instanceof PARTS[name])) {
      this.part?.leave();
      this.part = new PARTS[name](tools, this.choices);
      this.place.replaceChildren(this.part.element);
    }
    await this.part.update();
  }

  unmount() {
    this.part?.leave();
  }
}

async function mount(root, tools) {
  return new Axes(root, tools, await tools.ask("axes", "choices"));
}

export const view = { name: "axes", words, mount };
