"use strict";

/** A request as a program: {method, url, body: {kind, part, json}, files, keyed, text}. `files` are names, `json` is
 * a value in which IMAGE stands for the file, `keyed` whether a key is needed, `text` whether the reply is no JSON. */
const snippets = {
  curl({ url, body, files, keyed }) {
    const words = [];
    if (keyed) words.push('-H "Authorization: Bearer $API_KEY"');
    if (body.kind === "file") words.push(`--data-binary ${shell(`@${files[0]}`)}`);
    if (body.kind === "form") words.push(...files.map((name) => `-F ${shell(`${body.part}=@${formFile(name)}`)}`));
    if (body.kind !== "json") return lines([...words, shell(url)]);
    if (body.json.stream) words.push("--no-buffer");
    words.push("-H 'Content-Type: application/json'", "--data-binary @-");
    // Between the two ENDs the shell reads \, $ and `.
    const text = JSON.stringify(body.json, null, 2).replace(/[\\$`]/g, "\\$&");
    return `${lines([shell(url), ...words])} <<END\n${text.replaceAll(IMAGE, () => `$(base64 < ${shell(files[0])} | tr -d '\\n')`)}\nEND`;
  },

  python({ method, url, body, files, keyed, text }) {
    const verb = `requests.${method.toLowerCase()}`;
    const json = body.kind === "json";
    const image = json && holdsImage(body.json);
    const written = [...(image ? ["import base64"] : []), ...(keyed ? ["import os"] : []), "import requests", ""];
    const given = [JSON.stringify(url)];
    const open = (name) => `open(${JSON.stringify(name)}, "rb")`;
    if (image) written.push(`with ${open(files[0])} as file:`, "    image = base64.b64encode(file.read()).decode()");
    if (json) given.push(`json=${literal(body.json, PYTHON, 1)}`);
    if (body.kind === "file") given.push(`data=${open(files[0])}`);
    if (body.kind === "form") given.push(`files=[${files.map((name) => `("${body.part}", ${open(name)})`).join(", ")}]`);
    if (keyed) given.push('headers={"Authorization": f"Bearer {os.environ[\'API_KEY\']}"}');
    const streams = json && body.json.stream;
    if (streams) given.push("stream=True");
    written.push(`reply = ${verb}(${given.length > 1 ? `\n    ${given.join(",\n    ")},\n` : given[0]})`, "reply.raise_for_status()");
    if (streams) written.push("for line in reply.iter_lines():", "    print(line.decode())");
    else written.push(`print(reply.${text ? "text" : "json()"})`);
    return written.join("\n");
  },

  javascript({ method, url, body, files, keyed, text }) {
    const written = [];
    const json = body.kind === "json";
    const input = 'document.querySelector("input[type=file]").files';
    const given = method === "GET" ? [] : [`method: "${method}"`];
    const headers = keyed ? ["Authorization: `Bearer ${key}`"] : [];
    if (keyed) written.push('const key = "…";');
    if (body.kind === "file" || (json && holdsImage(body.json))) written.push(`const [file] = ${input};`);
    if (json && holdsImage(body.json)) {
      written.push("const image = await new Promise((resolve) => {", "  const reader = new FileReader();");
      written.push('  reader.onload = () => resolve(reader.result.split(",")[1]);', "  reader.readAsDataURL(file);", "});");
    }
    if (body.kind === "form") written.push("const form = new FormData();", `for (const file of ${input}) form.append("${body.part}", file);`);
    if (json) headers.unshift('"Content-Type": "application/json"');
    if (headers.length) given.push(`headers: { ${headers.join(", ")} }`);
    if (body.kind === "file") given.push("body: file");
    if (body.kind === "form") given.push("body: form");
    if (json) given.push(`body: JSON.stringify(${literal(body.json, JAVASCRIPT, 1)})`);
    const options = given.length > 1 ? `, {\n  ${given.join(",\n  ")},\n}` : given.length ? `, { ${given[0]} }` : "";
    written.push(`const reply = await fetch(${JSON.stringify(url)}${options});`, "if (!reply.ok) throw new Error(await reply.text());");
    if (json && body.json.stream) {
      written.push("const text = reply.body.pipeThrough(new TextDecoderStream());", "for await (const piece of text) console.log(piece);");
    } else written.push(`console.log(await reply.${text ? "text" : "json"}());`);
    return written.join("\n");
  },
};

const JAVASCRIPT = { true: "true", false: "false", null: "null", step: "  " };
const PYTHON = { true: "True", false: "False", null: "None", step: "    " };

const holdsImage = (value) => JSON.stringify(value).includes(IMAGE);

/** A JSON value in a language, in which `image` is the base64. */
function literal(value, language, depth) {
  if (typeof value === "string") {
    const parts = value.split(IMAGE).map((part) => JSON.stringify(part));
    return parts.join(" + image + ").replace(/^"" \+ | \+ ""$/g, "") || '""';
  }
  if (value === null || typeof value !== "object") return language[value] ?? String(value);
  const list = Array.isArray(value);
  const members = list ? value.map((each) => literal(each, language, depth + 1)) : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, language, depth + 1)}`);
  if (!members.length) return list ? "[]" : "{}";
  const [open, close] = list ? ["[", "]"] : ["{", "}"];
  const line = `${open}${members.join(", ")}${close}`;
  if (line.length < 60 && !line.includes("\n")) return line;
  const inside = language.step.repeat(depth + 1);
  return `${open}\n${members.map((each) => `${inside}${each},\n`).join("")}${language.step.repeat(depth)}${close}`;
}

/** A command of such words, on lines of its own where it is long. */
function lines(words) {
  const line = `curl ${words.join(" ")}`;
  return line.length < 70 ? line : `curl ${words.join(" \\\n  ")}`;
}

function shell(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

/** A file's name as curl's -F reads it. */
function formFile(name) {
  return /^[\w./-]+$/.test(name) ? name : `"${name.replace(/["\\]/g, "\\$&")}"`;
}
