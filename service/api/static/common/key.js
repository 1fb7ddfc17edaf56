"use strict";

/** The form that asks for an API key, shown only while the server refuses for want of one. */
const keyForm = {
  listeners: [],

  /** Calls back when there is a new key. */
  listen(listener) {
    this.listeners.push(listener);
  },

  update() {
    byId("key-form").hidden = !api.refused;
  },

  focus() {
    this.update();
    byId("key").focus();
  },
};

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  api.key = byId("key").value.trim();
  for (const listener of keyForm.listeners) listener();
});

// A link cannot show a key.
for (const link of document.querySelectorAll("a[data-keyed]")) {
  link.addEventListener("click", async (event) => {
    if (!api.key) return;
    event.preventDefault();
    try {
      save(await api.blob(link.getAttribute("href").slice(1)), link.pathname.split("/").at(-1));
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      keyForm.update();
    }
  });
}
