// The controls: one position in a list of frames, moved by buttons, slider, keys and time.

import { draw, make } from "./kit.js";
import { say } from "./words.js";

const PAUSE = 1300;

const SIGNS = {
  first: ["M6 5h2.5v14H6zM19 5v14l-9.5-7z"],
  prev: ["M16 5v14l-9.5-7z"],
  play: ["M8 4.5v15l12-7.5z", "M7 5h3.5v14H7zM13.5 5H17v14h-3.5z"],
  next: ["M8 5v14l9.5-7z"],
  last: ["M15.5 5H18v14h-2.5zM5 5v14l9.5-7z"],
};

// Where keys mean something else: Space presses a button, arrows move in a field.
const FIELDS = "input:not(#slider), select, textarea, [role=slider], [role=tab]";

class Player {
  // Frames count from 0 to `last`; `show` draws one and may return what to call it.
  constructor({ last, show, failing = [], pause = PAUSE }) {
    this.last = last;
    this.draw = show;
    this.failing = new Set(failing);
    this.pause = pause;
    this.number = 0;
    this.timer = null;
    this.buttons = Object.fromEntries(Object.keys(SIGNS).map((id) => [id, this.button(id)]));
    this.slider = make("input", { id: "slider", type: "range", min: 0, max: last, step: 1, value: 0, "aria-label": say("slider"), disabled: last === 0 });
    this.marks = make("div", { id: "marks", "aria-hidden": "true" });
    this.status = make("output", { id: "status", for: "slider", "aria-live": "polite" });
    this.element = make("div", { class: "player", role: "group", "aria-label": say("player") },
      make("div", { class: "buttons" }, ...Object.values(this.buttons)),
      make("div", { class: "track" }, this.slider, this.marks), this.status);
    for (const number of this.failing) {
      const mark = make("i", { "data-frame": number });
      mark.style.setProperty("--at", last ? number / last : 0);
      this.marks.append(mark);
    }
    const moves = { first: () => 0, prev: () => this.number - 1, next: () => this.number + 1, last: () => this.last };
    for (const [id, move] of Object.entries(moves)) {
      this.buttons[id].addEventListener("click", () => this.stopAndGo(move()));
    }
    this.buttons.play.addEventListener("click", () => this.toggle());
    this.slider.addEventListener("input", () => this.stopAndGo(this.slider.valueAsNumber));
    this.listener = (event) => this.key(event);
    document.addEventListener("keydown", this.listener);
  }

  button(id) {
    const signs = SIGNS[id].map((d, at) =>
      draw("path", { d, class: id === "play" ? ["when-paused", "when-playing"][at] : null }));
    const title = id === "play" ? say("by space", { what: say("play") }) : say(id);
    return make("button", { id, type: "button", "aria-label": say(id), title },
      draw("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, ...signs));
  }

  // Stop listening, and time: what is shown goes away.
  leave() {
    this.stop();
    document.removeEventListener("keydown", this.listener);
  }

  // What is hidden stands still.
  get seen() {
    return this.element.getClientRects().length > 0;
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented) return;
    const { target } = event;
    if (target.matches?.(FIELDS) || !this.seen) return;
    const scrolls = target.matches?.(".scroll") && target.scrollWidth > target.clientWidth;
    if (event.key === " ") {
      // On a button, space presses that button.
      if (target.matches?.("button, a, summary")) return;
      event.preventDefault();
      return this.toggle();
    }
    const to = { ArrowRight: this.number + 1, ArrowLeft: this.number - 1, Home: 0, End: this.last }[event.key];
    if (to === undefined || scrolls) return;
    event.preventDefault();
    this.stopAndGo(to);
  }

  stopAndGo(number) {
    this.stop();
    this.go(number);
  }

  go(number) {
    const { last } = this;
    this.number = Math.max(0, Math.min(last, number));
    const own = this.draw(this.number);
    const said = own ?? (this.number === 0 ? say("start of", { n: last }) : say("step of", { n: this.number, last }));
    const failing = this.failing.has(this.number);
    this.status.textContent = failing ? say("fails", { said }) : said;
    this.status.classList.toggle("failing", failing);
    this.slider.value = this.number;
    this.slider.setAttribute("aria-valuetext", said);
    this.slider.style.setProperty("--at", last ? this.number / last : 0);
    for (const id of ["first", "prev"]) this.able(id, this.number > 0);
    for (const id of ["next", "last"]) this.able(id, this.number < last);
    this.able("play", last > 0);
  }

  // Not `disabled`: that would throw a keyboard user's focus away at either end.
  able(id, can) {
    this.buttons[id].setAttribute("aria-disabled", String(!can));
  }

  toggle() {
    if (this.timer !== null) return this.stop();
    if (this.last === 0) return;
    this.go(this.number === this.last ? 0 : this.number + 1);
    this.timer = setInterval(() => {
      if (!this.seen) return this.stop();
      this.go(this.number + 1);
      if (this.number === this.last) this.stop();
    }, this.pause);
    this.playing(true);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.playing(false);
  }

  playing(yes) {
    const { play } = this.buttons, what = say(yes ? "pause" : "play");
    play.classList.toggle("playing", yes);
    play.setAttribute("aria-label", what);
    play.title = say("by space", { what });
  }
}

function keys() {
  const key = (name) => make("kbd", {}, name);
  return make("p", { class: "keys" },
    key("←"), " ", key("→"), ` ${say("to step")} · `, key("Home"), " ", key("End"), ` ${say("to jump")} · `,
    key(say("space")), ` ${say("to play")}`);
}

export { Player, keys };
