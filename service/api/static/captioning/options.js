"use strict";

/** The fields by which a caption is asked for, as the names of the API. */
const options = {
  /** Those that are set; null while one of them is not valid, which the form then shows. */
  read() {
    const form = byId("options-form");
    if (!form.checkValidity()) {
      byId("options").open = true;
      form.reportValidity();
      return null;
    }
    const { task, task_text: text, prompt, num_beams: beams, max_new_tokens: longest } = Object.fromEntries(new FormData(form));
    const set = start.model ? { model: start.model } : {};
    const hasTasks = !byId("task-field").hidden;
    if (task && hasTasks) set.task = task;
    if (text && hasTasks) set.task_text = text;
    if (prompt) set.prompt = prompt;
    if (beams && Number(beams) !== 1) set.num_beams = Number(beams);
    if (longest) set.max_new_tokens = Number(longest);
    return set;
  },

  /** Says beside the fold what is set in it. */
  draw() {
    const [task, prompt, beams, longest] = ["task", "prompt", "beams", "longest"].map(byId);
    const said = [
      task.value && !byId("task-field").hidden ? task.selectedOptions[0].textContent : "",
      prompt.value ? `prompt “${prompt.value.length > 30 ? `${prompt.value.slice(0, 30)}…` : prompt.value}”` : "",
      Number(beams.value) > 1 ? `${beams.value} beams` : "",
      longest.value ? `at most ${counted(Number(longest.value), "token")}` : "",
    ].filter(Boolean);
    say(byId("options-set"), said.length ? `: ${said.join(", ")}` : "");
  },

  /** A model that has tasks offers them. */
  onReport(report) {
    const tasks = Array.isArray(report?.tasks) ? report.tasks : [];
    const select = byId("task");
    if (report === null || select.dataset.tasks === JSON.stringify(tasks)) return;
    select.dataset.tasks = JSON.stringify(tasks);
    const choices = tasks.map((task) => task.name ?? task);
    const first = element("option", "", { text: "the model's own", value: "" });
    select.replaceChildren(first, ...choices.map((name) => element("option", "", { text: name.replaceAll("_", " "), value: name })));
    byId("task-field").hidden = byId("task-text-field").hidden = !choices.length;
    this.draw();
  },
};

byId("options-form").addEventListener("input", () => options.draw());
start.listen((report) => options.onReport(report));
options.draw(); // a browser keeps fields over a reload
