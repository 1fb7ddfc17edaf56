"use strict";

const WORDS = {
  starting: "starting",
  ready: "ready",
  draining: "stopping",
  failed: "failed",
  absent: "absent",
  waking: "waking",
  leaving: "leaving",
};
/** Whether the report is of a model that has never been awake. */
const isNew = ({ state, marks }) => state === "absent" && marks.ready === undefined;

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
  const silent = problem?.status === 401 ? "needs a key" : problem?.late ? "not answering" : "not reachable";
  say(byId("state-word"), report ? WORDS[state] : silent);
  const begins = ["starting", "waking"].includes(state);
  const gone = ["absent", "leaving"].includes(state);
  const working = begins ? spoken(report.phase) : report && !gone && (underWay(report) || (isCompiled(report.backend) ? "compiled" : ""));
  say(byId("state-phase"), working ? `: ${working}` : "");
}

/** [number, what it is] of the start; those that are not known yet are left out. */
function facts(report) {
  const torch = report.phases.find((phase) => phase.name === "import_torch");
  const { live, ready } = report.marks;
  const found = [];
  if (isNew(report)) return found;
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
  if (isNew(report)) return "";
  if (ready === undefined) return "The bars grow while the server starts. Bars above one another run at the same time.";
  const share = torch?.end ? Math.round((100 * (torch.end - torch.start)) / ready) : 0;
  const rest = torch?.end ? inMilliseconds((ready - torch.end) * 1000) : "";
  if (without) return "This start did not import PyTorch's Python module: compiled code ran at every batch size and was tested without it.";
  if (!share || report.tier === null) return "";
  const opened = isCompiled(report.tier) ? "the compiled model was opened" : "the model was loaded";
  return `The import of PyTorch took ${share} % of the start. In the ${rest} after it ${opened}, run at every batch size and tested.`;
}

function lede(report) {
  const what = `This server describes pictures${report.model ? ` with the model ${report.model}` : ""}.`;
  if (report.state === "failed") return `${what} It could not start.`;
  if (isNew(report)) return `${what} It is absent: the next picture wakes it.`;
  if (report.marks.ready === undefined) return `${what} It is starting right now: watch it below.`;
  return `${what} ${readyIn(report)}.`;
}

/** "Ready in 0.38 s from precompiled code". */
function readyIn({ marks, tier, compile_events: { startup } }) {
  const ready = `Ready in ${inSeconds(marks.ready)}`;
  if (startup) return `${ready}, ${counted(startup, "graph")} compiled on the way`;
  return isCompiled(tier) ? `${ready} from precompiled code` : `${ready}${tier ? `: ${served(tier)}` : ""}`;
}

/** The start in a line: [what counts, the rest]. */
function line(report) {
  const { ready } = report.marks;
  if (report.state === "failed") return ["The start failed", ""];
  if (isNew(report)) return ["Absent", "the next picture wakes it"];
  if (ready === undefined) return [`Starting: ${spoken(report.phase)}`, `${inSeconds(report.now)} so far`];
  const { serving } = report.compile_events;
  const where = [report.family, report.device, report.dtype].filter(Boolean).join(", ");
  const since = serving ? `, ${counted(serving, "graph")} compiled since` : "";
  return [`${readyIn(report)}${since}`, [where, underWay(report)].filter(Boolean).join("; ")];
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

say(byId("curl"), `curl --data-binary @picture.jpg ${address("/v1/caption")}`);
start.listen(drawState);
start.listen(drawStart);
