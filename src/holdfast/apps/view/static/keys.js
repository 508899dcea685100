// @ts-check
// Keys of all pages. An element says by `data-key` which key clicks it, or focuses it where text is typed into it;
// `rel` of links says what is next, previous and up.

/** @param {string} selector */
function find(selector) {
  const element = document.querySelector(selector);
  return element instanceof HTMLElement ? element : null;
}

/** @param {EventTarget | null} target */
function typesText(target) {
  return (
    target instanceof HTMLElement &&
    (target.isContentEditable ||
      (target instanceof HTMLInputElement && !["checkbox", "radio", "button", "submit"].includes(target.type)) ||
      target instanceof HTMLTextAreaElement ||
      target instanceof HTMLSelectElement)
  );
}

/** @returns {HTMLElement[]} the links that `j` and `k` go through */
function items() {
  return [...document.querySelectorAll("[data-item]")].filter(
    /** @returns {item is HTMLElement} */ (item) => item instanceof HTMLElement && item.offsetParent !== null,
  );
}

/** @param {number} by */
function move(by) {
  const handled = !document.dispatchEvent(new CustomEvent("holdfast:move", { detail: by, cancelable: true }));
  if (handled) return;
  const link = find(by > 0 ? 'a[rel="next"]' : 'a[rel="prev"]');
  const all = items();
  if (all.length === 0) {
    link?.click();
    return;
  }
  const row = document.activeElement?.closest("[data-run], tr, li");
  const place = all.findIndex((item) => item === document.activeElement || (row && row.contains(item)));
  const next = all[place < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, place + by))];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

/** @param {number} by */
function moveToCheckpoint(by) {
  const bands = [...document.querySelectorAll("[data-checkpoint]")];
  const tops = bands.map((band) => band.getBoundingClientRect().top);
  const line = 90; // below what stays on top of the page
  const place = by > 0 ? tops.findIndex((top) => top > line + 2) : tops.findLastIndex((top) => top < line - 2);
  const band = bands[place];
  if (!(band instanceof HTMLElement)) return;
  window.scrollBy({ top: tops[place] - line });
  band.tabIndex = -1;
  band.focus({ preventScroll: true });
}

function tick() {
  const box = document.activeElement?.closest("[data-run]")?.querySelector('input[type="checkbox"]');
  if (box instanceof HTMLInputElement) box.click();
}

function up() {
  (find('a[rel="up"]') ?? find('[data-key="u"]') ?? find('nav[aria-label="Pages"] a'))?.click();
}

let pending = "";

/** @param {KeyboardEvent} event */
function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (typesText(event.target)) {
    if (event.key === "Escape" && event.target instanceof HTMLElement) event.target.blur();
    return;
  }
  const before = pending;
  pending = "";
  if (before === "g") {
    if (event.key === "r") location.assign("/");
    return;
  }
  /** @type {Record<string, () => void>} */
  const actions = {
    g: () => {
      pending = "g";
    },
    j: () => move(1),
    k: () => move(-1),
    u: up,
    x: tick,
    "]": () => moveToCheckpoint(1),
    "[": () => moveToCheckpoint(-1),
  };
  const action = actions[event.key];
  const element = find(`[data-key="${CSS.escape(event.key)}"]`);
  if (action) action();
  else if (element && typesText(element)) {
    element.focus();
    if (element instanceof HTMLInputElement) element.select();
  } else if (element) element.click();
  else return;
  event.preventDefault();
}

document.addEventListener("keydown", press);
