// Where cards go when the schedule has a shape: hosts as rows, trees by level, chains in a line.

import { MARGIN, cardShape, ring } from "./layout.js";

// A layout: the shape of a card, where each card stands and for which chunks, and what frames them.
function arrange(story, width) {
  const { picture, size } = story;
  const { hosts, trees, line } = picture.shape;
  const most = Math.max(1, ...picture.slots.map((slots) => slots.length));
  const names = Math.max(...picture.ranks.map((name) => Math.min(name.length, 14)));
  const found =
    (trees.length && forest(trees, picture, names, width)) ||
    (hosts.length && racks(hosts, picture.shape.names, most, names, width)) ||
    (line && row(size, most, names, width, returns(picture.frames))) ||
    ring(size, most, names, width);
  const { points, ...layout } = found;
  layout.stations ||= points.map((point, rank) => ({ ...point, rank, slots: picture.slots[rank] }));
  layout.where = new Map();
  for (const station of layout.stations) {
    for (const chunk of station.slots) layout.where.set(`${station.rank}-${chunk}`, station);
    if (!layout.where.has(station.rank)) layout.where.set(station.rank, station);
  }
  return layout;
}

// Whether anything ever goes back down the line.
function returns(frames) {
  return frames.some(({ messages = [] }) => messages.some(([src, dst]) => src > dst));
}

// Sizes of cells to try, from the largest on.
function* sizes(from, to) {
  for (let cell = from; cell >= to; cell -= 2) yield cell;
}

// All in one row, or one column, with room for arrows that pass over others; null if neither fits.
function row(count, slots, nameLength, width, back) {
  const passing = 30 + 7 * Math.min(count - 2, 14);
  for (const cell of sizes(36, 14)) {
    const card = cardShape(slots, cell, nameLength);
    const gap = (width - 2 * MARGIN - count * card.width) / Math.max(1, count - 1);
    if (gap < 34) continue;
    const step = card.width + Math.min(gap, 90);
    const height = card.height + (back ? 2 : 1) * passing + 2 * MARGIN;
    const left = width / 2 - (step * (count - 1)) / 2, y = MARGIN + passing + card.height / 2;
    const points = Array.from({ length: count }, (_, at) =>
      ({ x: left + at * step, y, row: 0, column: at, grid: true }));
    return { card, points, height };
  }
  if (count > 12) return null;
  const card = cardShape(slots, slots > 6 ? 16 : 24, nameLength);
  const step = card.height + 40;
  if (card.width + 2 * passing > width) return null;
  const points = Array.from({ length: count }, (_, at) =>
    ({ x: width / 2, y: MARGIN + card.height / 2 + at * step, row: at, column: 0, grid: true }));
  return { card, points, height: count * step - 40 + 2 * MARGIN };
}

// A host is a box with its ranks in a row, so that ranks with the same place stand in columns.
function racks(hosts, names, slots, nameLength, width) {
  const widest = Math.max(...hosts.map((ranks) => ranks.length));
  const size = hosts.reduce((sum, ranks) => sum + ranks.length, 0);
  // Beside the boxes, room for arrows that pass over hosts.
  const title = 24, pad = 12, aside = 2 * MARGIN + 2 * pad + (hosts.length > 2 ? 24 + 12 * hosts.length : 0);
  for (const cell of sizes(slots > 6 ? 26 : 32, 8)) {
    const card = cardShape(slots, cell, nameLength);
    const least = width < 600 ? 34 : 44;
    const fitting = Math.floor((width - aside + least) / (card.width + least));
    // As many lines as it takes, and alike.
    const lines = Math.ceil(widest / Math.max(1, Math.min(widest, fitting)));
    const columns = Math.min(fitting, Math.ceil(widest / lines));
    const arch = 22 + 8 * Math.max(0, Math.min(columns, 8) - 2);
    const inside = lines * card.height + (lines - 1) * 2 * arch;
    const step = title + inside + 2 * arch + 34;
    const height = hosts.length * step - 34 + 2 * MARGIN;
    if (columns < Math.min(widest, 2) || (cell > 14 && (lines > 1 || height > 900))) continue;
    const gap = Math.min(columns > 4 ? 100 : 170, (width - aside - columns * card.width) / Math.max(1, columns - 1));
    const across = columns * card.width + (columns - 1) * gap;
    const left = (width - across) / 2;
    const points = Array(size), boxes = [];
    hosts.forEach((ranks, host) => {
      const top = MARGIN + host * step;
      boxes.push({ x: left - pad, y: top, width: across + 2 * pad, height: step - 34, name: names[host] });
      ranks.forEach((rank, place) => {
        const line = Math.floor(place / columns), column = place % columns;
        points[rank] = {
          x: left + card.width / 2 + column * (card.width + gap),
          y: top + title + arch + card.height / 2 + line * (card.height + 2 * arch),
          row: host * lines + line, column, grid: true,
        };
      });
    });
    return { card, points, height, boxes };
  }
  return null;
}

