// The address: #/view?name=value, one document, so that it works from a server and from files.

function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const state = Object.fromEntries(new URLSearchParams(query));
  const { lang, ...rest } = state;
  return { name: decodeURIComponent(path), lang, state: rest };
}

function compose(name, state, lang) {
  const pairs = Object.entries({ ...state, ...(lang ? { lang } : {}) })
    .filter(([, value]) => value !== null && value !== undefined && value !== "");
  // Names of networks and numbers read better as they are.
  const query = new URLSearchParams(pairs).toString().replaceAll("%2C", ",").replaceAll("%3A", ":");
  return `#/${name}${query && `?${query}`}`;
}

export { compose, parse };
