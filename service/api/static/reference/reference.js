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
  const said = (operation.description ?? "").split("\n\n").filter(Boolean).map((text) => element("p", "", {}, ...marked(text)));
  const about = element("div", "about", {}, ...said);
  const inside = element("div", "inside", {}, about, ...requestOf(operation), repliesOf(operation));
  const details = element("details", "operation", { id: `${method}-${path}` }, head, inside);
  // Made when it is first opened: of thirty routes one or two are.
  details.addEventListener("toggle", () => about.after(part("Try it", new Tryout(path, method, operation).root)), { once: true });
  return details;
}

function groupsOf(document) {
  const groups = new Map();
  const asks = new Set();
  for (const [path, operations] of Object.entries(document.paths)) {
    for (const method of METHODS.filter((each) => each in operations)) {
      const name = operations[method].tags?.[0] ?? "other";
      const entry = { method, made: operationOf(path, method, operations[method]) };
      groups.set(name, [...(groups.get(name) ?? []), entry]);
      if (method === "post") asks.add(name);
    }
  }
  // What people send comes first, among the groups and within each; what monitors read, and the pages, last.
  const first = [...groups].sort(([one], [other]) => asks.has(other) - asks.has(one));
  return first.map(([name, entries]) => {
    const operations = entries.sort((one, other) => (other.method === "post") - (one.method === "post")).map(({ made }) => made);
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
    // The document takes a moment when it is first asked for.
    const document = await api.call("/openapi.json", { timeout: 30_000 });
    await nameModel();
    byId("about").replaceChildren(...marked(`${document.info.title} ${document.info.version}. ${document.info.description ?? ""}`));
    byId("operations").replaceChildren(...groupsOf(document));
    byId("objects").append(...Object.entries(document.components?.schemas ?? {}).map(schemaOf));
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

/** Examples name the model that is served, where this page may know it. */
async function nameModel() {
  try {
    examples.model = (await api.call("/startup")).model ?? examples.model;
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    keyForm.update();
  }
}

keyForm.listen(async () => {
  await nameModel();
  keyForm.update();
});
show();
