// The view Tour: eight chapters, each a few sentences and one live picture.

import { make } from "./kit.js";
import { phrase } from "./words.js";
import { Deck } from "./deck.js";
import { Player } from "./player.js";
import { row, segments, slider } from "./controls.js";
import { bounded } from "./address.js";
import { bytesText } from "./amounts.js";
import { prices } from "./costs.js";
import { coded } from "./coded.js";
import { Drawing } from "./drawing.js";
import { words as collectiveWords } from "./collectives-words.js";
import { words } from "./tour-words.js";

const PARTS = ["parameters", "gradients", "optimizer"];

// A collective step by step; with `choices`, one of several.
class Steps {
  constructor(tools, { choices = null, ...asked }) {
    Object.assign(this, { tools, asked, choices, deck: null });
    this.place = make("div", { class: "deck" });
    this.element = make("div", {});
    if (choices) {
      this.chooser = segments({ label: tools.t("collective"), options: choices.map(([name]) => [name, name]), change: (collective) => tools.set({ collective, step: null }) });
      this.element.append(make("div", { class: "tabs" }, this.chooser.element));
      this.told = make("p", { class: "lead" });
      this.element.append(this.told);
    }
    this.element.append(this.place);
  }

  async update(state) {
    const wanted = this.choices && this.tools.one("collective", this.choices.map(([name]) => name));
    const chosen = this.choices?.find(([name]) => name === wanted);
    const asked = chosen ? { collective: chosen[0], ...chosen[1] } : this.asked;
    if (chosen) {
      this.chooser.value = chosen[0];
      this.told.textContent = this.tools.t(`about ${chosen[0]}`);
    }
    const key = JSON.stringify(asked), step = this.tools.step();
    if (key === this.drawn) return this.deck?.player.number !== step && this.deck?.player.stopAndGo(step);
    this.drawn = "";
    const { pictures } = await this.tools.ask("collectives", "pictures", asked, { into: [this.place] });
    this.drawn = key;
    this.deck?.leave();
    this.deck = new Deck(pictures, { at: step, moved: (to) => this.tools.set({ step: to || null }, { quiet: true }) });
    this.place.replaceChildren(this.deck.player.element, this.deck.element);
    this.deck.start();
  }

  leave() {
    this.deck?.leave();
  }
}

// What each algorithm costs, as the data grows.
class Costs {
  constructor(tools) {
    this.tools = tools;
    const own = { ...tools, t: (key, values) => phrase(collectiveWords[tools.language], key, values) };
    this.bytes = slider({ label: tools.t("bytes"), value: 20, low: 6, high: 30, step: 2, text: (power) => bytesText(2 ** power), change: (power) => tools.set({ bytes: power === 20 ? null : 2 ** power }) });
    this.prices = prices(own, () => {});
    this.element = make("div", {}, make("div", { class: "choices" }, row(this.bytes)), this.prices.element);
  }

  async update(state) {
    const { collectives, networks } = await this.tools.ask("collectives", "choices");
    const collective = collectives.find(({ name }) => name === "all_reduce");
    const bytes = bounded(state.bytes, 1, 2 ** 40, 1 << 20);
    this.bytes.value = Math.log2(bytes);
    await this.prices.update({ collective, ranks: 8, root: 0, bytes, network: networks[0], algorithm: "", compare: "", given: { bytes: state.bytes ?? bytes } });
  }

  leave() {}
}

// A matrix product whose batch is cut: what data parallel training sends, and what not.
class Cut {
  constructor(tools) {
    this.tools = tools;
    this.drawing = new Drawing();
    this.words = make("p", { class: "words" });
    this.place = make("div", {});
    this.element = make("div", {}, this.place, this.words, make("div", { class: "scroll sheet-of", tabindex: 0, role: "region", "aria-label": tools.t("picture") }, this.drawing.element));
  }

  async update(state) {
    const step = this.tools.step();
    if (this.player) return this.player.number !== step && this.player.stopAndGo(step);
    const found = await this.tools.ask("axes", "cube", { split: "batch", ranks: 2 });
    this.drawing.show(found, ".frame{transition:opacity .2s}.frame.away{opacity:.22}");
    const { svg } = this.drawing, box = svg.viewBox.baseVal;
    svg.setAttribute("viewBox", `0 74 ${box.width} ${box.height - 74}`);
    this.player = new Player({
      last: found.frames.length - 1, pause: 2600,
      show: (number) => {
        const [title, text] = found.frames[number];
        this.words.textContent = text;
        for (const each of svg.querySelectorAll(".frame")) each.classList.toggle("away", number > 0 && Number(each.dataset.frame) !== number);
        const sheet = this.drawing.element.parentElement;
        sheet.scrollLeft = number ? (sheet.scrollWidth * 440) / box.width : 0;
        this.tools.set({ step: number || null }, { quiet: true });
        return title;
      },
    });
    this.place.replaceChildren(this.player.element);
    this.player.go(step);
  }

