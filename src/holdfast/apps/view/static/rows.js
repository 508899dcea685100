// @ts-check
// Rows of the table of trials. Everything that a run says is set as text.

/** @typedef {[string, number | null]} Verdict */
/**
 * @typedef {{row: number, sample: string, trial: number, status: string, score: number | null,
 *   graders: Record<string, Verdict>, turns: number | null, tokens: number | null, cost: number | null,
 *   seconds: number | null, attempt: number | null, error: string, preview: string}} Row
 */
/** @typedef {{value: string, count: number, term: string, query: string, chosen: boolean}} FacetValue */
/**
 * @typedef {{query: string, sort: string, mistake: {message: string, position: number, hint: string | null} | null,
 *   complete: boolean, building: number | null, generation: number, settled: number, total: number, selected: number,
 *   start: number, rows: Row[], graders: string[], facets: {name: string, values: FacetValue[]}[]}} Page
 */

/** @param {number | null} value */
const share = (value) => (value === null ? "" : value.toFixed(3));
/** @param {number} cost */
const dollars = (cost) =>
  cost > 0 && cost < 0.00005 ? "<$0.0001" : `$${cost.toFixed(cost >= 1 || cost === 0 ? 2 : 4)}`;
/** @param {number | null} value */
const whole = (value) => (value === null ? "" : value.toLocaleString("en"));
/** @param {string} status */
const words = (status) => status.replaceAll("_", " ");

/** @param {string} text with the characters spelt out that would be invisible or reorder a line */
const plain = (text) =>
  text.replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g, (character) =>
    /[\n\t]/.test(character) ? " " : `\\u${(character.codePointAt(0) ?? 0).toString(16).padStart(4, "0")}`,
  );

/** @typedef {{graders: string[], numbers: string[]}} Shape the columns of a run */

/** @param {Shape} shape */
export function makeRow(shape) {
  const row = document.createElement("tr");
  row.setAttribute("role", "row");
  const cells = 4 + shape.graders.length + shape.numbers.length;
  for (let number = 0; number < cells; number += 1) row.insertCell().setAttribute("role", "gridcell");
  row.cells[0].append(document.createElement("span"));
  row.cells[0].className = "status";
  row.cells[1].className = "sample";
  const link = document.createElement("a");
  link.tabIndex = -1;
  row.cells[1].append(link);
  return row;
}

/** @param {HTMLTableRowElement} row @param {Row | undefined} data @param {Shape} shape @param {string} address */
export function fillRow(row, data, shape, address) {
  const [badge, link] = [row.cells[0].firstElementChild, row.cells[1].firstElementChild];
  if (!badge || !(link instanceof HTMLAnchorElement)) return;
  row.className = data ? data.status : "unread";
  badge.className = data ? `badge ${data.status}` : "";
  badge.textContent = data ? words(data.status) : "";
  link.textContent = data ? plain(data.sample) : "…";
  if (data) link.href = address;
  else link.removeAttribute("href");
  const texts = data ? cellTexts(data, shape) : [];
  for (let number = 2; number < row.cells.length; number += 1) {
    const [text, kind] = texts[number - 2] ?? ["", ""];
    row.cells[number].className = kind;
    row.cells[number].textContent = text;
  }
}

/** @param {Row} row @param {Shape} shape @returns {[string, string][]} texts and classes of its cells, from the third on */
function cellTexts(row, shape) {
  /** @type {Record<string, string>} */
  const numbers = {
    trial: String(row.trial),
    turns: whole(row.turns),
    tokens: whole(row.tokens),
    cost: row.cost === null ? "" : dollars(row.cost),
    seconds: row.seconds === null ? "" : row.seconds.toFixed(1),
    attempt: whole(row.attempt),
  };
  const [first, ...others] = shape.numbers[0] === "trial" ? shape.numbers : ["", ...shape.numbers];
  return [
    ...(first ? [/** @type {[string, string]} */ ([numbers[first], "n"])] : []),
    [share(row.score), "n score"],
    ...shape.graders.map((name) => verdictText(row.graders[name])),
    ...others.map((name) => /** @type {[string, string]} */ ([numbers[name], "n"])),
    [plain(row.error || row.preview), "preview"],
  ];
}

/** @param {Verdict | undefined} verdict @returns {[string, string]} */
function verdictText(verdict) {
  if (!verdict) return ["", "n"];
  const text = verdict[0] === "not_reached" ? "–" : words(verdict[0]);
  return [verdict[1] === null ? text : share(verdict[1]), `n verdict ${verdict[0]}`];
}
