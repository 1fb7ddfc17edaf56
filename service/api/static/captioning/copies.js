"use strict";

/** What a copy is at most: pixels of a side, bytes, and pixels up to which it is lossless. What it is made of: bytes
 * and pixels at most, and milliseconds in which the browser has to read it. */
const COPY = { side: 2048, bytes: 4 << 20, lossless: 1 << 18, fileBytes: 256 << 20, filePixels: 100e6, wait: 20_000 };

/** A picture as JPEG, or as PNG where it is small, within these bounds: {blob, width, height}. null: this browser
 * cannot show it, or it is beyond what may be read. */
async function copyOf(file, { side = COPY.side, bytes = COPY.bytes } = {}) {
  if (file.size > COPY.fileBytes) return null;
  const address = URL.createObjectURL(file);
  try {
    const image = await shown(address);
    const { naturalWidth: width, naturalHeight: height } = image;
    if (!width || !height || width * height > COPY.filePixels) return null;
    const lossless = width * height <= COPY.lossless;
    for (let longest = Math.min(side, Math.max(width, height)); longest >= 1; longest = Math.floor(longest / 2)) {
      const scale = longest / Math.max(width, height);
      const copy = await drawn(image, Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale)), lossless);
      if (copy === null || copy.blob.size <= bytes) return copy;
    }
    return null;
  } catch {
    return null;
  } finally {
    URL.revokeObjectURL(address);
  }
}

function shown(address) {
  return new Promise((resolve, reject) => {
    const image = new Image();
    const timer = setTimeout(reject, COPY.wait);
    image.addEventListener("load", () => (clearTimeout(timer), resolve(image)));
    image.addEventListener("error", () => (clearTimeout(timer), reject()));
    image.src = address;
  });
}

async function drawn(image, width, height, lossless) {
  const canvas = element("canvas", "", { width, height });
  const context = canvas.getContext("2d");
  if (context === null) return null;
  // As the server does: what is transparent lies on white.
  context.fillStyle = "#fff";
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, width, height);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, lossless ? "image/png" : "image/jpeg", 0.9));
  canvas.width = canvas.height = 0; // gives its memory back at once
  return blob && { blob, width, height };
}
