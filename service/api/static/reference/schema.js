"use strict";

/** A text whose `words` are code. */
function marked(text) {
  return text.split("`").map((part, place) => (place % 2 ? element("code", "", { text: part }) : part));
}

/** JSON schemas in words. */
const schemas = {
  /** A short name of what a schema allows, as text and links to named objects. */
  kind(schema) {
    if (schema === undefined) return ["anything"];
    if (schema.$ref) return [this.link(schema.$ref.split("/").at(-1))];
    const either = schema.anyOf ?? schema.oneOf;
    if (either) return this.joined(either.map((each) => this.kind(each)));
    if (schema.const !== undefined) return [JSON.stringify(schema.const)];
    if (schema.enum) return [schema.enum.map((each) => JSON.stringify(each)).join(" or ")];
    if (Array.isArray(schema.type)) return [schema.type.join(" or ")];
    if (schema.type === "array") return ["list of ", ...this.kind(schema.items)];
    if (schema.format === "binary") return ["bytes"];
    if (schema.type === "object" && schema.additionalProperties instanceof Object) {
      return ["object of ", ...this.kind(schema.additionalProperties)];
    }
    return [schema.type ?? "anything"];
  },

  joined(kinds) {
    return kinds.flatMap((kind, index) => (index ? [" or ", ...kind] : kind));
  },

  link(name) {
    const link = element("a", "", { href: `#object-${name}`, text: name });
    link.addEventListener("click", () => byId(`object-${name}`)?.setAttribute("open", ""));
    return link;
  },

  /** What narrows a schema: "At least 1, at most 65536, default 0." */
  limits(schema) {
    const { minimum, exclusiveMinimum, maximum, maxLength, minItems, maxItems } = schema;
    const said = [
      minimum !== undefined ? `at least ${minimum}` : "",
      exclusiveMinimum !== undefined ? `above ${exclusiveMinimum}` : "",
      maximum <= Number.MAX_SAFE_INTEGER ? `at most ${maximum}` : "",
      minItems !== undefined ? `at least ${minItems} of them` : "",
      maxItems !== undefined ? `at most ${maxItems} of them` : "",
      maxLength !== undefined ? `at most ${maxLength} characters` : "",
      schema.default !== undefined && schema.default !== "" ? `default ${JSON.stringify(schema.default)}` : "",
    ].filter(Boolean).join(", ");
    return said && `${said[0].toUpperCase()}${said.slice(1)}.`;
  },

  /** A list of names, each with what it is and what is said of it: [name, kind as text and links, text]. */
  rows(rows) {
    const made = rows.map(([name, kind, text]) => {
      const head = element("dt", "", {}, element("code", "", { text: name }), element("span", "", {}, ...kind));
      return element("div", "", {}, head, element("dd", "", {}, ...marked(text)));
    });
    return element("dl", "rows", {}, ...made);
  },

  /** One named value: a parameter, or a member of an object. */
  row(name, schema = {}, required = false, description = schema.description) {
    const sentence = description && !/[.!?]$/.test(description) ? `${description}.` : description;
    return [name, [...this.kind(schema), required ? ", required" : ""], [sentence, this.limits(schema)].filter(Boolean).join(" ")];
  },

  /** The members of an object, or its kind in a line. */
  members(schema) {
    if (!schema?.properties) return element("p", "", {}, ...this.kind(schema));
    const required = new Set(schema.required ?? []);
    return this.rows(Object.entries(schema.properties).map(([name, of]) => this.row(name, of, required.has(name))));
  },
};
