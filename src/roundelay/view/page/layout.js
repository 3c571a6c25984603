// Where the ranks' cards go when nothing else is known: around a closed curve, or in rows.

const MARGIN = 14;

// So many ranks still go around a curve.
const CURVED = 24;

// Cells from this size have a letter; below the other, they are a single square that deepens.
const LETTER = 14;
const TINY = 8;

// A card is a name over a grid of cells.
function cardShape(slots, cell, nameLength) {
  const columns = slots <= 6 ? slots : slots <= 8 ? 4 : Math.ceil(Math.sqrt(slots));
  const rows = Math.ceil(slots / columns);
  const gap = cell >= 10 ? 3 : 1;
  const font = Math.max(7, Math.min(13, Math.round(cell * 0.6)));
  const pad = cell >= 14 ? 9 : cell >= 8 ? 5 : 3;
  const across = columns * cell + (columns - 1) * gap;
  return {
    cell, gap, columns, font, pad,
    inset: Math.max(0, (nameLength * font * 0.62 - across) / 2),
    top: pad + font + (cell >= 10 ? 5 : 2),
    width: Math.max(across, nameLength * font * 0.62) + 2 * pad,
    height: pad + font + (cell >= 10 ? 5 : 2) + rows * cell + (rows - 1) * gap + pad,
  };
}

// Points at equal distances along a superellipse: an ellipse for few, a racetrack for many.
function around(count, rx, ry) {
  const start = count === 2 ? Math.PI : -Math.PI / 2;
  const power = count <= 12 ? 1 : 0.5;
  const bow = (value) => Math.sign(value) * Math.abs(value) ** power;
  const samples = [];
  let length = 0;
  for (let index = 0; index <= 1440; index++) {
    const angle = start + (index / 1440) * 2 * Math.PI;
    const point = { x: rx * bow(Math.cos(angle)), y: ry * bow(Math.sin(angle)) };
    const before = samples[index - 1];
    if (before) length += Math.hypot(point.x - before.x, point.y - before.y);
    samples.push({ ...point, length });
  }
  let at = 0;
  return Array.from({ length: count }, (_, index) => {
    const wanted = (length * index) / count;
    while (samples[at + 1].length < wanted) at++;
    const { [at]: one, [at + 1]: other } = samples;
    const share = (wanted - one.length) / (other.length - one.length || 1);
    return { x: one.x + share * (other.x - one.x), y: one.y + share * (other.y - one.y) };
  });
}

function roomy(points, card, gap) {
  for (let one = 0; one < points.length; one++) {
    for (let other = one + 1; other < points.length; other++) {
      const dx = Math.abs(points[one].x - points[other].x) - card.width;
      const dy = Math.abs(points[one].y - points[other].y) - card.height;
      if (Math.max(dx, dy) < gap) return false;
    }
  }
  return true;
}

function place(count, card, width, height) {
  const ry = (height - card.height) / 2 - MARGIN;
  const widest = count === 2 ? 220 : count <= 12 ? Math.max(1.55 * ry, 120) : Infinity;
  const rx = Math.min((width - card.width) / 2 - MARGIN, widest);
  if (count > 1 && (rx < 10 || ry < 10)) return null;
  if (count === 1) return [{ x: width / 2, y: height / 2 }];
  const flat = count === 2 ? 0 : ry;
  const points = around(count, rx, flat);
  // Arrows need room to be seen between cards, most of all on a small screen.
  const gap = count > 12 ? 34 : width < 600 ? 52 : 60;
  if (!roomy(points, card, gap)) return null;
  return points.map(({ x, y }) => ({ x: x + width / 2, y: y + height / 2 }));
}

// Prefer large cells in a low picture, then smaller cells, and only then a taller picture.
function ring(count, slots, nameLength, width) {
  if (count > CURVED) return snake(count, slots, nameLength, width);
  const largest = slots === 1 ? 44 : slots <= 3 ? 36 : 30;
  const low = width < 600 ? 480 : width < 900 ? 500 : 560;
  const tall = width < 600 ? 860 : 650;
  const rounds = [[largest, 20, low], [20, 16, 1.1 * low], [20, 14, tall], [12, 6, 1.1 * tall]];
  for (const [from, to, tallest] of rounds) {
    for (let cell = Math.min(from, largest); cell >= to; cell -= 2) {
      const card = cardShape(slots, cell, nameLength);
      const least = count <= 2 ? card.height + 110 : Math.max(0.8 * low, card.height * 2 + 90);
      for (let height = least; height <= Math.max(tallest, least); height += 40) {
        const points = place(count, card, width, height);
        if (points) return { card, points, height };
      }
    }
  }
  return snake(count, slots, nameLength, width);
}

// Rows that turn at their ends, so that neighbours stay neighbours.
function snake(count, slots, nameLength, width) {
  for (let cell = 20; ; cell--) {
    const card = cardShape(slots, cell, nameLength);
    const gap = cell >= TINY ? 30 : 18;
    const fitting = Math.floor((width - 2 * MARGIN + gap) / (card.width + gap));
    const rows = Math.ceil(count / Math.max(1, fitting));
    const columns = Math.ceil(count / rows);
    const height = rows * (card.height + gap) - gap + 2 * MARGIN;
    if (cell > 2 && (fitting < 1 || height > (width < 600 ? 1100 : 640))) continue;
    const left = (width - columns * (card.width + gap) + gap + card.width) / 2;
    const points = Array.from({ length: count }, (_, index) => {
      const row = Math.floor(index / columns), along = index % columns;
      const column = row % 2 ? columns - 1 - along : along;
      return {
        x: left + column * (card.width + gap),
        y: MARGIN + card.height / 2 + row * (card.height + gap),
      };
    });
    return { card, points, height };
  }
}

export { LETTER, MARGIN, TINY, cardShape, ring };
