// Where answers come from in a static site: files, each a script that hands over one answer.

class Refused extends Error {
  constructor(status, words) {
    super(words);
    this.status = status;
  }
}

const { entries, usual, views, missing } = window.roundelaySite;
const waiting = new Map();
const same = (one, other) => String(one) === String(other) || (one !== "" && other !== "" && Number(one) === Number(other));

window.roundelayAnswer = (name, document) => waiting.get(name)?.(document);

function open() {
  return Promise.resolve();
}

function viewList() {
  return Promise.resolve({ views });
}

// The file whose answer is to this question: what is not given is as usual, on both sides.
function fileFor(question, params) {
  const found = (entries[question] || []).find(([, given, which]) => {
    const plain = usual[which];
    const whole = { ...plain, ...given };
    return Object.keys(params).every((name) => name in whole) &&
      Object.entries(whole).every(([name, value]) => same(params[name] ?? plain[name] ?? "", value));
  });
  return found?.[0];
}

function answer(view, question, params) {
  const file = fileFor(`${view}/${question}`, params);
  if (!file) return Promise.reject(new Refused(404, missing[params.lang] || missing.en));
  return new Promise((done, failed) => {
    const script = document.createElement("script");
    waiting.set(file, (found) => {
      waiting.delete(file);
      script.remove();
      done(found);
    });
    script.addEventListener("error", () => failed(new Refused(404, missing[params.lang] || missing.en)));
    script.src = `answers/${file}.js`;
    document.head.append(script);
  });
}

function send(view, question, { lang }) {
  return Promise.reject(new Refused(404, missing[lang] || missing.en));
}

const live = false;

export { Refused, answer, live, open, send, viewList };
