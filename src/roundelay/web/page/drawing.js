// Drawings that Python made, the same that `explain` writes: markup and rules come apart, since the
// page's policy allows no style in markup, and each drawing has a root of its own for its rules.

import { make } from "./kit.js";
import { adopt } from "./theme.js";

class Drawing {
  constructor() {
    this.element = make("div", { class: "drawing" });
    this.root = this.element.attachShadow({ mode: "open" });
    this.let = () => {};
  }

  // `style` belongs to the drawing; `more` are rules of the page's own.
  show({ svg, style }, more = "") {
    const parsed = new DOMParser().parseFromString(svg, "image/svg+xml").documentElement;
    if (parsed.nodeName !== "svg") throw new Error("this is no drawing");
    parsed.removeAttribute("width");
    parsed.removeAttribute("height");
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(`:host{display:block}svg{display:block;width:100%;height:auto}.page{fill:none}${style}svg .page{fill:none}${more}`);
    this.let();
    this.let = adopt(sheet);
    this.root.adoptedStyleSheets = [sheet];
    this.root.replaceChildren(document.importNode(parsed, true));
    this.svg = this.root.firstElementChild;
  }

  leave() {
    this.let();
  }
}

export { Drawing };
