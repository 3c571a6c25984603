// The page of a cut product: one frame in the light, moved by buttons, slider, keys and time.

const PAUSE = 2600;

const byId = (id) => document.getElementById(id);
const { frames } = JSON.parse(byId("data").textContent);
const last = frames.length - 1;
let number = 0;
let timer = null;

function go(to) {
  number = Math.max(0, Math.min(last, to));
  const [title, words] = frames[number];
  byId("words").textContent = words;
  byId("status").textContent = title;
  byId("slider").value = number;
  byId("slider").setAttribute("aria-valuetext", title);
  byId("slider").style.setProperty("--at", number / last);
  for (const frame of document.querySelectorAll(".frame")) {
    frame.classList.toggle("away", number > 0 && Number(frame.dataset.frame) !== number);
  }
  // Not `disabled`: that would throw a keyboard user's focus away at either end.
  for (const id of ["first", "prev"]) byId(id).setAttribute("aria-disabled", String(number === 0));
  for (const id of ["next", "last"]) byId(id).setAttribute("aria-disabled", String(number === last));
}

function playing(yes) {
  byId("play").classList.toggle("playing", yes);
  byId("play").setAttribute("aria-label", yes ? "Pause" : "Play");
  byId("play").title = yes ? "Pause (space)" : "Play (space)";
}

function stop() {
  clearInterval(timer);
  timer = null;
  playing(false);
}

function stopAndGo(to) {
  stop();
  go(to);
}

function toggle() {
  if (timer !== null) return stop();
  go(number === last ? 0 : number + 1);
  timer = setInterval(() => {
    go(number + 1);
    if (number === last) stop();
  }, PAUSE);
  playing(true);
}

const moves = { first: () => 0, prev: () => number - 1, next: () => number + 1, last: () => last };
for (const [id, move] of Object.entries(moves)) byId(id).addEventListener("click", () => stopAndGo(move()));
byId("play").addEventListener("click", toggle);
byId("slider").max = last;
byId("slider").addEventListener("input", () => stopAndGo(byId("slider").valueAsNumber));
document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented) return;
  if (event.key === " ") {
    // On a button, space presses that button.
    if (event.target.matches?.("button")) return;
    event.preventDefault();
    return toggle();
  }
  const to = { ArrowRight: number + 1, ArrowLeft: number - 1, Home: 0, End: last }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  stopAndGo(to);
});
go(0);
