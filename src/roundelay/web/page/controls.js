// Labelled controls, alike in every view: each has an `element`, a `value`, and calls `change`.

import { make } from "./kit.js";

let count = 0;

// A label over a control; `hint` is said below it.
function labelled(label, control, { wide = false, hint = "", aside = null } = {}) {
  const id = `control-${++count}`;
  control.id = id;
  const head = make("span", { class: "control-head" }, make("label", { for: id }, label), ...(aside ? [aside] : []));
  const element = make("div", { class: wide ? "control wide" : "control" }, head, control);
  if (hint) {
    control.setAttribute("aria-describedby", `${id}-hint`);
    element.append(make("small", { id: `${id}-hint` }, hint));
  }
  return element;
}

// One of `options`: pairs of a value and what to call it.
function select({ label, options, value, change, hint }) {
  const control = make("select");
  const made = {
    element: labelled(label, control, { hint }),
    get value() { return control.value; },
    set value(to) { control.value = to; },
    set options(pairs) {
      const kept = control.value;
      control.replaceChildren(...pairs.map(([name, words]) => make("option", { value: name }, words)));
      if (pairs.some(([name]) => name === kept)) control.value = kept;
    },
  };
  made.options = options;
  if (value !== undefined) control.value = value;
  control.addEventListener("change", () => change(control.value));
  return made;
}

// A whole number; `change` hears of those within the range only.
function number({ label, value, low, high, change, hint }) {
  const control = make("input", { type: "number", min: low, max: high, step: 1, value, inputmode: "numeric" });
  control.addEventListener("input", () => {
    if (control.value !== "" && control.checkValidity()) change(control.valueAsNumber);
  });
  control.addEventListener("change", () => {
    const within = Math.min(high, Math.max(low, Math.round(control.valueAsNumber) || low));
    if (within !== control.valueAsNumber) change((control.value = within));
  });
  return {
    element: labelled(label, control, { hint }),
    get value() { return control.valueAsNumber; },
    set value(to) { if (document.activeElement !== control) control.value = to; },
    set high(to) { control.max = high = to; },
  };
}

// A place on a range; `text` says what it stands for.
function slider({ label, value, low, high, step = 1, text = String, change, hint }) {
  const control = make("input", { type: "range", class: "range", min: low, max: high, step, value });
  const said = make("output", { class: "control-value" });
  const show = () => {
    said.textContent = text(control.valueAsNumber);
    control.setAttribute("aria-valuetext", said.textContent);
    control.style.setProperty("--at", (control.valueAsNumber - control.min) / (control.max - control.min || 1));
  };
  const element = labelled(label, control, { hint, aside: said });
  said.setAttribute("for", control.id);
  control.addEventListener("input", () => { show(); change(control.valueAsNumber); });
  show();
  return {
    element,
    get value() { return control.valueAsNumber; },
    set value(to) { control.value = to; show(); },
    set high(to) { control.max = to; show(); },
  };
}

// On or off.
function toggle({ label, value, change }) {
  const control = make("input", { type: "checkbox", role: "switch" });
  control.checked = Boolean(value);
  control.addEventListener("change", () => change(control.checked));
  return {
    element: make("label", { class: "toggle" }, control, make("span", {}, label)),
    get value() { return control.checked; },
    set value(to) { control.checked = Boolean(to); },
  };
}

// A text; `change` hears of it when it is done, by Enter or by leaving.
function field({ label, value = "", placeholder = "", change, hint, wide = true }) {
  const control = make("input", { type: "text", value, placeholder, spellcheck: "false", autocomplete: "off" });
  control.addEventListener("change", () => change(control.value));
  return {
    element: labelled(label, control, { hint, wide }),
    get value() { return control.value; },
    set value(to) { if (document.activeElement !== control) control.value = to; },
  };
}

// A few choices side by side, of which one holds.
function segments({ label, options, value, change }) {
  const name = `control-${++count}`;
  const inputs = options.map(([key, words]) => {
    const control = make("input", { type: "radio", name, value: key });
    control.checked = key === value;
    control.addEventListener("change", () => change(key));
    return [control, make("label", {}, control, make("span", {}, words))];
  });
  return {
    element: make("fieldset", { class: "segments" }, make("legend", {}, label), ...inputs.map(([, element]) => element)),
    get value() { return inputs.find(([control]) => control.checked)?.[0].value; },
    set value(to) { for (const [control] of inputs) control.checked = control.value === to; },
  };
}

// A row of controls.
function row(...controls) {
  return make("div", { class: "controls" }, ...controls.map((control) => control.element || control));
}

export { field, number, row, segments, select, slider, toggle };
