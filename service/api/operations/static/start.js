"use strict";

const start = {
  report: null,
  listeners: [],
  timer: 0,

  /** Calls back with every report, and with null when the server does not answer. */
  listen(listener) {
    this.listeners.push(listener);
  },

  async poll() {
    clearTimeout(this.timer);
    try {
      this.report = await api.call("/startup", { cache: "no-store" });
    } catch (problem) {
      this.report = null;
      this.problem = problem;
    }
    for (const listener of this.listeners) listener(this.report, this.problem);
    clearTimeout(this.timer);
    if (!document.hidden && !api.refused) this.timer = setTimeout(() => this.poll(), this.pause());
  },

  /** Milliseconds until the next look: often while something moves. */
  pause() {
    if (this.report === null) return 1000;
    if (this.report.state === "starting") return 200;
    return ["building", "waiting"].includes(this.report.build?.state) ? 1000 : 10000;
  },
};

const isCompiled = (backend) => Boolean(backend) && !["eager", "mixed"].includes(backend);
const spoken = (phase) => PHASES[phase]?.[0] ?? phase.replaceAll("_", " ");

function drawState(report, problem) {
  const words = { starting: "starting", ready: "ready", draining: "stopping", failed: "failed" };
  const state = report?.state ?? "unreachable";
  byId("state").dataset.state = state;
  say(byId("state-word"), report ? words[state] : problem.status === 401 ? "needs a key" : "not reachable");
  const working = state === "starting" ? spoken(report.phase) : isCompiled(report?.backend) ? "compiled" : "";
  say(byId("state-phase"), working && `: ${working}`);
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

function lede(report) {
  const what = "snapcap is a server that describes pictures.";
  const { ready } = report.marks;
  if (report.state === "failed") return `${what} This one could not start.`;
  if (ready === undefined) return `${what} This one is starting right now: watch it below.`;
  const how = isCompiled(report.tier) ? ", compiled and warm for every batch size" : "";
  return `${what} This one was ready ${inSeconds(ready)} after its process began${how}.`;
}

function drawStart(report) {
  byId("key-form").hidden = !api.refused;
  if (report === null) return;
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
  byId("samples").style.visibility = report.model === null ? "hidden" : "visible";
  byId("samples").hidden = report.model !== null && report.model !== "demo";
}

waterfall.explain();
say(byId("curl"), `curl --data-binary @picture.jpg ${location.origin}/v1/caption`);
start.listen(drawState);
start.listen(drawStart);
document.addEventListener("visibilitychange", () => document.hidden || start.poll());
start.poll();
