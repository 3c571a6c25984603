// What algorithms cost: bars at one point, and a map of who wins over all points.

import { draw, make, tint } from "./kit.js";
import { bytesText } from "./amounts.js";

const COLUMNS = ["steps", "messages", "sent", "order"];

// A hue for each algorithm of a collective, the same in bars and map.
function hueOf(algorithms, name) {
  return (250 + (algorithms.indexOf(name) * 360) / algorithms.length) % 360;
}

function section(title) {
  const about = make("p", { class: "about" }), body = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title });
  return { about, body, element: make("section", { class: "card-section" }, make("h2", {}, title), about, body) };
}

function prices({ t, ask }, choose) {
  const { element, about, body } = section(t("prices"));
  async function update({ collective, ranks, root, bytes, network, algorithm, compare, given }, into = [element]) {
    const { rows } = await ask("collectives", "prices", {
      collective: collective.name, ranks, bytes, network, root: collective.rooted ? root : null, ...given,
    }, { into });
    about.textContent = t("prices about", { n: ranks, ranks, bytes: bytesText(bytes), network });
    const most = Math.max(...rows.map(({ seconds }) => seconds)) || 1;
    const head = ["algorithm", "time", ...COLUMNS].map((name) => make("th", { scope: "col" }, t(name)));
    body.replaceChildren(make("table", { class: "prices" }, make("thead", {}, make("tr", {}, ...head)),
      make("tbody", {}, ...rows.map((row) => {
        const shown = row.algorithm === algorithm || row.algorithm === compare;
        const button = make("button", { type: "button", "aria-label": t("show", { name: row.algorithm }), "aria-pressed": String(shown) }, row.algorithm);
        button.addEventListener("click", () => choose(row.algorithm));
        const bar = tint(make("span", { class: "bar" }), hueOf(collective.algorithms, row.algorithm));
        bar.style.setProperty("--part", row.seconds / most);
        return make("tr", { "data-algorithm": row.algorithm, class: shown ? "shown" : null },
          make("th", { scope: "row" }, button), make("td", { class: "time" }, bar, make("span", {}, row.time)),
          make("td", {}, String(row.steps)), make("td", {}, String(row.messages)), make("td", {}, row.sent),
          make("td", { class: "order" }, t(`order ${row.order}`)));
      }))));
  }
  return { element, update };
}

// Where a value lies in a rising list, by the logarithm; within the ends of the list.
function between(list, value) {
  const above = list.findIndex((each) => each >= value);
  if (above <= 0) return above === 0 ? 0 : list.length - 1;
  const [low, high] = [list[above - 1], list[above]].map(Math.log2);
  return above - 1 + (Math.log2(value) - low) / (high - low);
}

const CELL = { width: 44, height: 30, left: 54, top: 8, foot: 44 };

function crossover({ t, ask }, choose) {
  const { element, about, body } = section(t("crossover"));
  const key = make("ul", { class: "key" });
  const told = make("p", { class: "hint", "aria-live": "polite" });
  element.append(key, told);
  about.textContent = t("crossover about");
  let drawn = null, asking = "";
  const wait = () => {
    drawn = null;
    key.replaceChildren();
    told.textContent = "";
    body.replaceChildren(make("p", { class: "about" }, t("computing")));
  };
  wait();
  async function update({ collective, ranks, bytes, network, given }) {
    const asked = { collective: given.collective || collective.name, network };
    if (JSON.stringify(asked) !== asking) wait(); // it takes the server a while
    asking = JSON.stringify(asked);
    const map = await ask("collectives", "crossover", asked, { into: [element] });
    const names = map.algorithms.filter((name) => map.best.flat().some(([[best]]) => best === name));
    key.replaceChildren(...names.map((name) =>
      make("li", {}, tint(make("i", {}), hueOf(collective.algorithms, name)), name)));
    // The same map stays, with the focus in it; only the place in it moves.
    if (map !== drawn) {
      drawn = map;
      told.textContent = "";
      body.replaceChildren(drawing(map, collective));
    }
    const [up, along] = [between(map.ranks, ranks), between(map.bytes, bytes)];
    const here = body.querySelector(".here");
    here.setAttribute("cx", CELL.left + (along + 0.5) * CELL.width);
    here.setAttribute("cy", CELL.top + (map.ranks.length - up - 0.5) * CELL.height);
  }

  function words(map, row, column) {
    const [[best, time], [next, other] = []] = map.best[row][column];
    const point = { ranks: map.ranks[row], bytes: map.labels[column], best, time, next, other };
    return t(next ? "crossover cell" : "crossover alone", point);
  }

  function drawing(map, collective) {
    const { width, height, left, top, foot } = CELL;
    const rows = map.ranks.length, columns = map.bytes.length;
    const high = rows * height + top, wide = left + columns * width + 8;
    const svg = draw("svg", { class: "crossover", viewBox: `0 0 ${wide} ${high + foot}`, role: "group", "aria-label": t("crossover") });
    map.ranks.forEach((size, row) => {
      const y = high - (row + 1) * height;
      svg.append(draw("text", { class: "tick", x: left - 8, y: y + height / 2, dy: "0.35em", "text-anchor": "end" }, String(size)));
      map.bytes.forEach((nbytes, column) => {
        const [[best]] = map.best[row][column];
        const said = words(map, row, column);
        const cell = draw("rect", {
          class: "win", x: left + column * width + 0.5, y: y + 0.5, width: width - 1, height: height - 1, rx: 3,
          role: "button", "aria-label": said, "data-best": best, "data-ranks": size, "data-bytes": nbytes,
          tabindex: row === 0 && column === 0 ? 0 : -1,
        }, draw("title", {}, said));
        tint(cell, hueOf(collective.algorithms, best));
        cell.addEventListener("click", () => choose(size, nbytes));
        cell.addEventListener("pointerenter", () => { told.textContent = said; });
        cell.addEventListener("focus", () => { told.textContent = said; });
        svg.append(cell);
      });
    });
    svg.append(draw("circle", { class: "here", r: 6 })); // where the view stands
    map.labels.forEach((label, column) => {
      if (column % 2) return;
      svg.append(draw("text", { class: "tick", x: left + (column + 0.5) * width, y: high + 16, "text-anchor": "middle" }, label));
    });
    svg.append(
      draw("text", { class: "tick", x: left + (columns * width) / 2, y: high + 34, "text-anchor": "middle" }, t("bytes")),
      draw("text", { class: "tick", transform: `translate(17 ${(high + top) / 2}) rotate(-90)`, "text-anchor": "middle" }, t("ranks")));
    svg.addEventListener("keydown", (event) => walk(event, map));
    return svg;
  }

  // Arrows go from cell to cell, Enter goes there.
  function walk(event, map) {
    const { target } = event, moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };
    if (!target.matches(".win")) return;
    const row = map.ranks.indexOf(Number(target.dataset.ranks)), column = map.bytes.indexOf(Number(target.dataset.bytes));
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      return choose(map.ranks[row], map.bytes[column]);
    }
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const [size, nbytes] = [map.ranks[row + move[0]], map.bytes[column + move[1]]];
    const next = body.querySelector(`[data-ranks="${size}"][data-bytes="${nbytes}"]`);
    if (!next) return;
    target.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }

  return { element, update };
}

export { crossover, prices };
