// The page of a cut product: one frame in the light.

import { Player, keys } from "./player.js";

const byId = (id) => document.getElementById(id);
const { frames } = JSON.parse(byId("data").textContent);

const player = new Player({
  last: frames.length - 1,
  pause: 2600,
  show(number) {
    const [title, words] = frames[number];
    byId("words").textContent = words;
    for (const frame of document.querySelectorAll(".frame")) {
      frame.classList.toggle("away", number > 0 && Number(frame.dataset.frame) !== number);
    }
    return title;
  },
});
byId("player").replaceWith(player.element);
byId("foot").append(keys());
player.go(0);
