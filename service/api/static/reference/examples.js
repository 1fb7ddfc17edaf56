"use strict";

/** Stands in a body for the image that is chosen, in base64. */
const IMAGE = "{{image}}";
// The document's examples hold a small image; nothing else in them is that long a word.
const BASE64 = /[A-Za-z0-9+/]{80,}={0,2}/g;
const BODIES = { file: "the image itself", form: "multipart form", json: "JSON" };

const examples = {
  /** The model's name, as examples have it. */
  model: "demo",

  /** The bodies that a route takes and that can be tried: [{kind, part, many, text}]; one of kind "none" without. */
  bodies(operation) {
    const content = operation.requestBody?.content ?? {};
    const found = [];
    if (Object.keys(content).some((type) => type.startsWith("image/"))) found.push({ kind: "file" });
    const form = content["multipart/form-data"]?.schema;
    if (form) {
      const [part] = form.required;
      found.push({ kind: "form", part, many: form.properties[part].type === "array" });
    }
    const json = content["application/json"]?.example;
    if (json) found.push({ kind: "json", text: this.text(json) });
    return found.length ? found : [{ kind: "none" }];
  },

  text(example) {
    const named = "model" in example ? { ...example, model: this.model } : example;
    return JSON.stringify(named, null, 2).replace(BASE64, IMAGE);
  },

  /** What a parameter of the path is at first. */
  parameter(name) {
    return { model: this.model, version: "1" }[name] ?? "";
  },

  /** The address of a route with these parameters: {name: text}; those of the query that are empty are left out. */
  address(path, inPath, inQuery) {
    // The name of a model may hold slashes.
    const filled = path.replace(/\{(\w+)(?::path)?\}/g, (_, name) => encodeURIComponent(inPath[name] ?? "").replaceAll("%2F", "/"));
    const query = new URLSearchParams(Object.entries(inQuery).filter(([, text]) => text !== ""));
    return `${address(filled)}${query.size ? `?${query}` : ""}`;
  },
};
