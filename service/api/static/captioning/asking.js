"use strict";

const CAPTION_TIMEOUT = 120_000;
// What is streamed travels as base64 within JSON, a third more bytes than the file has.
const STREAMED_BYTES = 4 << 20;
// Above this a picture is scaled down before it is sent anywhere.
const SENT_BYTES = 32 << 20;
// Why a server refuses a picture of which a copy may do.
const OF_FORM = ["not_an_image", "unsupported_format"];
const OF_SIZE = ["too_large", "too_complex"];

/** A picture of this visit: its file, what of it is sent, and what came of it. */
class Picture {
  constructor(file, wanted) {
    this.file = file;
    this.name = file.name || "pasted";
    this.wanted = wanted;
    this.state = "waiting"; // sent, done, failed
    this.blob = file;
    this.format = null;
    this.copies = 0;
    this.size = null; // of a copy, in pixels
    this.notice = "";
    this.reply = null;
    this.problem = null;
  }

  /** Readies what is sent. Throws a Problem. */
  async open() {
    this.format ??= await formatOf(this.blob);
    if (this.blob.size > SENT_BYTES) {
      const scaled = await this.copy({}, (size) => `It has ${inBytes(this.file.size)}: a copy of ${size} was sent.`);
      if (!scaled) throw new Problem("File too large", `It has ${inBytes(this.file.size)}, and this browser cannot make a smaller copy of it.`, { status: 413 });
    }
  }

  /** Makes the copy that a refusal asks for. Whether there is one, that was not sent before. */
  async mend(problem) {
    // A browser may see the closed connection in place of the reply that says what is too large.
    const large = problem.status === 413 || OF_SIZE.includes(problem.reason) || (problem.lost && !problem.late && this.blob.size > STREAMED_BYTES);
    if (large) {
      const bytes = Math.min(problem.limit * 0.9 || COPY.bytes, COPY.bytes, this.blob.size - 1);
      return this.copy({ side: COPY.side >> this.copies, bytes }, (size) => `Too large for this server: a copy of ${size} was sent.`);
    }
    if (this.copies || !(problem.status === 415 || OF_FORM.includes(problem.reason))) return false;
    return this.copy({}, (size) => `This server does not read such files: a copy of ${size} was sent.`);
  }

  /** Lets the bytes go, which nobody needs any more. */
  release() {
    this.file = this.blob = null;
  }

  async copy(bounds, sentence) {
    if (this.copies > 3) return false;
    const copy = await copyOf(this.file, bounds);
    if (copy === null) return false;
    this.copies += 1;
    this.blob = copy.blob;
    this.format = copy.blob.type;
    this.size = [copy.width, copy.height];
    this.notice = sentence(`${copy.width} × ${copy.height} pixels`);
    return true;
  }
}

/** The caption of one picture, as /v1/caption replies. `onText` is called with the text so far, where tokens are
 * streamed. Throws a Problem, or the AbortError of the signal. */
async function captionOf(picture, signal, onText) {
  await picture.open();
  const may = !picture.wanted.num_beams && Boolean(start.report?.model);
  let streams = may;
  for (;;) {
    const streamed = streams && picture.format && picture.blob.size <= STREAMED_BYTES;
    try {
      return await (streamed ? streamedCaption(picture, signal, onText) : wholeCaption(picture, signal));
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      onText("");
      // The reason is said by the API that does not stream.
      if (streamed && [404, 413, 422].includes(problem.status)) streams = false;
      else if (await picture.mend(problem)) streams = may;
      else throw problem;
    }
  }
}

function wholeCaption(picture, signal) {
  const query = new URLSearchParams(picture.wanted);
  // A type that is not an image's would be refused for its name; this way the bytes decide.
  const type = picture.format || "application/octet-stream";
  const options = { method: "POST", body: picture.blob, headers: { "Content-Type": type }, signal, timeout: CAPTION_TIMEOUT };
  return api.call(`/v1/caption${query.size ? `?${query}` : ""}`, options);
}

async function streamedCaption(picture, signal, onText) {
  const { max_new_tokens: longest, ...wanted } = picture.wanted;
  const url = `data:${picture.format};base64,${await inBase64(picture.blob)}`;
  const body = {
    model: start.report?.model ?? "",
    messages: [{ role: "user", content: [{ type: "image_url", image_url: { url } }] }],
    stream: true,
    stream_options: { include_usage: true },
    ...wanted,
    ...(longest ? { max_tokens: longest } : {}),
  };
  const options = { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal, timeout: CAPTION_TIMEOUT };
  // An instruction is no part of the answer; any other prompt is how the caption begins.
  const reply = { caption: start.report?.takes_instructions ? "" : wanted.prompt ?? "" };
  let ended = false;
  await api.events("/v1/chat/completions", options, (data) => {
    if (data === "[DONE]") return void (ended = true);
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Problem("Caption not finished", chunk.error.message, { status: 500, code: chunk.error.code });
    const [choice] = chunk.choices;
    if (choice?.delta.content) onText((reply.caption += choice.delta.content));
    reply.model = chunk.model;
    reply.finish_reason = choice?.finish_reason ?? reply.finish_reason;
    reply.regions = chunk.regions ?? reply.regions;
    if (chunk.usage) Object.assign(reply, { tokens: chunk.usage.completion_tokens, backend: chunk.backend, timings: chunk.timings });
  });
  if (!ended) throw new Problem("No answer", "The server closed the connection before the caption was complete.");
  return reply;
}
