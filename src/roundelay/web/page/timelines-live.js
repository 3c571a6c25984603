// The job that runs now: a line for each rank, looked at again while the page is seen.

import { make } from "./kit.js";

const EVERY = 1500; // milliseconds between looks
const START = "roundelay run -n 2 train.py";

class LiveJobs {
  constructor(tools) {
    Object.assign(this, { tools, timer: null, wanted: false });
    this.jobs = make("div", { class: "jobs" });
    this.element = make("section", { class: "live", hidden: true }, this.jobs, make("p", { class: "hint" }, tools.t("refreshed")));
    this.seen = () => this.look();
  }

  watch(yes) {
    this.element.hidden = !yes;
    if (yes === this.wanted) return;
    this.wanted = yes;
    clearTimeout(this.timer);
    document[yes ? "addEventListener" : "removeEventListener"]("visibilitychange", this.seen);
    if (yes) this.look();
  }

  // Look, draw, and look again after a while; not while nobody sees it.
  async look() {
    clearTimeout(this.timer);
    if (!this.wanted || document.visibilityState !== "visible") return;
    try {
      this.draw((await this.tools.ask("timelines", "live", {}, { fresh: true, into: [this.jobs] })).jobs);
    } catch (error) {
      if (!error.shown) throw error;
    }
    if (this.wanted) this.timer = setTimeout(() => this.look(), EVERY);
  }

  draw(jobs) {
    const { t } = this.tools;
    if (!jobs.length) return this.jobs.replaceChildren(make("div", { class: "card-section" }, make("p", {}, t("no job")), make("pre", {}, START)));
    this.jobs.replaceChildren(...jobs.map((job) => this.job(job)));
  }

  job(job) {
    const { t } = this.tools, said = make("h2", {}, t("job", { n: job.job }), make("code", {}, brief(job.command)));
    if (job.refused) return make("section", { class: "card-section" }, said, make("p", {}, job.refused));
    const rate = job.ranks.reduce((sum, one) => sum + one.bytes_per_second, 0) / 1e9;
    const head = ["rank", "step", "GB/s", "does", "call", "line"].map((name) => make("th", { scope: "col" }, name === "GB/s" ? name : t(name)));
    const told = [job.trouble, job.hangs].filter(Boolean).map((words) => make("p", { class: "verdict", role: "status" }, words));
    return make("section", { class: "card-section" }, said, make("p", { class: "about" }, t("alive", { ranks: job.ranks.length, rate: rate.toFixed(2) })), ...told,
      make("div", { class: "scroll", tabindex: 0 }, make("table", { class: "plain words-too" }, make("thead", {}, make("tr", {}, ...head)),
        make("tbody", {}, ...job.ranks.map((one) => this.rank(one, job))))));
  }

  rank(one, job) {
    const { t } = this.tools;
    const late = one.rank === job.straggler || ["stopped", "dead"].includes(one.state);
    const time = one.waited_seconds.toFixed(1);
    const waits = one.waits_for !== null && one.state !== "stopped";
    const does = !waits ? t(`state ${one.state}`) : one.waits_for < 0 ? t("waits for any", { time }) : t("waits for", { n: one.waits_for, time });
    const [what, ...rest] = one.call.split(" ");
    const call = [what + (one.number ? ` #${one.number}` : ""), ...rest, one.group].join(" ").trim();
    const idle = ["computes", "stopped", "dead"].includes(one.state) && one.call;
    const name = make("th", { scope: "row" }, String(one.rank), ...(late ? [make("span", { class: "mark", title: t("straggler"), role: "img", "aria-label": t("straggler") }, "◀")] : []));
    return make("tr", { class: late ? "late" : null, "data-state": one.state }, name,
      ...[one.step ?? "–", (one.bytes_per_second / 1e9).toFixed(2), does, idle ? t("last call", { call }) : call, one.site.split("/").slice(-2).join("/")].map((cell) => make("td", {}, String(cell))));
  }
}

// The program and its options, without folders and the interpreter.
function brief(command) {
  const parts = command.split(" ");
  while (parts.length > 1 && /(^|\/)python[\d.]*$/.test(parts[0])) parts.shift();
  return [parts[0].split("/").at(-1), ...parts.slice(1)].join(" ").slice(0, 80);
}

export { LiveJobs };
