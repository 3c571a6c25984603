// The shell: finds the views, shows the one that the address names, in the reader's language.

import { draw, make } from "./kit.js";
import { phrase, speak } from "./words.js";
import { Player, keys } from "./player.js";
import { Refused, answer, live, open, send, viewList } from "./source.js";
import { compose, parse } from "./address.js";
import * as controls from "./controls.js";
import * as theme from "./theme.js";
import * as trouble from "./trouble.js";
import { words } from "./shell-words.js";

const START = "start"; // what went wrong before there was a view, and stays
const LANGUAGES = { en: "English", zh: "中文" };

const byId = (id) => document.getElementById(id);
const shell = { views: new Map(), chosen: null, shown: null, language: "en", say: (key, values) => phrase(words[shell.language], key, values) };

function preferred() {
  const found = (navigator.languages || [navigator.language]).find((tag) => /^(en|zh)\b/i.test(tag));
  return found && /^zh/i.test(found) ? "zh" : "en";
}

function told(error) {
  if (!(error instanceof Refused)) return String(error.message || error);
  if (error.status === 0) return shell.say("no server");
  if (error.status === 503) return shell.say("busy");
  return error.status === 401 ? shell.say("no token") : error.message;
}

// Questions of one view: answers are kept, and only the last of one kind counts.
class Asker {
  constructor(language) {
    this.language = language;
    this.kept = new Map();
    this.lines = new Map();
    this.control = new AbortController();
    this.turn = 0; // states that were shown so far
    this.over = false;
  }

  // `fresh` asks again for what may have changed since; `into` are the places of the answer.
  ask(view, question, params = {}, { slot = question, fresh = false, into = [] } = {}) {
    const given = Object.fromEntries(Object.entries({ ...params, lang: this.language })
      .filter(([, value]) => value !== undefined && value !== null && value !== ""));
    const key = JSON.stringify([view, question, given]);
    return this.only(`${view}/${slot}`, async (signal) => {
      if (fresh || !this.kept.has(key)) this.kept.set(key, await answer(view, question, given, signal));
      return this.kept.get(key);
    }, into);
  }

  send(view, question, text) {
    return this.only(`${view}/${question}`, (signal) => send(view, question, { lang: this.language }, text, signal));
  }

  // One question of a slot is under way at a time. Of those that wait for its end only the newest is
  // asked; the others never come back. So a slider that is dragged does not flood the server.
  async only(slot, work, into = []) {
    const line = this.lines.get(slot) || { newest: null, busy: Promise.resolve() };
    this.lines.set(slot, line);
    const mine = (line.newest = {}), { turn } = this;
    const current = () => !this.over && line.newest === mine;
    const never = new Promise(() => {});
    await line.busy;
    if (!current()) return never;
    const asked = work(this.control.signal);
    line.busy = asked.then(() => {}, () => {});
    try {
      const document = await asked;
      if (!current()) return never;
      trouble.clear(slot);
      return document;
    } catch (error) {
      if (!current()) return never;
      if (turn === this.turn) trouble.tell(slot, told(error), into); // else of a state that is gone
      error.shown = true;
      throw error;
    }
  }

  leave() {
    this.over = true;
    this.control.abort();
  }
}

// An error that the reader has been told of is no news for the console.
window.addEventListener("unhandledrejection", (event) => {
  if (event.reason?.shown) event.preventDefault();
});

function toolsFor(view, state, asker) {
  const tools = {
    state,
    language: shell.language,
    live,
    t: (key, values) => phrase(view.words[shell.language], key, values),
    ask: (name, question, params, options) => asker.ask(name, question, params, options),
    send: (name, question, text) => asker.send(name, question, text),
    // Change the address, then what is seen; `quiet` leaves what is seen to the view.
    set(changes, { quiet = false } = {}) {
      Object.assign(tools.state, Object.fromEntries(Object.entries(changes)
        .map(([name, value]) => [name, value === null || value === undefined ? value : String(value)])));
      for (const [name, value] of Object.entries(tools.state)) if (value === null || value === undefined || value === "") delete tools.state[name];
      history.replaceState(null, "", compose(view.name, tools.state, shell.chosen));
      refreshLinks();
      if (!quiet) refresh(tools);
    },
    // What the page itself reads of the address: one of those that are known, else the first; then the
    // address says so, too.
    one(name, known) {
      const given = tools.state[name];
      if (given !== undefined && !known.includes(given)) tools.set({ [name]: null }, { quiet: true });
      return known.includes(given) ? given : known[0];
    },
    step() {
      const given = tools.state.step ?? "0";
      if (/^\d{1,6}$/.test(given)) return Number(given);
      tools.set({ step: null }, { quiet: true });
      return 0;
    },
    link: (name, target = {}) => compose(name, target, shell.chosen),
    make, draw, controls, Player, keys,
  };
  return tools;
}

// Show the state anew, of a view that is there. What is refused has been told; the view stays, to be
// asked for something else.
async function refresh(tools) {
  const { shown } = shell;
  if (shown?.tools !== tools || !shown.handle) return;
  const before = trouble.all().filter(([slot]) => slot !== START);
  shown.asker.turn += 1;
  try {
    await shown.handle.update(tools.state);
  } catch (error) {
    if (!error.shown) throw error;
  } finally {
    trouble.forget(before);
  }
}

