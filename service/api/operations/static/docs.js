"use strict";

const METHODS = ["get", "put", "post", "delete", "patch", "head", "options"];

function part(title, ...children) {
  return element("div", "", {}, element("h4", "", { text: title }), ...children);
}

function requestOf(operation) {
  const parts = [];
  const signs = { header: (name) => `${name}:`, path: (name) => `{${name}}`, query: (name) => `?${name}=` };
  const parameters = (operation.parameters ?? []).map((each) =>
    schemas.row(signs[each.in]?.(each.name) ?? each.name, each.schema, each.required, each.description),
  );
  if (parameters.length) parts.push(part("Parameters", schemas.rows(parameters)));
  for (const [type, { schema }] of Object.entries(operation.requestBody?.content ?? {})) {
    parts.push(part(`Body as ${type}`, schemas.members(schema)));
  }
  return parts;
}

function repliesOf(operation) {
  const replies = Object.entries(operation.responses).map(([status, reply]) => {
    const kinds = Object.entries(reply.content ?? {}).map(([type, { schema }]) => [...schemas.kind(schema), ` as ${type}`]);
    return [status, schemas.joined(kinds), reply.description];
  });
  return part("Replies", schemas.rows(replies));
}

function operationOf(path, method, operation) {
  const head = element(
    "summary",
    "",
    {},
    element("span", "method", { text: method.toUpperCase() }),
    element("code", "path", { text: path }),
    element("span", "", { text: operation.summary ?? "" }),
  );
  const said = (operation.description ?? "").split("\n\n").filter(Boolean).map((text) => element("p", "", { text }));
  const inside = element("div", "inside", {}, element("div", "", {}, ...said), ...requestOf(operation), repliesOf(operation));
  return element("details", "operation", { id: `${method}-${path}` }, head, inside);
}

function groupsOf(document) {
  const groups = new Map();
  for (const [path, operations] of Object.entries(document.paths)) {
    for (const method of METHODS.filter((each) => each in operations)) {
      const name = operations[method].tags?.[0] ?? "other";
      groups.set(name, [...(groups.get(name) ?? []), operationOf(path, method, operations[method])]);
    }
  }
  return [...groups].map(([name, operations]) => {
    const title = element("h2", "", { text: name[0].toUpperCase() + name.slice(1) });
    return element("section", "group", {}, title, ...operations);
  });
}

function schemaOf([name, schema]) {
  const head = element("summary", "", {}, element("code", "path", { text: name }));
  const said = element("p", "", { text: schema.description ?? "" });
  return element("details", "schema", { id: `object-${name}` }, head, element("div", "inside", {}, said, schemas.members(schema)));
}

async function show() {
  try {
    const document = await api.call("/openapi.json");
    say(byId("about"), `${document.info.title} ${document.info.version}. ${document.info.description ?? ""}`);
    byId("operations").replaceChildren(...groupsOf(document));
    byId("schemas").append(...Object.entries(document.components?.schemas ?? {}).map(schemaOf));
    byId("schemas").hidden = false;
    const target = byId(decodeURIComponent(location.hash.slice(1)));
    if (target) {
      target.setAttribute("open", "");
      target.scrollIntoView();
    }
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    say(byId("problem-title"), problem.title);
    say(byId("problem-detail"), problem.detail);
    byId("problem").hidden = false;
  }
}

show();
