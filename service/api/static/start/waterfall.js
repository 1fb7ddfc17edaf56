"use strict";

const waterfall = {
  /** Bars on the scale of the whole start; rows are kept, so that a bar grows instead of being replaced. */
  draw(report) {
    const end = Math.max(report.marks.ready ?? report.now, 0.001);
    const rows = byId("phases");
    while (rows.children.length > report.phases.length) rows.lastElementChild.remove();
    report.phases.forEach((phase, index) => {
      const row = rows.children[index] ?? rows.appendChild(this.row());
      this.fill(row, phase, end, report.now);
    });
    this.explain(report);
    const marks = Object.entries(report.marks).filter(([, moment]) => moment <= end);
    byId("marks").replaceChildren(...marks.map(([name, moment]) => this.mark(name, moment, end)));
  },

  row() {
    const track = element("span", "track", { "aria-hidden": "true" }, element("span", "fill"));
    return element("li", "", {}, element("span", "phase"), track, element("span", "took"));
  },

  fill(row, phase, end, now) {
    const [name, kind] = PHASES[phase.name] ?? [phase.name.replaceAll("_", " "), "before"];
    const stop = Math.min(phase.end ?? now, end);
    const [label, track, took] = row.children;
    const bar = track.firstElementChild;
    say(label, name);
    say(took, inMilliseconds(((phase.end ?? now) - phase.start) * 1000));
    row.classList.toggle("running", phase.end === null);
    row.dataset.kind = kind;
    row.dataset.phase = phase.name;
    bar.style.setProperty("--from", phase.start / end);
    bar.style.setProperty("--for", Math.max(stop - phase.start, 0) / end);
  },

  mark(name, moment, end) {
    const words = { live: "answers", ready: "ready", first_caption: "first caption" };
    const mark = element("span", "mark", {}, element("span", "", { text: `${words[name] ?? name} ${inSeconds(moment)}` }));
    mark.style.setProperty("--at", moment / end);
    mark.classList.toggle("late", moment / end > 0.7);
    return mark;
  },

  /** Explains the phases that this start has. */
  explain({ device, phases }) {
    const names = Object.keys(PHASES).filter((name) => phases.some((phase) => phase.name === name));
    const list = byId("meanings");
    if (list.dataset.explained === `${device} ${names}`) return;
    list.dataset.explained = `${device} ${names}`;
    list.replaceChildren(
      ...names.map((phase) => {
        const [name, kind, onCpu, onGpu = onCpu] = PHASES[phase];
        const text = device?.startsWith("cuda") ? onGpu : onCpu;
        return element("div", "", { "data-kind": kind }, element("dt", "", { text: name }), element("dd", "", { text }));
      }),
    );
  },
};
