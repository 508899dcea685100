"use strict";
// Filtering is all that this does; without it everything is shown.
const form = document.querySelector("form.filter");
const [search, status, grader] = [form.querySelector("input"), ...form.querySelectorAll("select")];
const trials = [...document.querySelectorAll("li.trial")];
let waiting;

function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const trial of trials) {
    let fits = (!status.value || trial.dataset.status === status.value)
      && (!grader?.value || trial.dataset.blame.split("\n").includes(grader.value));
    if (fits && words.length) {
      const text = trial.textContent.toLowerCase();
      fits = words.every((word) => text.includes(word));
    }
    trial.hidden = !fits;
    shown += fits;
  }
  form.querySelector("output").value = `${shown.toLocaleString("en")} shown`;
}

form.hidden = false;
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(filter, 150);
});
filter();
