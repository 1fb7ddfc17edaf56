"use strict";

// Errors of OpenAI's API have no title.
const TITLES = { 401: "No valid API key", 413: "Body too large", 422: "Unprocessable request", 429: "Too many requests", 503: "Not ready", 504: "Deadline exceeded" };

/** What is shown when something went wrong: the members of a problem, or what comes nearest. */
class Problem extends Error {
  constructor(title, detail, members = {}) {
    super(detail);
    Object.assign(this, { status: 0, code: "", phase: "", reason: "", limit: 0, wait: 0, id: "", late: false }, members, { title, detail });
  }

  /** Of a reply, whichever API's shape its body has. */
  static of(response, body) {
    const said = typeof body?.error === "object" ? body.error : (body ?? {});
    const status = response.status;
    return new Problem(said.title || TITLES[status] || `Status ${status}`, said.detail || said.message || said.error || response.statusText || "The server gave no reason.", {
      status,
      code: said.code || "",
      phase: said.phase || "",
      reason: said.reason || "",
      limit: said.limit || 0,
      wait: Number(response.headers.get("Retry-After")) || 0,
      id: said.request_id || response.headers.get("X-Request-Id") || "",
    });
  }

  /** Whether the same request may succeed later. */
  get passes() {
    return [0, 408, 429, 500, 502, 503, 504].includes(this.status);
  }

  /** Whether there was no reply at all. */
  get lost() {
    return this.status === 0;
  }
}

/** Does work that may take so many milliseconds, or as many again from each call of `again`, and that `signal` may
 * end. Throws what the work throws, a Problem when it is late, and an AbortError at the signal. */
async function within(ms, signal, work) {
  const controller = new AbortController();
  const stop = () => controller.abort();
  let timer = 0;
  let late = false;
  const again = () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      late = true;
      stop();
    }, ms);
  };
  again();
  signal?.addEventListener("abort", stop, { once: true });
  if (signal?.aborted) stop();
  try {
    return await work(controller.signal, again);
  } catch (error) {
    if (error instanceof Problem) throw error;
    if (late) throw new Problem("No answer", `The server has not answered for ${Math.round(ms / 1000)} seconds.`, { late });
    if (error.name === "AbortError") throw error;
    throw new Problem("No answer", "The server closed the connection or cannot be reached.");
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", stop);
  }
}

/** The address of one of the server's paths, such as "/v1/caption", beside this page: a proxy may serve it under a
 * prefix. */
const address = (path) => new URL(`.${path}`, document.baseURI).href;

const api = {
  key: "",
  /** Whether the server asked for a key, or for another one, last. */
  refused: false,

  /** What `read(response, again)` makes of the reply, if it is a good one. Throws what `within` throws. */
  ask(path, { timeout = 10_000, signal, ...options }, read) {
    const { key } = this;
    const headers = { ...options.headers };
    if (key) headers.Authorization = `Bearer ${key}`;
    return within(timeout, signal, async (inner, again) => {
      const response = await fetch(address(path), { ...options, headers, signal: inner });
      if (key === this.key) this.refused = response.status === 401; // a late reply tells nothing of a newer key
      if (!response.ok) throw Problem.of(response, await response.json().catch(() => null));
      return read(response, again);
    });
  },

  call(path, options = {}) {
    return this.ask(path, options, (response) => response.json());
  },

  blob(path, options = {}) {
    return this.ask(path, options, (response) => response.blob());
  },

  /** Calls back with the data of each server-sent event, as text. */
  events(path, options, each) {
    return this.ask(path, options, async (response, again) => {
      const decoder = new TextDecoder();
      const reader = response.body.getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        again();
        const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
        rest = events.pop();
        for (const event of events) each(event.replace(/^data: /, ""));
      }
    });
  },
};
