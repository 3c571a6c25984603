// A pasted schedule: proved, or shown at the step that breaks it.

import { make } from "./kit.js";

// `show` draws what came of it, or nothing.
function proof(tools, show) {
  const { t } = tools;
  const text = make("textarea", { id: "pasted", rows: 12, spellcheck: "false", autocomplete: "off" });
  const verdict = make("p", { class: "proof", role: "status" });
  const buttons = ["prove", "take this", "break it"].map((key) =>
    make("button", { type: "button", id: key.replace(" ", "-"), class: key === "prove" ? "main" : null }, t(key)));
  const element = make("section", { class: "card-section own" },
    ...(tools.live
      ? [make("label", { for: "pasted" }, t("schedule")), text, make("div", { class: "actions" }, ...buttons), verdict]
      : [make("p", { class: "about" }, t("not live"))]));
  let at = null;

  function tell(words, kind) {
    verdict.textContent = words;
    verdict.className = `proof ${kind}`;
  }

  // Put one of ours in; where nobody asked for it, not over what was typed meanwhile, nor into a
  // field that somebody is about to paste into: both texts would be sent, as one.
  async function take(broken, { asked: wanted = true } = {}) {
    const { collective, algorithm, ranks, root, given } = at;
    const { bytes, network, ...rest } = given;
    const asked = { collective: collective.name, algorithm, ranks, root: collective.rooted ? root : null, ...rest, broken };
    const found = await tools.ask("collectives", "text", asked);
    if (!wanted && (text.value !== "" || document.activeElement === text)) return;
    text.value = found.text;
    tell("", "");
  }

  async function prove() {
    tell(t("proving"), "");
    const found = await tools.send("collectives", "proof", text.value).catch((error) => {
      tell("", "");
      show(null);
      throw error;
    });
    const told = { ...found, step: found.first, order: found.order && t(`in ${found.order}`) };
    if (found.proved) tell(t(found.order ? "proved order" : "proved", told), "good");
    else tell(t("refuted", told), "bad");
    show(found);
  }

  const [proving, taking, breaking] = buttons;
  proving.addEventListener("click", prove);
  taking.addEventListener("click", () => take("no"));
  breaking.addEventListener("click", () => take("yes"));
  return {
    element,
    // Begin with the schedule that was shown, unless something is there.
    async begin(now) {
      at = now;
      if (tools.live && text.value === "") await take("no", { asked: false });
    },
    forget: () => tell("", ""),
  };
}

export { proof };
