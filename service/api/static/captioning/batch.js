"use strict";

// Of one request to /v1/captions, which takes 16 pictures and as many bytes as any other.
const PIECE = { pictures: 16, bytes: 8 << 20 };
const RETRY = { times: 6, most: 10_000 };

/** Captions many pictures, piece by piece, each of which has its own answer. */
const batch = {
  running: null,
  pieceBytes: PIECE.bytes,

  /** Adds files to those that wait. */
  take(files) {
    const wanted = options.read();
    if (wanted === null) return;
    const taken = gallery.add([...files].map((file) => new Picture(file, wanted)));
    if (taken.length < files.length) panel.problem(new Problem("Too many pictures", `The first ${taken.length} were taken; at most ${MOST_PICTURES} can wait at once.`, { status: 400 }));
    byId("visit").scrollIntoView({ block: "nearest" });
    this.run();
  },

  async run() {
    if (this.running) return;
    const mine = (this.running = new AbortController());
    this.pieceBytes = PIECE.bytes;
    try {
      await this.pieces(mine);
    } finally {
      if (this.running === mine) this.running = null;
    }
  },

  /** Sends piece after piece, until none waits. */
  async pieces(mine) {
    let tries = 0;
    for (let piece = await this.piece(mine); piece.length && !mine.signal.aborted; piece = await this.piece(mine)) {
      const { key } = api;
      const problem = await this.send(piece, mine.signal);
      if (mine.signal.aborted) break;
      if (problem === null) tries = 0;
      else if (problem.status === 401) {
        if (api.key === key) break; // the pictures wait for another key
      }
      else if (isStarting(start.report) && problem.status === 503) await pause(500, mine.signal);
      else if ([429, 503].includes(problem.status) && ++tries < RETRY.times) await pause(Math.min((problem.wait || 1) * 1000, RETRY.most), mine.signal);
      else this.settle(piece, problem);
    }
  },

  /** The pictures of the next request, which are those that wait longest and want the same. */
  async piece({ signal }) {
    const piece = [];
    let bytes = 0;
    for (const picture of gallery.pictures.filter(({ state }) => state === "waiting")) {
      if (signal.aborted || piece.length === PIECE.pictures) break;
      if (piece.length && picture.wanted !== piece[0].wanted) continue;
      try {
        await picture.open();
      } catch (problem) {
        if (!(problem instanceof Problem)) throw problem;
        this.settle([picture], problem);
        continue;
      }
      if (piece.length && bytes + picture.blob.size > this.pieceBytes) break;
      bytes += picture.blob.size;
      piece.push(picture);
    }
    return piece;
  },

  /** Asks for the captions of a piece. A problem of the whole is returned, and all of them wait as before. */
  async send(piece, signal) {
    const form = new FormData();
    for (const picture of piece) {
      form.append("images", picture.blob, picture.name);
      this.turn(picture, "sent");
    }
    const query = new URLSearchParams(piece[0].wanted);
    try {
      const path = `/v1/captions${query.size ? `?${query}` : ""}`;
      const { captions } = await api.call(path, { method: "POST", body: form, signal, timeout: CAPTION_TIMEOUT });
      await Promise.all(captions.map((item) => this.answered(piece[item.index], item)));
      return null;
    } catch (problem) {
      if (signal.aborted) return null; // by who has settled them
      if (!(problem instanceof Problem)) throw problem;
      for (const picture of piece) this.turn(picture, "waiting");
      keyForm.update();
      if (!(await this.smaller(piece, problem))) return problem;
      return null;
    }
  },

  /** Whether what is too large for one request is smaller from now on. */
  async smaller(piece, problem) {
    const large = problem.status === 413 || (problem.lost && !problem.late && piece.length > 1);
    if (!large) return piece.length === 1 && piece[0].mend(problem);
    if (piece.length === 1) return piece[0].mend(problem);
    const sent = piece.reduce((sum, { blob }) => sum + blob.size, 0);
    // The form has a head for each picture.
    this.pieceBytes = Math.min(Math.floor(sent / 2), problem.limit ? Math.floor(problem.limit * 0.9) : Infinity);
    return true;
  },

  async answered(picture, item) {
    if (item.status === undefined) return this.settle([picture], null, item);
    const problem = new Problem(item.title, item.detail, { status: item.status, code: item.code, reason: item.reason ?? "", id: item.request_id });
    if (await picture.mend(problem)) this.turn(picture, "waiting");
    else this.settle([picture], problem);
  },

  /** The pictures are over: each with its caption, or with the problem. */
  settle(pictures, problem, reply = null) {
    for (const picture of pictures) {
      Object.assign(picture, { problem, reply });
      this.turn(picture, reply ? "done" : "failed");
    }
  },

  turn(picture, state) {
    picture.state = state;
    gallery.update(picture);
  },

  stop() {
    this.running?.abort();
    this.running = null;
    const open = gallery.pictures.filter(isOpen);
    this.settle(open, new Problem("Stopped", "You stopped before it was captioned."));
  },

  /** Those that failed wait again. */
  again() {
    for (const picture of gallery.pictures.filter(({ state }) => state === "failed")) this.turn(picture, "waiting");
    this.run();
  },

  clear() {
    this.stop();
    gallery.clear();
  },
};

/** Resolves after so many milliseconds, or at the signal. */
function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}

byId("visit-stop").addEventListener("click", () => batch.stop());
byId("visit-again").addEventListener("click", () => batch.again());
byId("visit-clear").addEventListener("click", () => batch.clear());
keyForm.listen(() => batch.run());
