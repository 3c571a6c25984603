// One schedule on the page: its cost, its picture, the step in words, and the table.

import { make, tint } from "./kit.js";
import { say } from "./words.js";
import { Story, opOf } from "./story.js";
import { Stage } from "./stage.js";
import { Table } from "./table.js";

// More failures than this are counted, not listed.
const LISTED = 12;

class Panel {
  constructor(picture, { titled, index, jump }) {
    this.story = new Story(picture);
    this.number = 0;
    this.stage = new Stage(this.story, (message) => this.emphasize(message));
    this.table = new Table(this.story);
    this.hint = make("p", { class: "hint" });
    this.heading = make("h3", {});
    this.words = make("p", { class: "words" });
    this.cost = make("p", { class: "step-cost" });
    this.problems = make("ul", { class: "problems" });
    this.list = make("ul", { class: "messages" });
    this.list.addEventListener("keydown", (event) => this.walk(event));
    this.frame = make("div", { class: "frame" }, this.stage.svg, this.hint);
    this.aside = make("aside", {}, this.cost, this.problems, this.list);
    this.told = make("div", { class: "told" }, this.heading, this.words);
    this.element = make("section", { class: "panel", "data-picture": index, "aria-label": picture.title });
    if (titled) {
      this.element.append(make("h2", {}, picture.title), make("p", { class: "about" }, picture.about));
    }
    this.element.append(...this.verdict(jump));
    this.element.append(this.told, make("div", { class: "view" }, this.frame, this.aside), this.costs());
    this.element.append(make("h3", {}, say("what each holds")));
    // Thousands of cells take the browser a while: the picture need not wait for them.
    if (this.table.large) requestAnimationFrame(() => setTimeout(() => this.element.append(this.table.element)));
    else this.element.append(this.table.element);
  }

  get last() {
    return this.story.last;
  }

  // The most lines any step has in the list, so that room can be kept for them.
  get rows() {
    return Math.max(1, ...this.story.picture.frames.map(({ messages = [] }) => messages.length));
  }

  costs() {
    const pairs = this.story.picture.costs.map(([label, amount]) =>
      make("div", {}, make("dt", {}, label), make("dd", {}, amount)));
    return make("dl", { class: "costs" }, ...pairs);
  }

  verdict(jump) {
    const steps = [...this.story.failures.keys()].sort((one, other) => one - other);
    if (!steps.length) return [];
    const buttons = steps.slice(0, LISTED).map((number) => {
      const words = number === this.last ? say("the end") : say("step", { n: number });
      const button = make("button", { type: "button" }, words);
      button.addEventListener("click", () => jump(number));
      return button;
    });
    const count = this.story.picture.failures.length;
    const more = steps.length > LISTED ? say("more steps", { n: steps.length - LISTED }) : "";
    return [make("p", { class: "verdict" }, say("broken", { n: count }), " ", ...buttons, more)];
  }

  // Lay out for the room there is, and return the height that takes.
  fit() {
    const width = Math.max(100, Math.floor(this.frame.clientWidth));
    if (width !== this.width) {
      this.stage.build(width);
      this.table.fit();
      this.keepRoom();
    }
    this.width = width;
    return this.stage.layout.height;
  }

  // Room for the longest sentence, so that nothing below moves when stepping.
  keepRoom() {
    const { words } = this.story.picture;
    this.words.style.minHeight = "";
    // The longest by letters is not always the highest, but one of the longest is.
    const longest = [...new Set(words)].sort((one, other) => other.length - one.length).slice(0, 4);
    const heights = longest.map((text) => {
      this.words.textContent = text;
      return this.words.offsetHeight;
    });
    this.words.style.minHeight = `${Math.max(0, ...heights)}px`;
    this.words.textContent = words[this.number];
  }

  show(shared) {
    const number = Math.min(shared, this.last);
    const from = this.number;
    this.emphasize(null);
    this.number = number;
    this.stage.show(number, from);
    this.table.show(number, from);
    this.describe();
  }

  describe() {
    const { number, story } = this;
    const messages = story.messages(number);
    const failed = story.failures.get(number) || [];
    this.element.classList.toggle("failing", failed.length > 0);
    const place = story.picture.places[number];
    this.heading.textContent = (number === 0 ? say("start") : say("step of", { n: number, last: this.last })) + (place && ` · ${place}`);
    this.words.textContent = story.picture.words[number];
    this.cost.textContent = number === 0 ? say("nothing moved") : story.picture.frames[number].cost;
    const shown = failed.slice(0, LISTED).map(({ words }) => make("li", {}, words));
    if (failed.length > LISTED) shown.push(make("li", {}, say("more", { n: failed.length - LISTED })));
    this.problems.replaceChildren(...shown);
    this.list.replaceChildren(...messages.map((message, index) => this.item(message, index)));
    this.rest();
  }

  item(message, index) {
    const [, , parts] = message;
    const item = make(
      "li",
      { class: opOf(parts), tabindex: index === 0 ? "0" : "-1", "data-message": index },
      this.story.words(message),
    );
    if (parts.length === 1) tint(item, this.story.picture.hues[parts[0][0]]).classList.add("tinted");
    for (const [event, value] of [["pointerenter", index], ["pointerleave", null], ["focus", index], ["blur", null]]) {
      item.addEventListener(event, () => this.emphasize(value));
    }
    return item;
  }

  // Up and down move within the list, so that Tab passes it in one stop.
  walk(event) {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    const next = step && event.target[step];
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  rest() {
    const some = this.story.messages(this.number).length > 0;
    this.hint.textContent = some ? say("point") : "";
    if (this.last === 0) this.hint.textContent = say("one rank");
  }

  emphasize(index) {
    const message = index === null ? null : this.story.messages(this.number)[index];
    if (message === undefined) return;
    this.stage.emphasize(index);
    this.table.emphasize(message);
    for (const item of this.list.querySelectorAll(".hot")) item.classList.remove("hot");
    if (message === null) return this.rest();
    this.list.children[index].classList.add("hot");
    this.hint.textContent = this.story.outcome(message, this.number);
  }
}

export { Panel };
