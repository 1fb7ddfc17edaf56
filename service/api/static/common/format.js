"use strict";

const FORMATS = { "image/jpeg": [0xff, 0xd8, 0xff], "image/png": [0x89, 0x50, 0x4e, 0x47], "image/webp": [0x52, 0x49, 0x46, 0x46], "image/gif": [0x47, 0x49, 0x46, 0x38] };

/** The media type of a picture that every server reads, by its first bytes; else "". Throws a Problem. */
async function formatOf(file) {
  try {
    const head = new Uint8Array(await file.slice(0, 12).arrayBuffer());
    return Object.keys(FORMATS).find((type) => FORMATS[type].every((byte, place) => head[place] === byte)) ?? "";
  } catch {
    throw new Problem("File not read", "The browser cannot read it: it is a folder, or was moved or changed.", { status: 400 });
  }
}
