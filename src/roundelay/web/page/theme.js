// Light or dark, by the system or by choice. Styles say `prefers-color-scheme: dark`; where a reader
// chooses, these rules are turned on or off, in every style that is there.

const KEY = "roundelay-theme";
const THEMES = ["system", "light", "dark"];
const touched = new Map();
const adopted = new Set(); // styles of drawings, which are in no document

function chosen() {
  try {
    const found = localStorage.getItem(KEY);
    return THEMES.includes(found) ? found : "system";
  } catch {
    return "system"; // a browser that keeps nothing
  }
}

function* darkRules(rules) {
  for (const rule of rules) {
    if (rule instanceof CSSMediaRule) {
      if (touched.has(rule) || rule.media.mediaText.includes("prefers-color-scheme: dark")) yield rule;
      else yield* darkRules(rule.cssRules);
    }
  }
}

function apply(theme = chosen()) {
  for (const sheet of [...document.styleSheets, ...adopted]) {
    for (const rule of darkRules(sheet.cssRules)) {
      if (!touched.has(rule)) touched.set(rule, rule.media.mediaText);
      rule.media.mediaText = { system: touched.get(rule), light: "not all", dark: "all" }[theme];
    }
  }
  document.documentElement.style.colorScheme = theme === "system" ? "" : theme;
}

function choose(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // It holds for this page, then.
  }
  apply(theme);
}

// Make a style follow the theme; the function that comes back lets go of it.
function adopt(sheet) {
  adopted.add(sheet);
  apply();
  return () => adopted.delete(sheet);
}

export { THEMES, adopt, apply, choose, chosen };
