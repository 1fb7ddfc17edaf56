"use strict";

/** [member of the timings, what it is, the kind that colours it]. */
const TIMES = [
  ["queue", "waiting", "before"],
  ["decode_image", "reading the picture", "fetch"],
  ["encode", "looking at it", "load"],
  ["decode", "writing the words", "warm"],
];

/** One picture with its caption, large. */
const panel = {
  picture: null,
  waiting: false,
  running: null,
  caption: "",

  /** Shows a picture and asks for its caption; a picture before it is given up. */
  take(file) {
    this.running?.abort();
    this.waiting = false;
    this.picture = file;
    const preview = byId("preview");
    URL.revokeObjectURL(preview.src);
    preview.src = URL.createObjectURL(file);
    byId("drop").classList.add("full");
    say(byId("or"), "Drop or paste others, or");
    byId("recaption").disabled = false;
    this.ask();
  },

  async ask() {
    const wanted = options.read();
    if (wanted === null || this.picture === null) return;
    this.running?.abort();
    this.running = null;
    this.waiting = false;
    if (isStarting(start.report)) return this.wait(start.report.phase);
    const mine = (this.running = new AbortController());
    this.show({ progress: "Looking…" });
    const began = performance.now();
    const picture = new Picture(this.picture, wanted);
    let text = "";
    try {
      const onText = (caption) => {
        text = caption;
        if (!mine.signal.aborted) this.show({ progress: "Looking…", text });
      };
      picture.reply = await captionOf(picture, mine.signal, onText);
      if (mine.signal.aborted) return; // by who has shown something else since
      picture.state = "done";
      this.show({ reply: picture.reply, took: performance.now() - began, notice: picture.notice });
      const { naturalWidth, naturalHeight } = byId("preview");
      regions.draw(picture.reply.regions, picture.size ?? [naturalWidth, naturalHeight]);
      gallery.add([picture]);
      start.poll();
    } catch (problem) {
      if (mine.signal.reason === "stopped") this.show({ text, notice: text ? "Stopped." : "Stopped before the first word." });
      if (mine.signal.aborted) return;
      if (!(problem instanceof Problem)) throw problem;
      if (problem.status === 503 && isStarting(start.report)) this.wait(problem.phase || start.report.phase);
      else this.show({ problem });
    } finally {
      if (this.running === mine) this.running = null;
      byId("stop").hidden = this.running === null;
    }
  },

  /** Asks once the server is ready. */
  wait(phase) {
    this.waiting = true;
    this.show({ progress: `The server is still starting (${spoken(phase)}). Your picture is next.` });
  },

  stop() {
    this.waiting = false;
    if (this.running) this.running.abort("stopped");
    else this.show({ notice: "Stopped before the first word." });
  },

  onReport(report) {
    if (!this.waiting || report === null) return;
    if (report.state === "starting") this.wait(report.phase);
    else this.ask();
  },

  /** Shows one of these, and nothing of what was there before: what is being done, with the text so far; a reply; a
   * problem. */
  show({ progress = "", text = "", reply = null, took = 0, notice = "", problem = null }) {
    // One short sentence for screen readers; the timings are there to be read.
    say(byId("spoken"), reply ? `Caption: ${reply.caption}` : text ? "" : progress || notice);
    byId("placeholder").hidden = true;
    byId("progress").hidden = !progress || Boolean(text);
    say(byId("progress"), progress);
    byId("result").hidden = reply === null && !text;
    say(byId("caption"), reply ? reply.caption || "(an empty caption)" : text);
    this.caption = reply?.caption ?? "";
    byId("caption").classList.toggle("writing", Boolean(progress && text));
    byId("measured").hidden = reply === null;
    if (reply) this.measured(reply, took);
    say(byId("notice"), notice);
    regions.draw(null, []);
    byId("stop").hidden = !progress;
    copyCaption.hidden = reply === null;
    this.problem(problem);
  },

  measured(reply, took) {
    const { timings } = reply;
    byId("times").hidden = byId("legend").hidden = !timings;
    if (timings) this.times(timings);
    const ended = reply.finish_reason === "length" ? ", cut at the limit" : "";
    const server = timings ? `${inMilliseconds(timings.total)} in the server, ` : "";
    const by = `model ${reply.model}${reply.backend ? `, ${served(reply.backend)}` : ""}`;
    say(byId("by"), `${server}${inMilliseconds(took)} in this browser. ${counted(reply.tokens, "token")}${ended}, ${by}.`);
  },

  times(timings) {
    const parts = TIMES.map(([name, text, kind]) => ({ text, kind, ms: timings[name] }));
    const whole = Math.max(timings.total, 0.001);
    byId("times").replaceChildren(
      ...parts.map(({ kind, ms }) => {
        const bar = element("span", "", { "data-kind": kind });
        bar.style.setProperty("--for", ms / whole);
        return bar;
      }),
    );
    byId("legend").replaceChildren(
      ...parts.map(({ text, kind, ms }) =>
        element("div", "", { "data-kind": kind }, element("dt", "", { text }), element("dd", "", { text: inMilliseconds(ms) })),
      ),
    );
  },

  problem(problem) {
    keyForm.update();
    byId("problem").hidden = problem === null;
    if (problem === null) return;
    say(byId("problem-title"), problem.title);
    say(byId("problem-detail"), problem.detail);
    say(byId("problem-id"), problem.id && `In the server's log: ${problem.id}`);
    byId("again").hidden = !problem.passes || this.picture === null;
    if (problem.status === 401) keyForm.focus();
  },
};

const copyCaption = copyButton(() => panel.caption, "Copy", "Copy the caption");
copyCaption.id = "copy";
copyCaption.hidden = true;
byId("actions").append(copyCaption);
byId("stop").addEventListener("click", () => panel.stop());
byId("again").addEventListener("click", () => panel.ask());
byId("options-form").addEventListener("submit", (event) => {
  event.preventDefault();
  panel.ask();
});
byId("preview").addEventListener("load", () => (byId("preview").hidden = false));
byId("preview").addEventListener("error", () => (byId("preview").hidden = true));
keyForm.listen(async () => {
  byId("choose").focus();
  const asked = start.poll();
  panel.ask();
  await asked;
  // Without a picture, only the look at the start says whether the key is valid.
  if (panel.picture === null) panel.problem(start.problem?.status === 401 ? start.problem : null);
});
start.listen((report) => panel.onReport(report));
start.listen(() => keyForm.update());
