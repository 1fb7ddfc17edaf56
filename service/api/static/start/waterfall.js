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

  explain() {
    byId("meanings").replaceChildren(
      ...Object.values(PHASES).map(([name, kind, meaning]) =>
        element("div", "", { "data-kind": kind }, element("dt", "", { text: name }), element("dd", "", { text: meaning })),
      ),
    );
  },
};
