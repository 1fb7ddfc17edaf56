"use strict";

/** [member of the timings, what it is, the kind that colours it]. */
const TIMES = [
  ["queue", "waiting", "before"],
  ["decode_image", "reading the picture", "fetch"],
  ["encode", "looking at it", "load"],
  ["decode", "writing the words", "warm"],
];

const captioning = {
  image: null,
  waiting: false,
  running: null,

  /** Shows a picture and asks for its caption; a picture before it is given up. */
  take(image) {
    this.image = image;
    const preview = byId("preview");
    URL.revokeObjectURL(preview.src);
    preview.src = URL.createObjectURL(image);
    byId("drop").classList.add("full");
    say(byId("or"), "Drop or paste another, or");
    this.ask();
  },

  async ask() {
    this.running?.abort();
    const mine = (this.running = new AbortController());
    this.waiting = false;
    this.show({});
    if (start.report?.state === "starting") return this.wait(start.report.phase);
    this.show({ progress: "Looking…" });
    const began = performance.now();
    // A type that is not an image's would be refused for its name; this way the bytes decide.
    const type = this.image.type.startsWith("image/") ? this.image.type : "application/octet-stream";
    try {
      const options = { method: "POST", body: this.image, headers: { "Content-Type": type }, signal: mine.signal };
      const reply = await api.call("/v1/caption", options);
      this.show({ reply, took: performance.now() - began });
      start.poll();
    } catch (problem) {
      if (mine.signal.aborted) return;
      if (!(problem instanceof Problem)) throw problem;
      if (problem.status === 503 && problem.phase && start.report?.state === "starting") this.wait(problem.phase);
      else this.show({ problem });
    }
  },

  /** Asks once the server is ready. */
  wait(phase) {
    this.waiting = true;
    this.show({ progress: `The server is still starting (${spoken(phase)}). Your picture is next.` });
  },

  onReport(report) {
    if (!this.waiting || report === null) return;
    if (report.state === "starting") this.wait(report.phase);
    else this.ask();
  },

  show({ progress = "", reply = null, problem = null, took = 0 }) {
    // One short sentence for screen readers; the timings are there to be read.
    say(byId("spoken"), reply ? `Caption: ${reply.caption}` : progress);
    byId("placeholder").hidden = true;
    byId("progress").hidden = !progress;
    say(byId("progress"), progress);
    byId("result").hidden = reply === null;
    if (reply) this.result(reply, took);
    byId("problem").hidden = problem === null;
    if (problem) this.problem(problem);
    byId("key-form").hidden = !api.refused;
    if (problem?.status === 401) byId("key").focus();
  },

  result(reply, took) {
    say(byId("caption"), reply.caption || "(an empty caption)");
    const parts = TIMES.map(([name, text, kind]) => ({ text, kind, ms: reply.timings[name] }));
    const whole = Math.max(reply.timings.total, 0.001);
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
    const ended = reply.finish_reason === "length" ? ", cut at the limit" : "";
    say(
      byId("by"),
      `${inMilliseconds(reply.timings.total)} in the server, ${inMilliseconds(took)} in this browser. ` +
        `${reply.tokens} tokens${ended}, by ${reply.model} on ${reply.backend}.`,
    );
  },

  problem(problem) {
    say(byId("problem-title"), problem.title);
    say(byId("problem-detail"), problem.detail);
    say(byId("problem-id"), problem.id && `In the server's log: ${problem.id}`);
    byId("again").hidden = !problem.passes;
  },
};

function take(files) {
  const [file] = files;
  if (file) captioning.take(file);
  else captioning.show({ problem: new Problem("Nothing to look at", "That was not a file. Save the picture first, or copy it and paste it here.", { status: 400 }) });
}

const drop = byId("drop");
byId("choose").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", (event) => {
  if (event.target.files.length) take(event.target.files);
  event.target.value = ""; // the same file may be chosen again
});
byId("again").addEventListener("click", () => captioning.ask());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  api.key = byId("key").value.trim();
  byId("choose").focus();
  start.poll();
  if (captioning.image) captioning.ask();
});
// A link cannot show a key.
for (const link of document.querySelectorAll("a[data-keyed]")) {
  link.addEventListener("click", async (event) => {
    if (!api.key) return;
    event.preventDefault();
    const reply = await api.reply(link.href);
    const saved = element("a", "", { download: link.download || link.pathname.slice(1), href: URL.createObjectURL(await reply.blob()) });
    saved.click();
    URL.revokeObjectURL(saved.href);
  });
}
for (const sample of document.querySelectorAll(".sample")) {
  sample.addEventListener("click", () => captioning.take(inline(sample.firstElementChild.src)));
}
byId("preview").addEventListener("load", () => (byId("preview").hidden = false));
byId("preview").addEventListener("error", () => (byId("preview").hidden = true));

/** The bytes of a data URI, without a request. */
function inline(uri) {
  const [head, data] = uri.split(",");
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  return new Blob([bytes], { type: head.slice(5, head.indexOf(";")) });
}

// The whole page takes a drop: a picture beside the frame must not replace the page.
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  drop.classList.add("over");
});
document.addEventListener("dragleave", (event) => event.relatedTarget ?? drop.classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  take(event.dataTransfer.files);
});
document.addEventListener("paste", (event) => {
  if (event.target instanceof HTMLInputElement) return;
  if (event.clipboardData.files.length) take(event.clipboardData.files);
});

start.listen((report) => captioning.onReport(report));
