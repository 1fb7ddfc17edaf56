"use strict";

const LANGUAGES = { curl: "curl", python: "Python", javascript: "JavaScript" };
const TRY_TIMEOUT = 120_000;
const MOST_SHOWN = 100_000;

/** The language in which all routes are shown, which is the one chosen last. */
const language = { current: "curl", listeners: [] };

/** A route that can be tried: its fields, the request as a program, and the reply. */
class Tryout {
  constructor(path, method, operation) {
    Object.assign(this, { path, method: method.toUpperCase(), operation, running: null });
    this.bodies = examples.bodies(operation);
    this.id = `try-${method}-${path}`.replace(/\W+/g, "-");
    this.fields = { path: new Map(), query: new Map() };
    this.root = element("div", "tryout", {}, this.form(), this.program(), this.answer());
    language.listeners.push(() => this.draw());
    this.choose();
  }

  form() {
    this.send = element("button", "button", { type: "submit", text: "Send" });
    this.stop = element("button", "quiet", { type: "button", text: "Stop", hidden: "" });
    this.kind = element("select", "", {}, ...this.bodies.map(({ kind }, place) => element("option", "", { value: place, text: BODIES[kind] ?? kind })));
    this.file = element("input", "", { type: "file", accept: "image/*,.avif,.heic,.heif,.tif,.tiff" });
    this.text = element("textarea", "", { spellcheck: "false", rows: "14", wrap: "off" });
    const parameters = (this.operation.parameters ?? []).filter(({ in: where }) => where in this.fields);
    const rows = { path: [], query: [] };
    for (const { in: where, name } of parameters) {
      const input = element("input", "", { type: "text", autocomplete: "off" });
      if (where === "path") input.value = examples.parameter(name);
      this.fields[where].set(name, input);
      rows[where].push(this.field(name, input));
    }
    this.rows = { kind: this.field("Body", this.kind), file: this.field("Image", this.file, "Without one, a sample is sent."), text: this.field("JSON", this.text, `${IMAGE} stands for the image in base64.`) };
    const query = element("details", "query", {}, element("summary", "", { text: "Query" }), element("div", "grid", {}, ...rows.query));
    query.hidden = !rows.query.length;
    const form = element("form", "", {}, ...rows.path, this.rows.kind, this.rows.file, this.rows.text, query, element("div", "actions", {}, this.send, this.stop));
    form.addEventListener("submit", (event) => (event.preventDefault(), this.ask()));
    form.addEventListener("input", () => this.choose());
    this.stop.addEventListener("click", () => this.running?.abort());
    return form;
  }

  field(name, input, hint = "") {
    input.id = `${this.id}-${name}`.replace(/\s/g, "-");
    const parts = [element("label", "", { text: name, for: input.id }), input];
    if (hint) parts.push(element("span", "small", { text: hint }));
    return element("p", "field", {}, ...parts);
  }

  program() {
    this.code = element("code");
    this.languages = Object.entries(LANGUAGES).map(([value, text]) => {
      const radio = element("input", "", { type: "radio", name: `${this.id}-language`, value });
      radio.addEventListener("change", () => {
        language.current = value;
        for (const listener of language.listeners) listener();
      });
      return element("label", "segment", {}, radio, element("span", "", { text }));
    });
    const segments = element("div", "segments", { role: "radiogroup", "aria-label": "Language" }, ...this.languages);
    const head = element("div", "program-head", {}, segments, copyButton(() => this.code.textContent, "Copy", "Copy the program"));
    return element("div", "program", {}, head, element("pre", "", { tabindex: "0", role: "region", "aria-label": "The request as a program" }, this.code));
  }

  answer() {
    this.status = element("p", "small", { role: "status" });
    this.shown = element("code");
    const pre = element("pre", "", { tabindex: "0", role: "region", "aria-label": "The reply" }, this.shown);
    this.reply = element("div", "reply", { hidden: "" }, this.status, pre);
    return this.reply;
  }