async function show() {
  if (location.hash.startsWith("#token=")) return location.reload();
  const { name, lang, state } = parse(location.hash);
  const known = [...shell.views.keys()];
  shell.chosen = Object.hasOwn(LANGUAGES, lang ?? "") ? lang : shell.chosen;
  const language = shell.chosen || preferred();
  const view = shell.views.get(name || known[0]);
  if (!known.length) return;
  if (lang !== undefined && lang !== shell.chosen) history.replaceState(null, "", compose(name, state, shell.chosen));
  if (shell.shown?.handle && shell.shown.view === view && shell.shown.asker.language === language) {
    const { tools } = shell.shown;
    Object.keys(tools.state).forEach((key) => delete tools.state[key]);
    Object.assign(tools.state, state);
    return refresh(tools);
  }
  const moved = shell.shown && shell.shown.view !== view;
  shell.shown?.asker.leave();
  shell.shown?.handle?.unmount?.();
  shell.shown = null;
  trouble.forget(trouble.all().filter(([slot]) => slot !== START));
  shell.language = language;
  if (!view) {
    frame(null);
    byId("main").replaceChildren();
    return trouble.tell("address", shell.say("no view", { name }));
  }
  speak(language);
  frame(view);
  const root = make("div", { class: `view-${view.name}` });
  const asker = new Asker(language);
  const tools = toolsFor(view, state, asker);
  const shown = { view, asker, tools, handle: null };
  shell.shown = shown;
  byId("main").replaceChildren(root);
  if (moved) {
    byId("main").focus({ preventScroll: true });
    window.scrollTo(0, 0);
  }
  const handle = await view.mount(root, tools);
  if (shell.shown !== shown) return handle.unmount?.();
  shown.handle = handle;
  await refresh(tools);
}

function titleOf(view) {
  return view.words[shell.language].title;
}

// Everything around the view, in the current language.
function frame(view) {
  document.documentElement.lang = shell.language === "zh" ? "zh-CN" : "en";
  document.title = view ? `${titleOf(view)} · Roundelay` : "Roundelay";
  document.querySelector(".skip").textContent = shell.say("skip");
  byId("views").setAttribute("aria-label", shell.say("views"));
  byId("views").replaceChildren(...[...shell.views.values()].map((each) =>
    make("a", { "data-view": each.name, "aria-current": each === view ? "page" : null }, titleOf(each))));
  byId("views").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  const language = controls.segments({
    label: shell.say("language"),
    options: [["en", "EN"], ["zh", "中"]],
    value: shell.language,
    change: (to) => {
      shell.chosen = to;
      const { name, state } = parse(location.hash);
      history.replaceState(null, "", compose(name, state, to));
      show();
    },
  });
  language.element.querySelectorAll("input").forEach((input) => input.setAttribute("aria-label", LANGUAGES[input.value]));
  byId("settings").replaceChildren(language.element, themeButton());
  refreshLinks();
}

function refreshLinks() {
  for (const link of byId("views").children) {
    const own = link.dataset.view === shell.shown?.view.name;
    link.href = compose(link.dataset.view, own ? shell.shown.tools.state : {}, shell.chosen);
  }
}

const SIGNS = {
  system: "M12 3a9 9 0 1 0 0 18a9 9 0 1 0 0-18zM12 5v14a7 7 0 1 1 0-14z",
  light: "M12 7a5 5 0 1 0 0 10a5 5 0 1 0 0-10zM11 1h2v4h-2zM11 19h2v4h-2zM1 11h4v2h-4zM19 11h4v2h-4zM4.2 5.6l1.4-1.4l2.8 2.8l-1.4 1.4zM15.6 17l1.4-1.4l2.8 2.8l-1.4 1.4zM4.2 18.4l2.8-2.8l1.4 1.4l-2.8 2.8zM15.6 7l2.8-2.8l1.4 1.4l-2.8 2.8z",
  dark: "M20 14.5A8.5 8.5 0 0 1 9.5 4A8.5 8.5 0 1 0 20 14.5z",
};

function themeButton() {
  const path = draw("path", { "fill-rule": "evenodd" });
  const button = make("button", { type: "button", class: "theme" }, draw("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, path));
  const name = () => {
    const said = `${shell.say("theme")}: ${shell.say(`theme ${theme.chosen()}`)}`;
    button.setAttribute("aria-label", said);
    button.title = said;
    path.setAttribute("d", SIGNS[theme.chosen()]);
  };
  button.addEventListener("click", () => {
    theme.choose(theme.THEMES[(theme.THEMES.indexOf(theme.chosen()) + 1) % theme.THEMES.length]);
    name();
  });
  name();
  return button;
}

// A view is a module of its name; its style, where it has one, is there before it is drawn.
async function load({ name, style }) {
  const styled = style && new Promise((done) => {
    const link = make("link", { rel: "stylesheet", href: `${name}.css` });
    link.addEventListener("load", done);
    link.addEventListener("error", done);
    document.head.append(link);
  });
  try {
    const [{ view }] = await Promise.all([import(`./${name}.js`), styled]);
    return view;
  } catch {
    trouble.tell(START, shell.say("broken view", { name }));
    return null;
  }
}

// Digits go to views, where nobody is writing.
function key(event) {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.matches?.("input, select, textarea")) return;
  const link = /^[1-9]$/.test(event.key) && byId("views").children[Number(event.key) - 1];
  if (link) link.click();
}

async function start() {
  shell.language = parse(location.hash).lang === "zh" ? "zh" : preferred();
  theme.apply();
  window.addEventListener("hashchange", show);
  const [, token, rest = "/"] = location.hash.match(/^#token=(\w+)(\/.*)?$/) || [];
  try {
    if (token) {
      history.replaceState(null, "", `#${rest}`);
      await open(token);
    }
    const { views } = await viewList();
    for (const view of await Promise.all(views.map(load))) if (view) shell.views.set(view.name, view);
  } catch (error) {
    return trouble.tell(START, told(error));
  }
  theme.apply(); // to styles that came since
  document.addEventListener("keydown", key);
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
  await show();
}

start();
