"use strict";

const COMPONENTS = { encoder: "Encoder: looks at pictures", decoder: "Decoder: writes words" };
const STATES = {
  pending: "pending",
  eager: "plain PyTorch",
  loaded: "compiled",
  warm: "compiled",
  captured: "recorded",
  failed: "stays plain",
};
const RESULTS = {
  hit: "found and verified; nothing was compiled to start",
  miss: "not there yet",
  stale: "there, but for another version",
  corrupt: "damaged, and refused",
  untrusted: "not signed by a trusted key, and refused",
  error: "out of reach",
};
const BUILDS = {
  looking: "The store of compiled code is out of reach; this server asks again, and switches when it answers",
  building: "Compiling in the background, for this server and the next",
  waiting: "Another process compiles; this one waits for it",
  fetched: "Compiled code arrived, and each batch size switched to it",
  published: "Compiled in the background, and each batch size switched; the next start is compiled from the beginning",
  failed: "The background build failed, and the plain model goes on serving",
  declined: "No background build: this server may not write to the store",
};

const grid = {
  draw(report) {
    const kept = byId("buckets");
    const components = [...new Set(report.buckets.map((bucket) => bucket.component))];
    while (kept.children.length > components.length) kept.lastElementChild.remove();
    components.forEach((component, index) => {
      const group = kept.children[index] ?? kept.appendChild(element("div", "component", {}, element("h4"), element("ul", "cells")));
      const buckets = report.buckets.filter((bucket) => bucket.component === component);
      say(group.firstElementChild, COMPONENTS[component] ?? component);
      const cells = group.lastElementChild;
      while (cells.children.length > buckets.length) cells.lastElementChild.remove();
      buckets.forEach((bucket, cell) => this.fill(cells.children[cell] ?? cells.appendChild(this.cell()), bucket, isMoving(report)));
    });
    this.artifacts(report);
    this.build(report.build);
  },

  cell() {
    return element("li", "", {}, element("span", "size"), element("span", "word"), element("span", "took"));
  },

  /** `moving`: plain buckets are about to be changed over. */
  fill(cell, bucket, moving) {
    const [size, word, took] = cell.children;
    const compiled = isCompiled(bucket.backend);
    const state = bucket.state === "captured" && compiled ? "compiled, recorded" : STATES[bucket.state];
    cell.dataset.state = bucket.state === "captured" && !compiled ? "eager" : bucket.state;
    say(size, `${bucket.size}`);
    say(word, `${state ?? bucket.state}${moving && bucket.state === "eager" ? ", swap pending" : ""}`);
    say(took, bucket.seconds === null ? "" : inMilliseconds(bucket.seconds * 1000));
    cell.title = `${bucket.component}, batches of up to ${bucket.size}: ${bucket.state}, ${bucket.backend || "no backend yet"}`;
  },

  artifacts(report) {
    const found = report.artifacts;
    const why = found?.reason.replace(/[0-9a-f]{40,}/g, (digest) => `${digest.slice(0, 12)}…`);
    const sentence = found
      ? `Compiled code for this machine: ${RESULTS[found.result] ?? found.result}${why ? ` (${why})` : ""}.`
      : report.state === "starting" ? "" : "Compiled code was not looked for: this server was told to run plain PyTorch.";
    say(byId("artifacts"), sentence);
  },

  build(build) {
    byId("build").hidden = build === null;
    if (build === null) return;
    const bar = byId("build-bar");
    const counted = build.state === "building" && build.of;
    const why = build.error ?? build.reason ?? "";
    const count = counted ? `: ${build.done} of ${build.of} pieces` : "";
    say(byId("build-text"), `${BUILDS[build.state] ?? build.state}${count}${why ? `: ${why}` : ""}.`);
    bar.hidden = !counted;
    bar.max = build.of ?? 1;
    bar.value = build.done ?? 0;
  },
};
