"use strict";

const MOST_PICTURES = 200;
const THUMB = { side: 320, bytes: 64 << 10 };

const isOpen = ({ state }) => state === "waiting" || state === "sent";

/** The pictures of this visit: newest first, those that came together in their order. */
const gallery = {
  pictures: [],
  cards: new Map(),
  thumbs: Promise.resolve(),

  /** Those that were taken: as many as there is room for, once what is older and over is gone. */
  add(pictures) {
    const over = this.pictures.filter((picture) => !isOpen(picture));
    const room = MOST_PICTURES - (this.pictures.length - over.length);
    const taken = pictures.slice(0, room);
    for (const old of over.slice(room - taken.length)) this.drop(old);
    this.pictures = [...taken, ...this.pictures];
    const cards = taken.map((picture) => this.card(picture));
    byId("gallery").prepend(...cards.map(({ root }) => root));
    for (const picture of taken) this.update(picture);
    return taken;
  },

  has(picture) {
    return this.cards.has(picture);
  },

  drop(picture) {
    const card = this.cards.get(picture);
    this.cards.delete(picture);
    this.pictures = this.pictures.filter((each) => each !== picture);
    card.root.remove();
    URL.revokeObjectURL(card.image.src);
  },

  clear() {
    for (const picture of [...this.pictures]) this.drop(picture);
    this.draw();
  },

  card(picture) {
    const image = element("img", "", { alt: "", loading: "lazy" });
    const said = element("p", "said", { dir: "auto" });
    const copies = copyButton(() => picture.reply?.caption ?? "", "Copy", `Copy the caption of ${picture.name}`);
    const name = element("span", "file", { text: picture.name, title: picture.name });
    const root = element("li", "card", {}, element("div", "thumb", {}, image), said, element("div", "foot", {}, name, copies));
    const card = { root, image, said, copies, drawn: false };
    this.cards.set(picture, card);
    image.hidden = true;
    // One after the other: a photograph takes fifty megabytes while it is scaled down.
    this.thumbs = this.thumbs.then(async () => {
      const thumb = this.has(picture) ? await copyOf(picture.file, THUMB) : null;
      card.drawn = true;
      this.update(picture);
      if (!this.has(picture)) return;
      if (thumb === null) return void image.replaceWith(element("span", "small", { text: "no preview" }));
      image.src = URL.createObjectURL(thumb.blob);
      image.hidden = false;
    });
    return card;
  },

  /** Shows what a picture has become. */
  update(picture) {
    const card = this.cards.get(picture);
    if (!card) return;
    const { state, reply, problem } = picture;
    const words = { waiting: "Waiting…", sent: "Captioning…" };
    card.root.dataset.state = state;
    say(card.said, words[state] ?? (reply ? reply.caption || "(an empty caption)" : `${problem.title}. ${problem.detail}`));
    card.root.title = picture.notice;
    card.copies.hidden = state !== "done";
    if (state === "done" && card.drawn) picture.release();
    this.draw();
  },

  draw() {
    const count = (...states) => this.pictures.filter(({ state }) => states.includes(state)).length;
    const [done, failed, open] = [count("done"), count("failed"), count("waiting", "sent")];
    // One picture is shown large, beside where it was dropped.
    byId("visit").hidden = this.pictures.length < 2 && !failed && !open;
    const parts = [open ? `${done} of ${counted(this.pictures.length, "picture")} captioned` : counted(done, "caption"), failed ? `${failed} failed` : ""];
    say(byId("visit-count"), parts.filter(Boolean).join(", "));
    byId("visit-stop").hidden = !open;
    byId("visit-again").hidden = !failed || open > 0;
    byId("visit-save").disabled = !done && !failed;
  },

  /** A line for each picture that is over, in the order in which they are shown. */
  lines() {
    const over = this.pictures.filter(({ state }) => state === "done" || state === "failed");
    return over.map((picture) => {
      const { name, wanted, reply, problem } = picture;
      const came = reply
        ? { caption: reply.caption, ...(reply.regions ? { regions: reply.regions } : {}), model: reply.model, tokens: reply.tokens, finish_reason: reply.finish_reason, backend: reply.backend }
        : { error: problem.detail, status: problem.status || null, code: problem.code || null };
      return JSON.stringify({ file_name: name, ...came, ...(Object.keys(wanted).length ? { options: wanted } : {}) });
    });
  },
};

byId("visit-save").addEventListener("click", () => {
  save(new Blob([gallery.lines().map((line) => `${line}\n`).join("")], { type: "application/jsonl" }), "captions.jsonl");
});
