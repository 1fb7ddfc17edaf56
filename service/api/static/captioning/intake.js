"use strict";

/** One picture is shown large; of several each has a card. */
function take(files) {
  if (files.length === 1) panel.take(files[0]);
  else if (files.length) batch.take(files);
  else panel.problem(new Problem("Nothing to look at", "That was not a file. Save the picture first, or copy it and paste it here.", { status: 400 }));
}

const drop = byId("drop");
byId("choose").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", (event) => {
  if (event.target.files.length) take([...event.target.files]);
  event.target.value = ""; // the same file may be chosen again
});
for (const [index, sample] of document.querySelectorAll(".sample").entries()) {
  const file = () => new File([inline(sample.firstElementChild.src)], `sample-${index + 1}.webp`, { type: "image/webp" });
  sample.addEventListener("click", () => panel.take(file()));
}

// The whole page takes a drop: a picture beside the frame must not replace the page.
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  drop.classList.add("over");
});
document.addEventListener("dragleave", (event) => event.relatedTarget ?? drop.classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  take([...event.dataTransfer.files]);
});
document.addEventListener("paste", (event) => {
  if (event.target instanceof HTMLInputElement) return;
  if (event.clipboardData.files.length) take([...event.clipboardData.files]);
});

start.poll();
