// Builds elements. Data reaches the page through setAttribute and text nodes only, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function tint(element, hue) {
  element.style.setProperty("--h", hue);
  return element;
}

function calm() {
  return window.matchMedia("(prefers-reduced-motion: reduce)").matches;
}

export { calm, draw, make, tint };