  leave() {
    this.player?.leave();
    this.drawing.leave();
  }
}

// Bars of what a rank holds, or of what it sends, under each strategy.
class Bars {
  constructor(tools, what) {
    Object.assign(this, { tools, what });
    this.ranks = slider({ label: tools.t("ranks"), value: 6, low: 0, high: 10, text: (power) => String(2 ** power), change: (power) => tools.set({ ranks: power === 6 ? null : 2 ** power }) });
    this.rows = make("div", { class: "zero-rows" });
    this.note = make("p", { class: "about" });
    this.element = make("div", {}, make("div", { class: "choices" }, row(this.ranks)), this.rows, this.note);
  }

  async update(state) {
    const { t } = this.tools, ranks = state.ranks ?? 64;
    this.ranks.value = Math.log2(bounded(state.ranks, 1, 1024, 64));
    const found = await this.tools.ask("tour", "zero", { ranks }, { into: [this.rows, this.note] });
    this[this.what](found);
    this.note.textContent = t(`${this.what} note`, { params: found.params, ranks: found.ranks, memory: found.memory_text });
  }

  line(strategy, text, parts, limit = null) {
    const bar = make("div", { class: "bar", role: "img", "aria-label": `${strategy}: ${parts.map(({ said }) => said).join(", ")}` },
      ...parts.map(({ kind, share, said, shown }) => {
        const part = make("i", { class: `part ${kind}`, title: said }, make("span", {}, shown || ""));
        part.style.setProperty("--share", share);
        return part;
      }));
    if (limit !== null) {
      bar.append(make("b", { class: "limit" }));
      bar.style.setProperty("--limit", limit);
    }
    return make("div", { class: "zero-row", "data-strategy": strategy }, make("b", {}, strategy), bar, make("span", { class: "zero-total" }, text));
  }

  holds({ rows, memory }) {
    const { t } = this.tools, most = Math.max(...rows.map(({ total }) => total), memory * 1.02);
    this.rows.replaceChildren(...rows.map(({ strategy, bytes, texts, total_text }) => this.line(strategy, total_text,
      PARTS.map((kind) => ({ kind, share: bytes[kind] / most, said: `${t(kind)} ${texts[kind]}` })), memory / most)),
      make("div", { class: "key", "aria-hidden": "true" }, ...PARTS.map((kind) => make("span", {}, make("i", { class: `part ${kind}` }), t(kind))), make("span", {}, make("b", { class: "limit" }), t("memory"))));
  }

  sends({ rows }) {
    const { t } = this.tools, most = Math.max(...rows.map(({ sent }) => sent)) || 1, least = rows[0].sent;
    this.rows.replaceChildren(...rows.map(({ strategy, calls, sent, sent_text }) => this.line(strategy,
      sent > least ? `${sent_text}, ${t("more", { n: Math.round(100 * (sent / least - 1)) })}` : sent_text,
      calls.map(({ call, what, when }) => ({ kind: what, share: sent / most / calls.length, said: `${call}, ${t(what)}, ${when}`, shown: `${call} ${when}` })))),
      make("div", { class: "key", "aria-hidden": "true" }, ...["parameters", "gradients"].map((kind) => make("span", {}, make("i", { class: `part ${kind}` }), t(kind)))));
  }

  leave() {}
}

const FOUR = "1,1 2,2 3,3 4,4";
const LONGER = "1,1,1,1 2,2,2,2 3,3,3,3 4,4,4,4";
const COLLECTIVES = [
  ["broadcast", { algorithm: "direct", values: "1,1", ranks: 4 }],
  ["scatter", { algorithm: "direct", values: "1,2,3,4", ranks: 4 }],
  ["gather", { algorithm: "direct", values: "1 2 3 4" }],
  ["reduce", { algorithm: "direct", values: FOUR }],
  ["all_gather", { algorithm: "direct", values: FOUR }],
  ["reduce_scatter", { algorithm: "direct", values: LONGER }],
  ["all_reduce", { algorithm: "two_shot", values: LONGER }],
  ["all_to_all", { algorithm: "direct", values: "1,2,3,4 5,6,7,8 9,10,11,12 13,14,15,16" }],
];
// A picture for each chapter, and where more of it is.
const CHAPTERS = [
  [(tools) => new Steps(tools, { collective: "broadcast", algorithm: "binomial", values: "1,1", ranks: 4 }), ["collectives", { collective: "broadcast" }]],
  [(tools) => new Steps(tools, { choices: COLLECTIVES }), ["collectives", {}]],
  [(tools) => new Steps(tools, { collective: "all_reduce", algorithm: "parameter_server", ranks: 5 }), ["collectives", { algorithm: "parameter_server", ranks: 5, compare: "ring" }], ["training", { strategy: "ps" }]],
  [(tools) => new Steps(tools, { collective: "all_reduce", algorithm: "ring", ranks: 5 }), ["collectives", { algorithm: "ring", ranks: 5 }]],
  [(tools) => new Costs(tools), ["collectives", { ranks: 8 }]],
  [(tools) => new Cut(tools), ["axes", { split: "batch" }], ["training", { strategy: "ddp" }]],
  [(tools) => new Bars(tools, "holds"), ["planner", {}], ["training", { strategy: "zero2" }]],
  [(tools) => new Bars(tools, "sends"), ["training", { strategy: "ddp", compare: "zero3" }], ["planner", {}]],
];
const COMMANDS = ["roundelay explain all_reduce --algorithm ring -n 5", "roundelay explain all_reduce --diff ring,parameter_server -n 8", "roundelay prove", "roundelay demo", "roundelay plan --params 7.5e9 --gpus 64", "roundelay run -n 2 examples/train_gpt.py --strategy zero3"];

