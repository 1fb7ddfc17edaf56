"use strict";

/** The model that answers, on a server that has several. */
const models = {
  /** Offers each model with its state. Without a choice, requests name none and get the first. */
  onReport(report, problem) {
    if (problem?.status === 404) start.model = ""; // the server was started again with other models
    if (report === null) return;
    const states = Object.entries(report.models ?? {});
    const select = byId("model");
    byId("model-field").hidden = states.length < 2;
    const names = states.map(([name]) => name);
    if (JSON.stringify([...select.options].map(({ value }) => value)) !== JSON.stringify(names)) select.replaceChildren(...names.map((value) => element("option", "", { value })));
    for (const [place, [name, state]] of states.entries()) say(select.options[place], `${name}: ${WORDS[state] ?? state}`);
    select.value = start.model || report.model; // an object has names that are numbers before others
  },
};

byId("model").addEventListener("change", (event) => {
  start.model = event.target.value;
  start.poll();
});
start.listen((report, problem) => models.onReport(report, problem));
