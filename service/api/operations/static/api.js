"use strict";

/** What is shown when something went wrong: the members of a problem, or what comes nearest. */
class Problem extends Error {
  constructor(title, detail, { status = 0, phase = "", id = "" } = {}) {
    super(detail);
    Object.assign(this, { title, detail, status, phase, id });
  }

  /** Whether the same request may succeed later. */
  get passes() {
    return [0, 408, 429, 500, 502, 503, 504].includes(this.status);
  }
}

const api = {
  key: "",
  /** Whether the server asked for a key, or for another one, last. */
  refused: false,

  /** The reply, if it is a good one. Throws Problem, or the AbortError of a signal. */
  async reply(path, options = {}) {
    const headers = { ...options.headers };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem("No answer", "The server closed the connection or cannot be reached.");
    }
    this.refused = response.status === 401;
    if (response.ok) return response;
    const body = await response.json().catch(() => null);
    throw new Problem(body?.title || `Status ${response.status}`, body?.detail || response.statusText, {
      status: response.status,
      phase: body?.phase,
      id: response.headers.get("X-Request-Id") || "",
    });
  },

  async call(path, options) {
    const reply = await this.reply(path, options);
    return reply.json();
  },
};

const byId = (id) => document.getElementById(id);

/** An element with a class, attributes (`text` is its text) and children. */
function element(name, className = "", { text = "", ...attributes } = {}, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
}

/** Writes a text only when it differs, so that screen readers hear each once. */
function say(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// With a no-break space before the unit.
const inSeconds = (seconds) => `${seconds.toFixed(seconds < 10 ? 2 : 1)}\u00a0s`;
const inMilliseconds = (ms) => (ms < 999.5 ? `${ms.toFixed(ms < 9.95 ? 1 : 0)}\u00a0ms` : inSeconds(ms / 1000));
