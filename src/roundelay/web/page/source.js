// Where answers come from: this server. A static site has another file in the place of this one.

// What the server says instead of an answer; the sentence is its own.
class Refused extends Error {
  constructor(status, words) {
    super(words);
    this.status = status;
  }
}

async function read(path, options) {
  let answer;
  try {
    answer = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "");
  }
  const document = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, document.error || answer.statusText);
  return document;
}

// Show the token once; the browser keeps a cookie in its place.
function open(token) {
  return read("session", { headers: { Authorization: `Bearer ${token}` } });
}

function viewList() {
  return read("api/views");
}

function answer(view, question, params, signal) {
  const query = new URLSearchParams(Object.entries(params)).toString();
  return read(`api/${view}/${question}${query && `?${query}`}`, { signal });
}

function send(view, question, params, text, signal) {
  const query = new URLSearchParams(Object.entries(params)).toString();
  const headers = { "Content-Type": "application/json" };
  return read(`api/${view}/${question}?${query}`, { method: "POST", body: text, headers, signal });
}

// Whether what is pasted can be sent anywhere.
const live = true;

export { Refused, answer, live, open, send, viewList };
