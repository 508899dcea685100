// @ts-check
// Follows runs that are being written. Numbers change where they stand; what is being read never moves.
// The stream is closed while the tab is hidden: a browser opens only six connections to a server, over all tabs.

/** @typedef {{run: string, done: number, total: number, texts: Record<string, string>}} Progress */
/** @typedef {{run?: string, status: string}} State */
/** @typedef {{run: string, generation: number, settled: number}} Rows */

const POLL = 5000;
const address = document.body.dataset.events ?? "";
/** @type {EventSource | null} */
let stream = null;
let failures = 0;
/** @type {number | undefined} */
let poll;
/** @type {Map<string, string>} statuses as last heard */
const states = new Map();

/** @param {string} run the part of the page that shows a run: its row in a list, or the page itself */
function placeOf(run) {
  return document.querySelector(`tr[data-run="${CSS.escape(run)}"]`) ?? document.body;
}

/** @param {Element} place @param {string} name @param {string} text */
function write(place, name, text) {
  for (const element of place.querySelectorAll(`[data-live="${name}"]`)) {
    if (element.textContent !== text) element.textContent = text;
  }
}

/** @param {Progress} data */
function showProgress(data) {
  const place = placeOf(data.run);
  for (const [name, text] of Object.entries(data.texts)) if (name !== "status") write(place, name, text);
  for (const bar of place.querySelectorAll("progress[data-live-bar]")) {
    if (bar instanceof HTMLProgressElement) {
      bar.max = Math.max(1, data.total);
      bar.value = data.done;
    }
  }
}

/** @param {State} data */
function showState(data) {
  const run = data.run ?? "";
  const place = placeOf(run);
  const before = states.get(run);
  states.set(run, data.status);
  for (const badge of place.querySelectorAll('.badge[data-live="status"]')) {
    badge.className = `badge ${data.status}`;
    badge.textContent = data.status;
  }
  if (before !== undefined && before !== data.status && place === document.body) {
    tell("[data-ended]", `The run is now ${data.status}.`);
  }
}

/** @param {string} selector @param {string} text */
function tell(selector, text) {
  const line = document.querySelector(selector);
  if (!(line instanceof HTMLElement)) return;
  const label = line.querySelector("a, button") ?? line;
  if (text) label.textContent = text;
  line.hidden = !text;
}

/** @param {string} name @param {any} data */
function handle(name, data) {
  if (name === "progress") showProgress(data);
  else if (name === "state") showState(data);
  else if (name === "rows") document.dispatchEvent(new CustomEvent("holdfast:rows", { detail: data }));
  else if (name === "list" && data.stamp !== document.body.dataset.stamp) {
    tell("[data-news]", "The list has changed. Show it.");
  }
}

function open() {
  close();
  if (document.hidden || !address) return;
  stream = new EventSource(address);
  stream.onopen = () => {
    failures = 0;
    tell("[data-connection]", "");
  };
  stream.onerror = () => {
    failures += 1;
    if (failures > 2) ask();
  };
  for (const name of ["progress", "rows", "state", "list"]) {
    stream.addEventListener(name, (event) => handle(name, JSON.parse(event.data)));
  }
}

function close() {
  stream?.close();
  stream = null;
  clearTimeout(poll);
}

/** Ask for the same numbers now and then, where streams do not get through. */
async function ask() {
  close();
  try {
    const response = await fetch(`${address}.json`);
    if (!response.ok) throw new Error(response.statusText);
    /** @type {[string, any][]} */
    const events = await response.json();
    for (const [name, data] of events) handle(name, data);
    tell("[data-connection]", "The connection does not stay open; the numbers are asked for every five seconds.");
  } catch {
    tell("[data-connection]", "The server does not answer. Start `holdfast view` again; this page then goes on.");
  }
  if (!document.hidden) poll = setTimeout(ask, POLL);
}

document.addEventListener("visibilitychange", () => {
  failures = 0;
  open();
});
window.addEventListener("pagehide", close);
window.addEventListener("pageshow", open);
