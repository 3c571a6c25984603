// Text in which `words like these` are code.

import { make } from "./kit.js";

function coded(text) {
  return text.split("`").map((part, at) => (at % 2 ? make("code", { class: "command" }, part) : part));
}

export { coded };
