// The view Collectives: an algorithm step by step, or two; what they cost; who wins where.

import { make } from "./kit.js";
import { Deck } from "./deck.js";
import { field, number, row, segments, select, slider } from "./controls.js";
import { bounded } from "./address.js";
import { bytesText } from "./amounts.js";
import { crossover, prices } from "./costs.js";
import { proof } from "./proof.js";
import { words } from "./collectives-words.js";

const DEFAULTS = { collective: "all_reduce", ranks: 4, bytes: 1 << 20 };
const DRAWN = ["collective", "algorithm", "compare", "ranks", "root", "op", "values", "bytes", "network"];
const PRICED = ["collective", "ranks", "root", "bytes", "network"];

async function mount(root, tools) {
  return new Page(root, tools, await tools.ask("collectives", "choices"));
}

class Page {
  constructor(root, tools, choices) {
    const { t } = tools;
    Object.assign(this, { tools, choices, deck: null, drawn: "" });
    this.named = new Map(choices.collectives.map((each) => [each.name, each]));
    this.title = make("h1", {});
    this.promise = make("p", { class: "lead" });
    this.about = make("p", { class: "about" });
    this.place = make("div", { class: "deck" });
    this.foot = make("div", { class: "deck-foot" });
    this.prices = prices(tools, (algorithm) => tools.set({ algorithm, compare: null, step: null }));
    this.crossover = crossover(tools, (ranks, bytes) => tools.set({ ranks, bytes, values: null, root: null, step: null }));
    this.proof = proof(tools, (found) => (found ? this.deal(found, found.first) : this.clear(t("your own"))));
    this.whose = segments({
      label: t("whose"),
      options: [["ours", t("ours")], ["own", t("own")]],
      value: "ours",
      change: (whose) => tools.set({ own: whose === "own" ? "yes" : null, step: null }),
    });
    this.controls = this.makeControls();
    this.costs = make("div", { class: "two" }, this.prices.element, this.crossover.element);
    // The map takes the server a while: it is asked for when it comes near.
    this.nearness = new IntersectionObserver(([{ isIntersecting }]) => {
      this.near = isIntersecting;
      if (this.near) this.crossover.update(this.at);
    }, { rootMargin: "300px" });
    root.append(
      make("header", { class: "head" }, make("div", {}, this.title, this.promise), this.whose.element),
      this.form, this.proof.element, this.about, this.place, this.foot, this.costs,
    );
  }

  makeControls() {
    const { tools, choices } = this, { t, set } = tools;
    const made = {
      collective: select({
        label: t("collective"),
        options: choices.collectives.map(({ name }) => [name, name]),
        change: (collective) => set({ collective, algorithm: null, compare: null, root: null, values: null, op: null, step: null }),
      }),
      algorithm: select({ label: t("algorithm"), options: [], change: (algorithm) => set({ algorithm, step: null }) }),
      compare: select({ label: t("compare"), options: [], change: (compare) => set({ compare: compare === "none" ? null : compare, step: null }) }),
      network: select({ label: t("network"), options: choices.networks.map((name) => [name, name]), change: (network) => set({ network }) }),
      ranks: slider({
        label: t("ranks"), value: DEFAULTS.ranks, low: 1, high: choices.most_ranks,
        change: (ranks) => set({ ranks, values: null, step: null, root: Math.min(this.at.root, ranks - 1) || null }),
      }),
      bytes: slider({ label: t("bytes"), value: 20, low: 6, high: 32, text: (power) => bytesText(2 ** power), change: (power) => set({ bytes: 2 ** power }) }),
      root: number({ label: t("root"), value: 0, low: 0, high: 3, change: (root) => set({ root: root || null, step: null }) }),
      op: select({ label: t("op"), options: choices.ops.map((name) => [name, name]), change: (op) => set({ op }) }),
      values: field({ label: t("values"), wide: false, placeholder: "1,1 2,2 3,3 4,4", hint: t("values hint"), change: (text) => this.setValues(text.trim()) }),
    };
    this.form = make("form", { class: "choices", "aria-label": t("choices") },
      row(...["collective", "algorithm", "compare", "network", "ranks", "bytes", "root", "op", "values"].map((name) => made[name])));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    return made;
  }

  setValues(values) {
    if (values !== this.at.values) this.tools.set({ values, ranks: null, step: null });
  }

