// The controls: one shared position for all panels, moved by buttons, slider, keys and time.

const PAUSE = 1300;

const byId = (id) => document.getElementById(id);

class Player {
  constructor({ pictures }) {
    const jump = (number) => this.go(number);
    this.panels = pictures.map((picture, index) =>
      new Panel(picture, { titled: pictures.length > 1, index, jump }));
    this.last = Math.max(...this.panels.map((panel) => panel.last));
    this.number = 0;
    this.timer = null;
    byId("panels").append(...this.panels.map((panel) => panel.element));
    byId("panels").className = pictures.length > 1 ? "pair" : "single";
    byId("panels").style.setProperty("--rows", Math.max(...this.panels.map((panel) => panel.rows)));
    if (pictures.length === 1) byId("about").textContent = pictures[0].about;
    byId("slider").max = this.last;
    byId("slider").disabled = this.last === 0;
    this.marks();
    this.connect();
    this.go(0);
  }

  connect() {
    const moves = { first: () => 0, prev: () => this.number - 1, next: () => this.number + 1, last: () => this.last };
    for (const [id, move] of Object.entries(moves)) {
      byId(id).addEventListener("click", () => this.stopAndGo(move()));
    }
    byId("play").addEventListener("click", () => this.toggle());
    byId("slider").addEventListener("input", () => this.stopAndGo(byId("slider").valueAsNumber));
    document.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => requestAnimationFrame(() => this.fit())).observe(byId("panels"));
    this.fit();
  }

  fit() {
    const heights = this.panels.map((panel) => panel.fit());
    const [one, other] = this.panels.map((panel) => panel.element.offsetTop);
    const abreast = one === other;
    // The legend explains what is drawn: bars, one for all, or neither where nothing is added.
    const kinds = new Set(this.panels.map(({ stage }) => stage.signs));
    for (const kind of ["bars", "gauge"]) document.querySelector(`.legend .${kind}`).hidden = !kinds.has(kind);
    this.panels.forEach((panel, index) => {
      panel.stage.frame(panel.width, abreast ? Math.max(...heights) : heights[index]);
    });
  }

  marks() {
    const failing = new Set(this.panels.flatMap((panel) => [...panel.story.failures.keys()]));
    for (const number of failing) {
      const mark = make("i", { "data-frame": number });
      mark.style.setProperty("--at", this.last ? number / this.last : 0);
      byId("marks").append(mark);
    }
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented) return;
    const { target } = event;
    const scrolls = target.matches?.(".scroll") && target.scrollWidth > target.clientWidth;
    if (event.key === " ") {
      // On a button, space presses that button.
      if (target.matches?.("button")) return;
      event.preventDefault();
      return this.toggle();
    }
    const to = { ArrowRight: this.number + 1, ArrowLeft: this.number - 1, Home: 0, End: this.last }[event.key];
    if (to === undefined || scrolls) return;
    event.preventDefault();
    this.stopAndGo(to);
  }

  stopAndGo(number) {
    this.stop();
    this.go(number);
  }

  go(number) {
    this.number = Math.max(0, Math.min(this.last, number));
    for (const panel of this.panels) panel.show(this.number);
    const { last } = this;
    const said = this.number === 0 ? `Start, ${last} ${last === 1 ? "step" : "steps"}` : `Step ${this.number} of ${last}`;
    const failing = this.panels.some((panel) => panel.story.failures.has(this.number));
    byId("status").textContent = failing ? `${said}, fails` : said;
    byId("status").classList.toggle("failing", failing);
    byId("slider").value = this.number;
    byId("slider").setAttribute("aria-valuetext", said);
    byId("slider").style.setProperty("--at", last ? this.number / last : 0);
    for (const id of ["first", "prev"]) this.able(id, this.number > 0);
    for (const id of ["next", "last"]) this.able(id, this.number < last);
    this.able("play", last > 0);
  }

  // Not `disabled`: that would throw a keyboard user's focus away at either end.
  able(id, can) {
    byId(id).setAttribute("aria-disabled", String(!can));
  }

  toggle() {
    if (this.timer !== null) return this.stop();
    if (this.last === 0) return;
    this.go(this.number === this.last ? 0 : this.number + 1);
    this.timer = setInterval(() => {
      this.go(this.number + 1);
      if (this.number === this.last) this.stop();
    }, PAUSE);
    this.playing(true);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.playing(false);
  }

  playing(yes) {
    byId("play").classList.toggle("playing", yes);
    byId("play").setAttribute("aria-label", yes ? "Pause" : "Play");
    byId("play").title = yes ? "Pause (space)" : "Play (space)";
  }
}

new Player(JSON.parse(byId("data").textContent));
