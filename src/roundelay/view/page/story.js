// What every cell holds at every frame, from the frames' changes; nothing is computed here.

import { say } from "./words.js";

class Story {
  constructor(picture) {
    this.picture = picture;
    this.last = picture.frames.length - 1;
    this.size = picture.ranks.length;
    this.history = new Map();
    picture.frames.forEach((frame, number) => {
      for (const [rank, chunk, value, done] of frame.cells) {
        const key = `${rank}-${chunk}`;
        if (!this.history.has(key)) this.history.set(key, []);
        const [text, ranks, short = text] = picture.values[value];
        this.history.get(key).push({ number, text, short, ranks, done: Boolean(done) });
      }
    });
    this.failures = new Map();
    for (const [number, rank, chunk, words] of picture.failures) {
      if (!this.failures.has(number)) this.failures.set(number, []);
      this.failures.get(number).push({ key: `${rank}-${chunk}`, words });
    }
  }

  at(key, number) {
    const entries = this.history.get(key) || [];
    for (let index = entries.length - 1; index >= 0; index--) {
      if (entries[index].number <= number) return entries[index];
    }
    return null;
  }

  entries(key) {
    return this.history.get(key) || [];
  }

  changed(number) {
    if (number === 0) return [];
    return this.picture.frames[number].cells.map(([rank, chunk]) => `${rank}-${chunk}`);
  }

  // Cells that may look different at two frames.
  between(one, other) {
    const keys = new Set();
    for (let number = Math.min(one, other) + 1; number <= Math.max(one, other); number++) {
      for (const key of this.changed(number)) keys.add(key);
    }
    return keys;
  }

  messages(number) {
    return this.picture.frames[number].messages || [];
  }

  // "GPU0 → GPU1: a, b (reduce)"
  words([src, dst, parts]) {
    const { ranks, chunks } = this.picture;
    const groups = ["reduce", "copy"].map((op) => {
      const names = parts.filter((part) => part[1] === op).map((part) => chunks[part[0]]);
      const shown = names.length <= 8 ? names.join(", ") : say("some chunks", { names: names.slice(0, 6).join(", "), n: names.length });
      return names.length ? say(op, { what: shown }) : "";
    });
    return `${ranks[src]} → ${ranks[dst]}: ${groups.filter(Boolean).join(", ")}`;
  }

  // What came of it: the words, then what the receiver holds after the step.
  outcome(message, number) {
    const [, dst, parts] = message;
    const held = parts.slice(0, 4).map(([chunk]) => this.at(`${dst}-${chunk}`, number));
    const texts = held.filter(Boolean).map((entry) => shorten(entry.text, 60));
    if (!texts.length) return this.words(message);
    const more = parts.length > 4 ? ", …" : "";
    return say("then holds", { moved: this.words(message), rank: this.picture.ranks[dst], what: texts.join(", ") + more });
  }
}

function shorten(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

function opOf(parts) {
  const ops = new Set(parts.map((part) => part[1]));
  return ops.size === 1 ? parts[0][1] : "mixed";
}

export { Story, opOf, shorten };
