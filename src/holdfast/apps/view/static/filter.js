// @ts-check
// The filter box: rows, counts and facets follow what is typed; words are completed; a mistake is explained.

import { list } from "./list.js";

/** @typedef {import("./rows.js").Page} Page */

const WORDS = ["passed", "failed", "error", "skipped", "pending", "ungraded", "uncertain", "stopped", "reused", "or"];
const NUMBERS = ["score", "turns", "tokens", "input_tokens", "output_tokens", "cost", "seconds", "first_token", "attempt"];
const PAUSE = 200;

/** @template {Element} T @param {string} selector @param {new () => T} kind @returns {T} */
function need(selector, kind) {
  const element = document.querySelector(selector);
  if (!(element instanceof kind)) throw new Error(`no ${selector}`);
  return element;
}

const input = need('[data-filter] input[name="q"]', HTMLInputElement);
const facets = need("[data-facets]", HTMLElement);
const mistake = need("[data-mistake]", HTMLElement);
const count = need("[data-count]", HTMLElement);
const offers = document.createElement("ul");
let active = -1;
/** @type {number | undefined} */
let timer;
/** @type {Set<string>} conditions that the trials offer */
const known = new Set([...WORDS, ...NUMBERS.map((name) => `${name}>`), ...list.shape.graders.map((name) => `${name}:failed`)]);
for (const value of facets.querySelectorAll("a[data-term]")) known.add(value.getAttribute("data-term") ?? "");

/** @param {HTMLAnchorElement} link keep a link's other parameters, and let it lead to the present filter */
function follow(link) {
  const address = new URL(link.href);
  address.searchParams.set("q", list.query);
  address.searchParams.delete("start");
  link.href = address.toString();
}

/** @param {Page} page */
function show(page) {
  input.setAttribute("aria-invalid", String(page.mistake !== null));
  mistake.hidden = page.mistake === null;
  mistake.textContent = page.mistake ? [page.mistake.message, page.mistake.hint].filter(Boolean).join(". ") : "";
  if (page.mistake) return;
  const searching = page.complete ? "" : ", searching …";
  count.textContent = `${page.selected.toLocaleString("en")} of ${page.total.toLocaleString("en")}${searching}`;
  const address = new URL(location.href);
  if (page.query) address.searchParams.set("q", page.query);
  else address.searchParams.delete("q");
  address.searchParams.delete("start");
  history.replaceState(history.state, "", address);
  for (const link of document.querySelectorAll("thead a, a[data-csv]")) {
    if (link instanceof HTMLAnchorElement) follow(link);
  }
  showFacets(page);
}

/** @param {Page} page */
function showFacets(page) {
  const closed = new Set([...facets.querySelectorAll("details:not([open]) > summary")].map((each) => each.textContent));
  facets.replaceChildren(
    ...page.facets.map((group) => {
      const details = document.createElement("details");
      const values = document.createElement("ul");
      details.open = !closed.has(group.name);
      const summary = document.createElement("summary");
      for (const part of group.name.split(/(?<=\/)/)) summary.append(part, document.createElement("wbr"));
      for (const value of group.values) {
        known.add(value.term);
        const link = document.createElement("a");
        const address = new URLSearchParams({ q: value.query, sort: page.sort });
        link.href = `?${address}`;
        if (value.chosen) link.setAttribute("aria-current", "true");
        const label = value.term.endsWith(value.value) ? value.value.replaceAll("_", " ") : value.value;
        for (const [text, name] of [[label, "value"], [value.count.toLocaleString("en"), "n"]]) {
          const part = document.createElement("span");
          part.className = name;
          part.textContent = text;
          link.append(part, " ");
        }
        const item = document.createElement("li");
        item.append(link);
        values.append(item);
      }
      details.append(summary, values);
      return details;
    }),
  );
}

/** @returns {[number, number]} where the word at the cursor begins, and the cursor */
function wordAtCursor() {
  const end = input.selectionStart ?? input.value.length;
  const begin = input.value.slice(0, end).search(/[^\s()]*$/);
  return [input.value[begin] === "-" ? begin + 1 : begin, end];
}

function offer() {
  const [begin, end] = wordAtCursor();
  const word = input.value.slice(begin, end).toLowerCase();
  const fitting = word ? [...known].filter((each) => each.toLowerCase().startsWith(word) && each !== word) : [];
  active = -1;
  offers.replaceChildren(
    ...fitting.slice(0, 8).map((text, number) => {
      const item = document.createElement("li");
      item.id = `offer-${number}`;
      item.role = "option";
      item.textContent = text;
      item.addEventListener("pointerdown", (event) => {
        event.preventDefault();
        accept(text);
      });
      return item;
    }),
  );
  offers.hidden = fitting.length === 0;
  input.setAttribute("aria-expanded", String(fitting.length > 0));
  input.removeAttribute("aria-activedescendant");
}

/** @param {string} text */
function accept(text) {
  const [begin, end] = wordAtCursor();
  const open = text.endsWith(">");
  input.setRangeText(text + (open ? "" : " "), begin, end, "end");
  hide();
  if (!open) apply();
}

function hide() {
  offers.replaceChildren();
  offers.hidden = true;
  active = -1;
  input.setAttribute("aria-expanded", "false");
  input.removeAttribute("aria-activedescendant");
}

/** @param {number} by */
function choose(by) {
  const items = [...offers.children];
  active = (active + by + items.length + (active < 0 && by < 0 ? 1 : 0)) % items.length;
  items.forEach((item, number) => item.setAttribute("aria-selected", String(number === active)));
  input.setAttribute("aria-activedescendant", `offer-${active}`);
}

function apply() {
  clearTimeout(timer);
  list.load(input.value.trim());
}

/** @param {KeyboardEvent} event */
function press(event) {
  const chosen = offers.children[active]?.textContent;
  if ((event.key === "ArrowDown" || event.key === "ArrowUp") && offers.children.length) {
    choose(event.key === "ArrowDown" ? 1 : -1);
  } else if ((event.key === "Enter" || event.key === "Tab") && chosen) accept(chosen);
  else if (event.key === "Escape" && !offers.hidden) hide();
  else return;
  event.preventDefault();
}

offers.id = "offers";
offers.className = "offers";
offers.role = "listbox";
offers.ariaLabel = "Conditions";
offers.hidden = true;
input.after(offers);
input.role = "combobox";
input.setAttribute("aria-expanded", "false");
input.setAttribute("aria-controls", "offers");
input.setAttribute("aria-autocomplete", "list");
input.addEventListener("keydown", press);
input.addEventListener("blur", hide);
input.addEventListener("input", () => {
  offer();
  clearTimeout(timer);
  timer = setTimeout(apply, PAUSE);
});
need("[data-filter]", HTMLFormElement).addEventListener("submit", (event) => {
  event.preventDefault();
  hide();
  apply();
  list.table.focus({ preventScroll: true });
});
list.listeners.push(show);
