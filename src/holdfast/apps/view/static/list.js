// @ts-check
// The table of trials as a window on a list of any length: the server filters and sorts, and sixty rows are shown.
// Rows have one height, so their places are arithmetic. A browser's elements have a largest height, so above eight
// million pixels the scroll bar is scaled.

import { fillRow, makeRow } from "./rows.js";

/** @typedef {import("./rows.js").Row} Row */
/** @typedef {import("./rows.js").Page} Page */

const CHUNK = 100;
const MOST_CHUNKS = 40;
const TALLEST = 8_000_000;
const SPARE = 4;

/** @param {string} selector @param {ParentNode} [parent] */
function need(selector, parent = document) {
  const element = parent.querySelector(selector);
  if (!(element instanceof HTMLElement)) throw new Error(`no ${selector}`);
  return element;
}

class TrialList {
  constructor() {
    this.root = need("[data-list]");
    this.window = need("[data-window]");
    this.sizer = need("[data-sizer]");
    this.table = need("table", this.root);
    this.body = need("tbody", this.root);
    this.head = need("thead", this.root);
    const data = this.root.dataset;
    this.address = data.address ?? "";
    this.run = data.run ?? "";
    this.sort = data.sort ?? "";
    this.query = new URLSearchParams(location.search).get("q") ?? "";
    this.selected = Number(data.selected);
    this.generation = Number(data.generation);
    this.settled = Number(data.settled);
    /** @type {import("./rows.js").Shape} */
    this.shape = { graders: JSON.parse(data.graders ?? "[]"), numbers: (data.numbers ?? "").split(" ").filter(Boolean) };
    /** @type {Map<number, Row[]>} rows by hundreds, the least recently used first */
    this.chunks = new Map();
    /** @type {Set<number>} */
    this.asked = new Set();
    this.top = 0;
    this.current = -1;
    this.opening = -1;
    this.expected = 0;
    this.rowHeight = 30;
    this.drawing = false;
    /** @type {((page: Page) => void)[]} */
    this.listeners = [];
  }

  /** Take over from the page that works without scripts. */
  start() {
    this.root.classList.add("virtual");
    this.table.tabIndex = 0;
    this.body.replaceChildren();
    this.window.addEventListener("scroll", () => this.scrolled());
    this.window.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.table.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("click", (event) => this.click(event));
    document.addEventListener("holdfast:move", (event) => {
      if (!(event instanceof CustomEvent) || this.selected === 0) return;
      event.preventDefault();
      this.move(event.detail);
    });
    document.addEventListener("holdfast:rows", (event) => {
      if (event instanceof CustomEvent) this.hear(event.detail);
    });
    new ResizeObserver(() => this.resize()).observe(this.window);
    const kept = history.state?.list;
    this.resize();
    if (kept && kept.query === this.query) {
      this.current = kept.current;
      this.scrollTo(kept.top);
    } else {
      this.scrollTo(Number(this.root.dataset.start) * this.rowHeight);
    }
    window.addEventListener("pagehide", () => this.keep());
    if (this.root.dataset.complete === "no") this.load(this.query);
  }

  /** Remember the place for the way back. */
  keep() {
    const state = { query: this.query, top: this.top, current: this.current };
    history.replaceState({ ...history.state, list: state }, "");
  }

  get viewHeight() {
    return Math.max(this.rowHeight, this.window.clientHeight - this.head.offsetHeight);
  }

  get fullHeight() {
    return this.selected * this.rowHeight;
  }

  /** Pixels of the list for each pixel of the scroll bar. */
  get scale() {
    const bar = Math.min(this.fullHeight, TALLEST) - this.viewHeight;
    return bar > 0 ? (this.fullHeight - this.viewHeight) / bar : 1;
  }

  resize() {
    this.rowHeight = Number.parseFloat(getComputedStyle(this.root).getPropertyValue("--row")) || 30;
    this.sizer.style.height = `${Math.min(this.fullHeight, TALLEST) + this.head.offsetHeight}px`;
    this.table.setAttribute("aria-rowcount", String(this.selected + 1));
    this.scrollTo(this.top);
  }

  scrolled() {
    if (Math.abs(this.window.scrollTop - this.expected) > 1) {
      this.expected = this.window.scrollTop;
      this.top = this.window.scrollTop * this.scale;
    }
    this.draw();
  }

  /** @param {WheelEvent} event scaled, one step of the wheel would skip thousands of rows */
  wheel(event) {
    if (this.scale <= 1 || event.deltaY === 0 || event.ctrlKey) return;
    event.preventDefault();
    this.scrollTo(this.top + event.deltaY * (event.deltaMode === 1 ? this.rowHeight : 1));
  }

  /** @param {number} top */
  scrollTo(top) {
    this.top = Math.max(0, Math.min(top, this.fullHeight - this.viewHeight));
    this.expected = Math.round(this.top / this.scale);
    this.window.scrollTop = this.expected;
    this.draw();
  }