  // What the address says, with defaults where it says nothing.
  get at() {
    const { state } = this.tools;
    const collective = this.named.get(state.collective) || this.named.get(DEFAULTS.collective);
    const given = PRICED.filter((name) => state[name] && (name !== "root" || collective.rooted));
    const groups = state.values ? state.values.trim().split(/\s+/).length : 0;
    return {
      collective,
      algorithm: state.algorithm || collective.default,
      compare: state.compare || "none",
      ranks: bounded(state.ranks, 1, this.choices.most_ranks, groups > 1 ? groups : DEFAULTS.ranks),
      root: bounded(state.root, 0, this.choices.most_ranks - 1, 0),
      bytes: bounded(state.bytes, 1, 2 ** 40, DEFAULTS.bytes),
      network: state.network || this.choices.networks[0],
      op: state.op || "sum",
      values: state.values || "",
      step: this.tools.step(),
      own: this.tools.one("own", ["", "yes"]) === "yes",
      given: Object.fromEntries(given.map((name) => [name, state[name]])), // as the address has it
    };
  }

  async update() {
    const { at } = this;
    this.whose.value = at.own ? "own" : "ours";
    this.form.hidden = this.costs.hidden = at.own;
    this.proof.element.hidden = !at.own;
    if (at.own) return this.showOwn(at);
    this.proof.forget();
    this.fill(at);
    const mapped = () => this.near && this.crossover.update(at);
    const drawn = this.draw(at).finally(() => this.nearness.observe(this.costs));
    await Promise.all([drawn, this.prices.update(at, [this.costs]).then(mapped)]);
  }

  fill(at) {
    const { controls } = this, { t } = this.tools, { collective } = at;
    controls.algorithm.options = collective.algorithms.map((name) => [name, name]);
    const others = collective.algorithms.filter((name) => name !== at.algorithm);
    controls.compare.options = [["none", t("with none")], ...others.map((name) => [name, name])];
    for (const name of ["algorithm", "compare", "network", "ranks", "root", "op", "values"]) controls[name].value = at[name];
    controls.collective.value = collective.name;
    controls.bytes.value = Math.log2(at.bytes);
    controls.root.high = at.ranks - 1;
    controls.root.element.hidden = !collective.rooted;
    controls.op.element.hidden = !collective.adds || !at.values;
    controls.values.element.hidden = !collective.carries;
    this.promise.textContent = collective.promise;
  }

  async draw(at) {
    const { state } = this.tools;
    const asked = Object.fromEntries(DRAWN.filter((name) => state[name]).map((name) => [name, state[name]]));
    if (asked.compare === at.algorithm) delete asked.compare;
    const key = JSON.stringify(asked);
    if (key === this.drawn) return this.deck.player.number !== at.step && this.deck.player.stopAndGo(at.step);
    this.drawn = "";
    const into = [this.about, this.place, this.foot];
    const found = await this.tools.ask("collectives", "pictures", asked, { into }).catch((error) => {
      this.title.textContent = at.collective.name;
      throw error;
    });
    this.deal(found, at.step);
    this.drawn = key;
  }

  clear(title) {
    this.title.textContent = title;
    this.about.textContent = "";
    this.deck?.leave();
    this.deck = null;
    this.drawn = "";
    this.place.replaceChildren();
    this.foot.replaceChildren();
  }

  // A pasted schedule: the one before, until another is proved.
  async showOwn(at) {
    if (this.drawn !== "own") {
      this.clear(this.tools.t("your own"));
      this.promise.textContent = this.tools.t("your own about");
      this.drawn = "own";
    }
    if (this.deck && this.deck.player.number !== at.step) this.deck.player.stopAndGo(at.step);
    await this.proof.begin(at);
  }

  deal({ title, pictures }, step) {
    this.title.textContent = title;
    this.about.textContent = pictures.length === 1 ? pictures[0].about : "";
    this.deck?.leave();
    this.deck = new Deck(pictures, {
      at: step,
      moved: (now) => this.tools.set({ step: now || null }, { quiet: true }),
    });
    this.place.replaceChildren(this.deck.player.element, this.deck.element);
    this.foot.replaceChildren(this.deck.legend, this.tools.keys());
    this.deck.start();
  }

  unmount() {
    this.nearness.disconnect();
    this.deck?.leave();
  }
}

export const view = { name: "collectives", words, mount };
