// What went wrong, as a sentence. It stands alone: where the answer would be shown is hidden until
// there is one, so that nothing of another state is taken for it.

const known = new Map(); // by the question's slot: the sentence, and the places of its answer
let aside = new Set();

function tell(slot, sentence, places = []) {
  known.delete(slot);
  known.set(slot, { sentence, places });
  show();
}

function clear(slot) {
  if (known.delete(slot)) show();
}

function all() {
  return [...known];
}

// Let go of those that were told for a state that is gone, unless they were told again.
function forget(told) {
  for (const [slot, one] of told) if (known.get(slot) === one) known.delete(slot);
  show();
}

function show() {
  const [first] = known.values(), element = document.getElementById("trouble");
  if (element.textContent !== (first?.sentence ?? "")) element.textContent = first?.sentence ?? "";
  element.hidden = !first;
  const now = new Set([...known.values()].flatMap(({ places }) => places));
  for (const place of aside) place.classList.toggle("refused", now.has(place));
  for (const place of now) place.classList.add("refused");
  aside = now;
}

export { all, clear, forget, tell };
