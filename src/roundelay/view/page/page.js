// The page that is one file: its pictures are in it, and it speaks the language it was written in.

import { speak } from "./words.js";
import { Deck } from "./deck.js";
import { keys } from "./player.js";

const byId = (id) => document.getElementById(id);

speak(document.documentElement.lang);
const { pictures } = JSON.parse(byId("data").textContent);
const deck = new Deck(pictures);
if (pictures.length === 1) byId("about").textContent = pictures[0].about;
byId("player").replaceWith(deck.player.element);
byId("main").append(deck.element);
byId("foot").append(deck.legend, keys());
deck.start();