// Trees by level, from top to bottom, or from left to right where the room is narrow.
function forest(trees, picture, nameLength, width) {
  const shapes = trees.map(([root, parents, chunks]) => levels(root, parents, chunks, picture));
  const most = Math.max(...shapes.map(({ slots }) => Math.max(1, ...slots.map((mine) => mine.length))));
  for (const abreast of [shapes.length, 1]) {
    for (const cell of sizes(most === 1 ? 36 : 30, 14)) {
      const card = cardShape(most, cell, nameLength);
      for (const upright of [true, false]) {
        if (!upright && (abreast > 1 || width >= 700)) continue;
        const found = planted(shapes, card, abreast, upright, width);
        if (found) return found;
      }
    }
  }
  return null;
}

// Leaves side by side, every parent over the middle of its children.
function levels(root, parents, chunks, picture) {
  const children = parents.map(() => []);
  parents.forEach((parent, rank) => { if (parent !== null) children[parent].push(rank); });
  const spots = [], stack = [[root, 0, false]];
  let leaves = 0, deepest = 0;
  while (stack.length) {
    const [rank, depth, seen] = stack.pop();
    deepest = Math.max(deepest, depth);
    if (children[rank].length === 0) spots[rank] = { along: leaves++, depth };
    else if (seen) {
      const below = children[rank].map((child) => spots[child].along);
      spots[rank] = { along: (Math.min(...below) + Math.max(...below)) / 2, depth };
    } else {
      stack.push([rank, depth, true], ...children[rank].map((child) => [child, depth + 1, false]).reverse());
    }
  }
  const among = new Set(chunks);
  const slots = picture.slots.map((mine) => mine.filter((chunk) => among.has(chunk)));
  return { spots, parents, leaves, deepest, slots };
}

function planted(shapes, card, abreast, upright, width) {
  const narrow = width < 600;
  const beside = upright ? (narrow ? 10 : 22) : 26, between = upright ? 62 : 34;
  const [wide, high] = upright ? [card.width, card.height] : [card.height, card.width];
  const leaves = Math.max(...shapes.map((shape) => shape.leaves));
  const deepest = Math.max(...shapes.map((shape) => shape.deepest));
  const apart = abreast > 1 ? 40 : 0;
  const across = upright ? (width - 2 * MARGIN - apart * (abreast - 1)) / abreast : 0;
  const step = upright ? Math.min((across + beside) / leaves, wide + 90) : wide + beside;
  const level = upright ? high + between : Math.min((width - 2 * MARGIN - high) / Math.max(1, deepest), high + 90);
  if (step < wide + beside || level < high + (upright ? between : 30)) return null;
  const [spanned, deep] = [step * leaves - beside, level * deepest + high];
  const each = upright ? deep : spanned;
  const stations = [], edges = [];
  shapes.forEach(({ spots, parents, slots, leaves: own }, index) => {
    const shift = (step * (leaves - own)) / 2;
    const corner = upright
      ? { x: abreast > 1 ? MARGIN + index * (across + apart) + (across - spanned) / 2 : (width - spanned) / 2, y: MARGIN + (abreast > 1 ? 0 : index * (each + 48)) }
      : { x: (width - deep) / 2, y: MARGIN + index * (each + 40) };
    const at = spots.map(({ along, depth }) => {
      const a = shift + along * step + wide / 2, d = depth * level + high / 2;
      return upright ? { x: corner.x + a, y: corner.y + d } : { x: corner.x + d, y: corner.y + a };
    });
    at.forEach((point, rank) => stations.push({ ...point, rank, slots: slots[rank], tree: index }));
    parents.forEach((parent, rank) => { if (parent !== null) edges.push([at[parent], at[rank]]); });
  });
  const rows = abreast > 1 ? 1 : shapes.length;
  return { card, stations, edges, height: rows * each + (rows - 1) * (upright ? 48 : 40) + 2 * MARGIN };
}

export { arrange };
