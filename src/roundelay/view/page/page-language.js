// The words of a page are in its own language.

import { speak } from "./words.js";

speak(document.documentElement.lang);