class Tour {
  constructor(root, tools) {
    const { t } = tools;
    Object.assign(this, { root, tools, number: 0, figure: null });
    this.dots = make("nav", { class: "chapters", "aria-label": t("chapters") }, ...CHAPTERS.map((_, at) => {
      const button = make("button", { type: "button", title: t(`${at + 1} title`), "aria-label": t("chapter", { n: at + 1, title: t(`${at + 1} title`) }) }, String(at + 1));
      button.addEventListener("click", () => this.go(at + 1));
      return button;
    }));
    this.count = make("p", { class: "count" });
    this.heading = make("h1", { tabindex: -1 });
    this.text = make("div", { class: "told-chapter" });
    this.picture = make("div", { class: "picture" });
    this.more = make("p", { class: "about more" });
    this.prev = this.button("previous", -1);
    this.next = this.button("next", 1);
    this.end = make("section", { class: "card-section end", hidden: true }, make("h2", {}, t("end")), make("p", { class: "about" }, ...coded(t("end about"))),
      make("ul", {}, ...COMMANDS.map((command) => make("li", {}, make("code", { class: "command" }, command)))));
    root.append(this.dots, make("article", {}, this.count, this.heading, this.text, this.picture, this.more), this.end,
      make("div", { class: "actions turn" }, this.prev, this.next, make("span", { class: "about" }, t("keys"))));
    this.listener = (event) => this.key(event);
    document.addEventListener("keydown", this.listener);
  }

  button(name, by) {
    const button = make("button", { type: "button", class: by > 0 ? "main" : null }, this.tools.t(name));
    button.addEventListener("click", () => this.go(this.number + by));
    return button;
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.matches?.("input, select, textarea")) return;
    const by = { n: 1, p: -1 }[event.key];
    if (by) this.go(this.number + by);
  }

  go(number) {
    if (number < 1 || number > CHAPTERS.length) return;
    const gone = Object.fromEntries(Object.keys(this.tools.state).map((name) => [name, null]));
    this.tools.set({ ...gone, chapter: number === 1 ? null : number });
    this.heading.focus({ preventScroll: true });
    window.scrollTo(0, 0);
  }

  async update(state) {
    const { t, link } = this.tools;
    const number = Number(this.tools.one("chapter", CHAPTERS.map((_, at) => String(at + 1))));
    if (number !== this.number) {
      this.number = number;
      const [picture, ...links] = CHAPTERS[number - 1];
      this.count.textContent = t("count", { at: number, of: CHAPTERS.length });
      this.heading.textContent = t(`${number} title`);
      this.text.replaceChildren(...t(`${number} text`).split("\n").map((each) => make("p", {}, ...coded(each))));
      this.more.replaceChildren(...links.map(([view, target]) => make("a", { href: link(view, target) }, t(`more ${view}`))));
      this.end.hidden = number !== CHAPTERS.length;
      [...this.dots.children].forEach((dot, at) => {
        dot.classList.toggle("done", at + 1 < number);
        dot.setAttribute("aria-current", at + 1 === number ? "step" : "false");
      });
      this.prev.setAttribute("aria-disabled", String(number === 1));
      this.next.setAttribute("aria-disabled", String(number === CHAPTERS.length));
      this.figure?.leave();
      this.figure = picture(this.tools);
      this.picture.replaceChildren(this.figure.element);
    }
    await this.figure.update(state);
  }

  unmount() {
    document.removeEventListener("keydown", this.listener);
    this.figure?.leave();
  }
}

function mount(root, tools) {
  return new Tour(root, tools);
}

export const view = { name: "tour", words, mount };