  draw() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      this.drawNow();
    });
  }

  drawNow() {
    const first = Math.max(0, Math.floor(this.top / this.rowHeight));
    const count = Math.max(0, Math.min(this.selected - first, Math.ceil(this.viewHeight / this.rowHeight) + SPARE));
    while (this.body.children.length > count) this.body.lastElementChild?.remove();
    while (this.body.children.length < count) this.body.append(makeRow(this.shape));
    for (let number = 0; number < count; number += 1) {
      this.fill(/** @type {HTMLTableRowElement} */ (this.body.children[number]), first + number);
    }
    this.body.style.transform = `translateY(${-(this.top - first * this.rowHeight)}px)`;
    for (let chunk = Math.floor(first / CHUNK); chunk * CHUNK < first + count; chunk += 1) this.fetchChunk(chunk);
    const active = this.current >= first && this.current < first + count;
    if (active) this.table.setAttribute("aria-activedescendant", `row-${this.current}`);
    else this.table.removeAttribute("aria-activedescendant");
  }

  /** @param {HTMLTableRowElement} row @param {number} place */
  fill(row, place) {
    const data = this.rowAt(place);
    row.id = `row-${place}`;
    row.setAttribute("aria-rowindex", String(place + 2));
    row.setAttribute("aria-selected", String(place === this.current));
    fillRow(row, data, this.shape, data ? this.addressOf(data) : "");
  }

  /** @param {number} place */
  rowAt(place) {
    return this.chunks.get(Math.floor(place / CHUNK))?.[place % CHUNK];
  }

  /** @param {Row} row */
  addressOf(row) {
    const asked = new URLSearchParams();
    if (this.query) asked.set("q", this.query);
    if (this.sort) asked.set("sort", this.sort);
    const list = asked.size ? `?${asked}` : "";
    return `/run/${this.run}/trial/${encodeURIComponent(row.sample)}/${row.trial}${list}`;
  }

  /** @param {Record<string, string>} more @returns {Promise<Page>} */
  async ask(more) {
    const asked = new URLSearchParams({ q: this.query, sort: this.sort, count: String(CHUNK), ...more });
    const response = await fetch(`${this.address}?${asked}`);
    if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
    return response.json();
  }

  /** @param {number} chunk */
  async fetchChunk(chunk) {
    const kept = this.chunks.get(chunk);
    if (kept) {
      this.chunks.delete(chunk);
      this.chunks.set(chunk, kept);
      return;
    }
    if (this.asked.has(chunk)) return;
    const { query, generation } = this;
    this.asked.add(chunk);
    try {
      const page = await this.ask({ start: String(chunk * CHUNK), generation: String(generation), facets: "0" });
      if (this.query !== query || this.generation !== generation) return;
      if (page.generation !== generation || page.selected !== this.selected) this.adopt(page);
      this.chunks.set(chunk, page.rows);
      while (this.chunks.size > MOST_CHUNKS) this.chunks.delete([...this.chunks.keys()][0]);
      this.draw();
      if (this.opening >= 0) this.open(this.opening);
    } finally {
      this.asked.delete(chunk);
    }
  }

  /** @param {Page} page a newer list of rows */
  adopt(page) {
    this.generation = page.generation;
    this.selected = page.selected;
    this.settled = page.settled;
    this.chunks.clear();
    this.asked.clear();
    need("[data-news]").hidden = true;
    this.resize();
  }

  /** @param {string} query ask for the rows of a filter, and again until its search for a text has ended */
  async load(query) {
    const changed = query !== this.query;
    this.query = query;
    const page = await this.ask({ start: "0" });
    if (this.query !== query) return;
    for (const listener of this.listeners) listener(page);
    if (page.mistake || page.building !== null) return;
    this.adopt(page);
    this.chunks.set(0, page.rows);
    if (changed) {
      this.current = -1;
      this.scrollTo(0);
    }
    this.draw();
    if (!page.complete) setTimeout(() => this.query === query && this.load(query), 300);
  }

  /** @param {{run: string, generation: number, settled: number}} rows */
  hear(rows) {
    const news = rows.settled - this.settled;
    if (rows.run !== this.run || rows.generation === this.generation || news <= 0) return;
    const line = need("[data-news]");
    const button = need("button", line);
    button.textContent = `${news.toLocaleString("en")} new`;
    button.onclick = () => this.load(this.query);
    line.hidden = false;
  }

  /** @param {number} by */
  move(by) {
    this.current = Math.max(0, Math.min(this.selected - 1, this.current + by));
    const top = this.current * this.rowHeight;
    if (top < this.top) this.scrollTo(top);
    else if (top + this.rowHeight > this.top + this.viewHeight) this.scrollTo(top + this.rowHeight - this.viewHeight);
    else this.draw();
    this.table.focus({ preventScroll: true });
  }

  /** @param {number} place a row that is still on its way is opened when it arrives */
  open(place) {
    const data = this.rowAt(place);
    this.opening = data ? -1 : place;
    if (data) location.assign(this.addressOf(data));
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.viewHeight / this.rowHeight) - 1);
    const steps = /** @type {Record<string, number>} */ ({
      ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity,
    }); // prettier-ignore
    if (event.key === "Enter") this.open(this.current);
    else if (event.key in steps && this.selected) this.move(steps[event.key]);
    else return;
    event.preventDefault();
  }

  /** @param {MouseEvent} event a click anywhere in a row opens it, but not when text is being selected */
  click(event) {
    const target = event.target instanceof Element ? event.target : null;
    const row = target?.closest("tr");
    if (!row || target?.closest("a") || event.ctrlKey || event.metaKey || String(getSelection())) return;
    const link = row.querySelector("a");
    if (link?.href) location.assign(link.href);
  }
}

export const list = new TrialList();
list.start();
