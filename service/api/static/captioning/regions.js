"use strict";

const COLOURS = 6; // of outlines, in turn; the style has them

/** The parts of the picture that an answer names, drawn over the preview. */
const regions = {
  /** Draws them, or nothing. `size`: [width, height] of what was sent, in whose pixels they are. */
  draw(found, [width, height]) {
    const drawing = byId("regions");
    const nothing = !found?.length || !width || !height;
    drawing.toggleAttribute("hidden", nothing);
    if (nothing) return void drawing.replaceChildren();
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const letter = Math.max(width, height) / 30;
    drawing.replaceChildren(...found.flatMap((region, number) => this.shapes(region, number % COLOURS, letter)));
  },

  shapes({ label, box, polygons }, colour, letter) {
    const [left, top, right, bottom] = box;
    const outlines = polygons ?? [[left, top, right, top, right, bottom, left, bottom]];
    const made = outlines.map((outline) => this.shape("polygon", colour, { points: outline.join(" ") }));
    // A label stands inside its box, so that none is cut off at the top.
    const text = this.shape("text", colour, { x: left + letter / 4, y: top + letter, "font-size": letter });
    text.textContent = label.length > 40 ? `${label.slice(0, 40)}…` : label;
    return [...made, text];
  },

  shape(name, colour, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [attribute, value] of Object.entries({ ...attributes, class: `colour-${colour}` })) made.setAttribute(attribute, value);
    return made;
  },
};
