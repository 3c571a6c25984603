// The address: #/view?name=value, one document, so that it works from a server and from files.

function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const state = Object.fromEntries(new URLSearchParams(query));
  const { lang, ...rest } = state;
  return { name: decoded(path), lang, state: rest };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// A number of the address, within what the page builds of it. What is asked is what the address says:
// the server tells what is wrong with that.
function bounded(text, low, high, usual) {
  return /^\d{1,15}$/.test(text ?? "") ? Math.min(high, Math.max(low, Number(text))) : usual;
}

function compose(name, state, lang) {
  const pairs = Object.entries({ ...state, ...(lang ? { lang } : {}) })
    .filter(([, value]) => value !== null && value !== undefined && value !== "");
  // Names of networks and numbers read better as they are.
  const query = new URLSearchParams(pairs).toString().replaceAll("%2C", ",").replaceAll("%3A", ":");
  return `#/${name}${query && `?${query}`}`;
}

export { bounded, compose, parse };
