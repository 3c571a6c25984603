// One step at a time; which one is in the address.
const sections = [...document.querySelectorAll("section")];
const links = [...document.querySelectorAll("nav a")];
const back = document.getElementById("back");
const next = document.getElementById("next");

function current() {
  const found = sections.findIndex((one) => `#${one.id}` === location.hash);
  return found < 0 ? sections.length - 1 : found;
}

function show() {
  const at = current();
  sections.forEach((one, number) => { one.hidden = number !== at; });
  links.forEach((one, number) => {
    if (number === at) {
      one.setAttribute("aria-current", "step");
      one.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else {
      one.removeAttribute("aria-current");
    }
  });
  back.disabled = at === 0;
  next.disabled = at === sections.length - 1;
}

function go(by) {
  const at = Math.max(0, Math.min(sections.length - 1, current() + by));
  location.hash = sections[at].id;
}

back.addEventListener("click", () => go(-1));
next.addEventListener("click", () => go(1));
document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.target.closest && event.target.closest(".scroll")) return;
  if (event.key === "ArrowLeft") go(-1);
  if (event.key === "ArrowRight") go(1);
});
window.addEventListener("hashchange", show);
show();
