"use strict";

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
const inBytes = (bytes) => (bytes < 1 << 20 ? `${Math.ceil(bytes / 1024)}\u00a0KiB` : `${(bytes / (1 << 20)).toFixed(1)}\u00a0MiB`);
const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** A button that copies what `text` returns, and says that it did. */
function copyButton(text, name = "Copy", label = name) {
  const button = element("button", "quiet", { type: "button", text: name, "aria-label": label });
  button.addEventListener("click", async () => {
    const copied = await copy(text());
    button.textContent = copied ? "Copied" : "Not copied";
    button.setAttribute("aria-label", button.textContent);
    setTimeout(() => {
      button.textContent = name;
      button.setAttribute("aria-label", label);
    }, 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // There is no clipboard but over https and on localhost; the old way works everywhere.
    const area = element("textarea", "unseen", { "aria-hidden": "true" });
    const before = document.activeElement;
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    before?.focus();
    return copied;
  }
}

/** Lets the browser save bytes as a file. */
function save(blob, name) {
  const link = element("a", "", { download: name, href: URL.createObjectURL(blob) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000); // the download may begin later
}

/** The bytes of a data URI, without a request. */
function inline(uri) {
  const [head, data] = uri.split(",");
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  return new Blob([bytes], { type: head.slice(5, head.indexOf(";")) });
}

/** The base64 of a file, without the head of a data URI. Rejects when it cannot be read. */
function inBase64(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result.slice(reader.result.indexOf(",") + 1)));
    reader.addEventListener("error", () => reject(new Problem("File not read", `The browser cannot read it: ${reader.error.message}`, { status: 400 })));
    reader.readAsDataURL(blob);
  });
}
