"use strict";

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

  /** What narrows a schema: "1 to 65536, default 0". */
  limits(schema) {
    const { minimum, exclusiveMinimum, maximum, maxLength, minItems, maxItems } = schema;
    const low = exclusiveMinimum !== undefined ? `above ${exclusiveMinimum}` : minimum !== undefined ? `at least ${minimum}` : "";
    return [
      low,
      maximum <= Number.MAX_SAFE_INTEGER ? `at most ${maximum}` : "",
      minItems !== undefined ? `at least ${minItems} of them` : "",
      maxItems !== undefined ? `at most ${maxItems} of them` : "",
      maxLength !== undefined ? `at most ${maxLength} characters` : "",
      schema.default !== undefined && schema.default !== "" ? `default ${JSON.stringify(schema.default)}` : "",
    ].filter(Boolean).join(", ");
  },

  /** Rows of [name, required, schema, description] as a table. */
  table(caption, rows) {
    const body = element("tbody");
    for (const { name, required, schema, description } of rows) {
      const kind = element("td", "", {}, ...this.kind(schema), required ? ", required" : "");
      const said = [description ?? schema?.description ?? "", this.limits(schema ?? {})].filter(Boolean).join(" ");
      const head = element("th", "", { scope: "row" }, element("code", "", { text: name }));
      body.append(element("tr", "", {}, head, kind, element("td", "", { text: said })));
    }
    const title = element("caption", "unseen", { text: caption });
    return element("div", "table", { tabindex: "0", role: "region", "aria-label": caption }, element("table", "", {}, title, body));
  },

  /** The members of an object as a table, or its kind in a line. */
  members(caption, schema) {
    if (!schema?.properties) return element("p", "", {}, ...this.kind(schema));
    const required = new Set(schema.required ?? []);
    return this.table(
      caption,
      Object.entries(schema.properties).map(([name, of]) => ({ name, required: required.has(name), schema: of })),
    );
  },
};
