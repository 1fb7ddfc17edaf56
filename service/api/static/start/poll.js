"use strict";

// Links lead to what is beside this page. Some proxies answer with it at a prefix without its slash.
if (location.protocol !== "file:" && !location.pathname.endsWith("/")) history.replaceState(null, "", `${location.pathname}/${location.search}${location.hash}`);

// A page says within two seconds that its server is gone: a pause and a poll that nobody answers are less.
const PAUSES = { starting: 200, moving: 500, ready: 900, gone: 900, hidden: 10_000 };
const POLL_TIMEOUT = 1000;

const start = {
  /** The model that was chosen; "" is the server's start, and its first model. */
  model: "",
  report: null,
  problem: null,
  listeners: [],
  timer: 0,
  polling: null,

  /** Calls back with every report, and with null and the problem when the server does not answer. */
  listen(listener) {
    this.listeners.push(listener);
  },

  /** Asks once, whoever wants it meanwhile, and then again after a pause. */
  poll() {
    this.polling ??= this.ask().finally(() => (this.polling = null));
    return this.polling;
  },

  async ask() {
    clearTimeout(this.timer);
    try {
      this.report = await api.call(`/startup${this.model && `?${new URLSearchParams({ model: this.model })}`}`, { cache: "no-store", timeout: POLL_TIMEOUT });
      this.problem = null;
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      this.report = null;
      this.problem = problem;
    }
    for (const listener of this.listeners) listener(this.report, this.problem);
    clearTimeout(this.timer);
    const pause = this.pause();
    if (pause) this.timer = setTimeout(() => this.poll(), pause);
  },

  /** Milliseconds until the next look; 0: none. Often while something moves; while nobody sees the page seldom, and
   * only if something does. */
  pause() {
    if (api.refused) return 0;
    const moves = isStarting(this.report) || isMoving(this.report) || ["waking", "leaving"].includes(this.report?.state);
    if (document.hidden) return moves ? PAUSES.hidden : 0;
    if (this.report === null) return PAUSES.gone;
    if (isStarting(this.report)) return PAUSES.starting;
    return moves ? PAUSES.moving : PAUSES.ready;
  },
};

const isStarting = (report) => report?.state === "starting";
/** Whether a background build, or the swap of its buckets, is under way. */
const isMoving = (report) => ["building", "waiting"].includes(report?.build?.state);
const isCompiled = (backend) => Boolean(backend) && !["eager", "mixed"].includes(backend);

document.addEventListener("visibilitychange", () => document.hidden || start.poll());