  /** Shows the fields of the body that is chosen, and the program. */
  choose() {
    const body = this.bodies[this.kind.value || 0];
    if (this.body !== body) {
      this.body = body;
      this.rows.kind.hidden = this.bodies.length < 2;
      this.file.multiple = Boolean(body.many);
      this.rows.text.hidden = body.kind !== "json";
      if (body.kind === "json") this.text.value = body.text;
    }
    this.rows.file.hidden = body.kind === "none" || (body.kind === "json" && !this.text.value.includes(IMAGE));
    this.draw();
  }

  /** The request as the fields have it. Throws SyntaxError where the body is not JSON. */
  request() {
    const values = (fields) => Object.fromEntries([...fields].map(([name, input]) => [name, input.value]));
    const files = [...this.file.files];
    return {
      method: this.method,
      url: examples.address(this.path, values(this.fields.path), values(this.fields.query)),
      body: { ...this.body, json: this.body.kind === "json" ? JSON.parse(this.text.value) : null },
      files: files.length ? files.map(({ name }) => name) : ["photo.jpg"],
      keyed: Boolean(this.operation.security),
      text: !("application/json" in (this.operation.responses["200"]?.content ?? {})),
    };
  }

  draw() {
    for (const { firstElementChild: radio } of this.languages) radio.checked = radio.value === language.current;
    try {
      say(this.code, snippets[language.current](this.request()));
      this.send.disabled = false;
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
      say(this.code, `The body is not JSON: ${error.message}`);
      this.send.disabled = true;
    }
  }

  async ask() {
    this.running?.abort();
    const mine = (this.running = new AbortController());
    this.stop.hidden = false;
    this.reply.hidden = false;
    say(this.status, "Waiting…");
    say(this.shown, "");
    const began = performance.now();
    try {
      const { url } = this.request();
      const body = await this.payload();
      await within(TRY_TIMEOUT, mine.signal, (signal, again) => this.exchange(url, body, signal, again, began));
    } catch (error) {
      if (mine.signal.aborted) say(this.status, "Stopped.");
      else if (error instanceof Problem) say(this.status, `${error.title}: ${error.detail}`);
      else throw error;
    } finally {
      if (this.running === mine) this.stop.hidden = true;
    }
  }

  /** {body, headers} of the request. Throws a Problem for a file that cannot be read. */
  async payload() {
    const files = this.file.files.length ? [...this.file.files] : [inline(byId("sample").src)];
    if (this.body.kind === "none") return {};
    if (this.body.kind === "file") return { body: files[0], headers: { "Content-Type": (await formatOf(files[0])) || "application/octet-stream" } };
    if (this.body.kind === "json") {
      const body = this.text.value.includes(IMAGE) ? this.text.value.replaceAll(IMAGE, await inBase64(files[0])) : this.text.value;
      return { body, headers: { "Content-Type": "application/json" } };
    }
    const form = new FormData();
    for (const file of files) form.append(this.body.part, file, file.name ?? "sample.webp");
    return { body: form };
  }

  async exchange(url, { body, headers = {} }, signal, again, began) {
    const key = api.key ? { Authorization: `Bearer ${api.key}` } : {};
    const response = await fetch(url, { method: this.method, body, headers: { ...headers, ...key }, signal });
    api.refused = response.status === 401;
    keyForm.update();
    const decoder = new TextDecoder();
    let text = "";
    const reader = response.body?.getReader();
    for (let piece = await reader?.read(); piece && !piece.done && text.length <= MOST_SHOWN; piece = await reader.read()) {
      again();
      text += decoder.decode(piece.value, { stream: true });
      say(this.shown, text.slice(0, MOST_SHOWN));
    }
    await reader?.cancel();
    const took = inMilliseconds(performance.now() - began);
    const cut = text.length > MOST_SHOWN ? `, of which the first ${MOST_SHOWN} characters are shown` : "";
    say(this.status, `Status ${response.status} after ${took}${cut}.`);
    if (/json/.test(response.headers.get("Content-Type") ?? "") && !cut) say(this.shown, pretty(text));
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
