// Arrows between cards: how they bend, where they begin and end, where their labels sit.

// From border to border of two cards, bent to the left so that there and back lie apart; with a
// center, bent towards that instead, away from the cards between the two.
function arc(from, to, card, center) {
  const dx = to.x - from.x, dy = to.y - from.y, far = Math.hypot(dx, dy) || 1;
  const left = !center || dy * (center.x - from.x) - dx * (center.y - from.y) >= 0;
  const bend = (over(from, to, card) || Math.min(0.14 * far, 46)) * (left ? 1 : -1);
  const via = { x: (from.x + to.x) / 2 + (dy / far) * bend, y: (from.y + to.y) / 2 - (dx / far) * bend };
  const slanted = from.grid && from.row !== to.row && from.column !== to.column;
  const [start, end] = slanted
    ? [edge(from, dy, card, 3), edge(to, -dy, card, 5)]
    : [border(from, via, card, 3), border(to, via, card, 5)];
  return { start, via, end, d: `M${num(start.x)} ${num(start.y)}Q${num(via.x)} ${num(via.y)} ${num(end.x)} ${num(end.y)}` };
}

// Where ranks stand in rows and columns, an arrow past others in line goes over them.
function over(from, to, card) {
  if (!from.grid) return 0;
  const across = Math.abs(to.column - from.column), down = Math.abs(to.row - from.row);
  if (down === 0 && across > 1) return card.height + 16 + 14 * (across - 1);
  if (across === 0 && down > 1) return card.width + 16 + 12 * (down - 1);
  return 0;
}

// The middle of the edge above or below, so that a slanted arrow keeps clear of neighbours.
function edge(center, toward, card, gap) {
  return { x: center.x, y: center.y + Math.sign(toward) * (card.height / 2 + gap) };
}

function border(center, toward, card, gap) {
  const dx = toward.x - center.x, dy = toward.y - center.y;
  const reach = Math.min(
    (card.width / 2 + gap) / Math.max(Math.abs(dx), 1e-6),
    (card.height / 2 + gap) / Math.max(Math.abs(dy), 1e-6),
  );
  return { x: center.x + dx * reach, y: center.y + dy * reach };
}

function along({ start, via, end }, t) {
  const mix = (axis) => (1 - t) ** 2 * start[axis] + 2 * t * (1 - t) * via[axis] + t ** 2 * end[axis];
  return { x: mix("x"), y: mix("y") };
}

// Where a label sits: on a long arrow, beside a short one; near the source where arrows cross.
function beside(curve, near) {
  const { start, via, end } = curve;
  const far = Math.hypot(end.x - start.x, end.y - start.y);
  const middle = along(curve, near ? 0.45 : 0.27);
  if (far >= 50) return middle;
  const dx = via.x - (start.x + end.x) / 2, dy = via.y - (start.y + end.y) / 2;
  const away = 15 / (Math.hypot(dx, dy) || 1);
  return { x: middle.x + dx * away, y: middle.y + dy * away };
}

function num(value) {
  return Math.round(value * 10) / 10;
}

export { arc, beside, num };
