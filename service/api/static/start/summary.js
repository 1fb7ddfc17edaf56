"use strict";

const FAMILIES = { blip: "BLIP", git: "GIT", "vision-encoder-decoder": "vision encoder\u2011decoder", florence2: "Florence-2", smolvlm: "SmolVLM", idefics3: "Idefics3" };
const WORDS = { starting: "starting", ready: "ready", draining: "stopping", failed: "failed" };

/** The backend in words; "" before there is one. */
function served(backend) {
  if (!backend) return "";
  if (backend === "mixed") return "partly compiled";
  return isCompiled(backend) ? "compiled" : "plain PyTorch";
}

/** How far a background build is; "" where none is under way. */
function underWay({ build }) {
  if (build?.state === "waiting") return "compiled code pending";
  if (build?.state !== "building") return "";
  return build.of ? `compiling ${build.done ?? 0} of ${build.of}` : "compiling pending";
}

function drawState(report, problem) {
  const state = report?.state ?? "unreachable";
  byId("state").dataset.state = state;
  const gone = problem?.status === 401 ? "needs a key" : problem?.late ? "not answering" : "not reachable";
  say(byId("state-word"), report ? WORDS[state] : gone);
  const working = state === "starting" ? spoken(report.phase) : report && (underWay(report) || (isCompiled(report.backend) ? "compiled" : ""));
  say(byId("state-phase"), working ? `: ${working}` : "");
}

/** [number, what it is] of the start; those that are not known yet are left out. */
function facts(report) {
  const torch = report.phases.find((phase) => phase.name === "import_torch");
  const { live, ready } = report.marks;
  const found = [];
  if (live !== undefined) found.push([live, "until it answered"]);
  if (ready === undefined) found.push([report.now, "so far"]);
  else found.push([ready, "until it was ready"]);
  if (torch?.end) found.push([torch.end - torch.start, "of that, importing PyTorch"]);
  if (torch?.end && ready !== undefined) found.push([ready - torch.end, "all that came after"]);
  return found;
}

function story(report) {
  const { ready } = report.marks;
  const torch = report.phases.find((phase) => phase.name === "import_torch");
  const without = !torch && isCompiled(report.tier);
  if (report.error) return report.error;
  if (ready === undefined) return "The bars grow as it starts. Those that stand above one another run at the same time.";
  const share = torch?.end ? Math.round((100 * (torch.end - torch.start)) / ready) : 0;
  const rest = torch?.end ? inMilliseconds((ready - torch.end) * 1000) : "";
  if (without) return "PyTorch's Python module, which takes longer to import than all of this, was left out: compiled code was run at every batch size and tested without it.";
  if (!share || report.tier === null) return "";
  const opened = isCompiled(report.tier) ? "the compiled model was opened" : "the model was loaded";
  return `${share} % of the start is PyTorch being imported. In the ${rest} after that ${opened}, run at every batch size and tested.`;
}

/** The model as the server names it: "demo (vision encoder–decoder)". */
function modelOf({ model, family }) {
  if (!model) return "";
  return family ? `${model} (${FAMILIES[family] ?? family})` : model;
}

function lede(report) {
  const model = modelOf(report);
  const what = `This server describes pictures${model && `, with the model ${model}`}.`;
  const { ready } = report.marks;
  if (report.state === "failed") return `${what} It could not start.`;
  if (ready === undefined) return `${what} It is starting right now: watch it below.`;
  const how = isCompiled(report.tier) ? ", compiled and warm for every batch size" : "";
  return `${what} It was ready ${inSeconds(ready)} after its process began${how}.`;
}

/** The start in a line: [what counts, the rest]. */
function line(report) {
  const { ready } = report.marks;
  if (report.state === "failed") return ["The start failed", ""];
  if (ready === undefined) return [`Starting: ${spoken(report.phase)}`, `${inSeconds(report.now)} so far`];
  const { startup, serving } = report.compile_events;
  const compiled = `${startup} compiled here${serving ? `, ${serving} more since` : ""}`;
  const where = [report.device, report.dtype].filter(Boolean).join(", ");
  return [`Ready after ${inSeconds(ready)}: ${served(report.tier) || "no model"}, ${compiled}`, [where, underWay(report)].filter(Boolean).join("; ")];
}

/** Open while there is something to watch, and one line from then on. In between it is the reader's. */
function fold(report) {
  const watched = report.state === "starting" || report.state === "failed";
  const details = byId("start");
  if (details.dataset.watched === String(watched)) return;
  details.dataset.watched = watched;
  details.open = watched;
}

let lastLooks = "";

function drawStart(report) {
  if (report === null) return;
  // While nothing changes but the clock, nothing is drawn.
  const { now, ...rest } = report;
  const looks = JSON.stringify(report.state === "starting" ? report : rest);
  if (looks === lastLooks) return;
  lastLooks = looks;
  fold(report);
  const [most, more] = line(report);
  byId("start-line").replaceChildren(element("b", "", { text: most }), element("span", "soft", { text: more }));
  say(byId("lede"), lede(report));
  say(byId("story"), story(report));
  byId("story").classList.toggle("bad", Boolean(report.error));
  byId("facts").replaceChildren(
    ...facts(report).map(([value, text]) =>
      element("div", "", {}, element("dt", "", { text }), element("dd", "", { text: inSeconds(value) })),
    ),
  );
  waterfall.draw(report);
  grid.draw(report);
  byId("samples").hidden = report.model !== "demo";
}

waterfall.explain();
say(byId("curl"), `curl --data-binary @picture.jpg ${address("/v1/caption")}`);
start.listen(drawState);
start.listen(drawStart);
