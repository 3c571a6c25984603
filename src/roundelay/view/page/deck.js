// One picture, or two side by side, under one player, with the legend of what is drawn.

import { draw, make } from "./kit.js";
import { say } from "./words.js";
import { Panel } from "./panel.js";
import { Player } from "./player.js";

class Deck {
  // `at` is the frame to begin with; `moved` is told where the player stands.
  constructor(pictures, { at = 0, moved = () => {} } = {}) {
    const jump = (number) => this.player.stopAndGo(number);
    this.panels = pictures.map((picture, index) =>
      new Panel(picture, { titled: pictures.length > 1, index, jump }));
    this.element = make("div", { id: "panels", class: pictures.length > 1 ? "pair" : "single" },
      ...this.panels.map((panel) => panel.element));
    this.element.style.setProperty("--rows", Math.max(...this.panels.map((panel) => panel.rows)));
    this.legend = legend();
    this.player = new Player({
      last: Math.max(...this.panels.map((panel) => panel.last)),
      failing: this.panels.flatMap((panel) => [...panel.story.failures.keys()]),
      show: (number) => {
        for (const panel of this.panels) panel.show(number);
        moved(number);
      },
    });
    this.at = at;
    this.sizes = new ResizeObserver(() => requestAnimationFrame(() => this.fit()));
  }

  // Once it is in the page: lay out for the room there is, and show the first frame.
  start() {
    this.fit();
    this.player.go(this.at);
    this.sizes.observe(this.element);
  }

  leave() {
    this.sizes.disconnect();
    this.player.leave();
  }

  fit() {
    const heights = this.panels.map((panel) => panel.fit());
    const [one, other] = this.panels.map((panel) => panel.element.offsetTop);
    const abreast = one === other;
    // The legend explains what is drawn: bars, one for all, or neither where nothing is added.
    const kinds = new Set(this.panels.map(({ stage }) => stage.signs));
    for (const kind of ["bars", "gauge"]) this.legend.querySelector(`.${kind}`).hidden = !kinds.has(kind);
    this.panels.forEach((panel, index) => {
      panel.stage.frame(panel.width, abreast ? Math.max(...heights) : heights[index]);
    });
  }
}

function legend() {
  const spot = (d, done) => draw("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" },
    draw("g", { class: done ? "spot done" : "spot" },
      draw("rect", { class: "base", x: 2, y: 2, width: 20, height: 20, rx: 4 }), draw("path", { class: "fill", d })));
  const arrow = (op) => draw("svg", { class: "long", viewBox: "0 0 56 24", "aria-hidden": "true" },
    draw("g", { class: `arrow ${op}` },
      draw("path", { class: "line", d: "M3 12H44" }), draw("path", { class: "head", d: "M43 6.5L54 12L43 17.5z" })));
  return make("ul", { class: "legend", "aria-label": say("legend") },
    make("li", { class: "bars", hidden: true }, spot("M4 12h3v9h-3zM12 12h3v9h-3z"), say("bars")),
    make("li", { class: "gauge", hidden: true }, spot("M4 12h7v9h-7z"), say("gauge")),
    make("li", {}, spot("M3 3h18v18h-18z", true), say("finished")),
    make("li", {}, arrow("reduce"), make("b", {}, "+a"), " ", say("added")),
    make("li", {}, arrow("copy"), make("b", {}, "a"), " ", say("replaced")));
}

export { Deck };
