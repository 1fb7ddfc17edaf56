"use strict";

/** The parts of the picture that an answer names, drawn over the preview. */
const regions = {
  /** Draws them, or nothing. `size`: [width, height] of what was sent, in whose pixels they are. */
  draw(found, [width, height]) {
    const drawing = byId("regions");
    const some = Boolean(found?.length && width && height);
    drawing.toggleAttribute("hidden", !some);
    drawing.setAttribute("viewBox", some ? `0 0 ${width} ${height}` : "0 0 1 1");
    drawing.replaceChildren(...(some ? found.flatMap((region, number) => this.shapes(region, number, Math.max(width, height) / 30)) : []));
  },

  /** The outlines of a part, and its label inside its box. `letter`: height of the label in pixels. */
  shapes({ label, box, polygons }, number, letter) {
    const [left, top, right, bottom] = box;
    const color = `hsl(${(number * 137) % 360} 95% 65%)`; // neighbours differ most
    const outlines = polygons ?? [[left, top, right, top, right, bottom, left, bottom]];
    const text = this.shape("text", { color, x: left + letter / 4, y: top + letter, "font-size": letter });
    text.textContent = label.length > 40 ? `${label.slice(0, 40)}…` : label;
    return [...outlines.map((outline) => this.shape("polygon", { color, points: outline.join(" ") })), text];
  },

  shape(name, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
    return made;
  },
};
