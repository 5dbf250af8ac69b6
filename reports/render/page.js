"use strict";
// The page reads without this: it only sorts and filters tables and offers the embedded data as files.

function sortRows(table, index, ascending) {
  const value = (row) => row.cells[index].dataset.sort ?? row.cells[index].textContent;
  const order = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === ""); // unknown goes last, whichever way
    const numbers = x.trim() !== "" && y.trim() !== "" && !isNaN(x) && !isNaN(y);
    const sign = numbers ? x - y : x.localeCompare(y);
    return ascending ? sign : -sign;
  };
  const body = table.tBodies[0];
  body.append(...[...body.rows].sort(order));
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      sortRows(table, index, ascending);
    });
  });
}

// a table of a few rows needs no filter
const FEWEST_TO_FILTER = 6;

function filterRows(table, text, told) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of table.tBodies[0].rows) {
    const content = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => content.includes(word));
    shown += !row.hidden;
  }
  told.textContent = words.length ? `${shown} of ${table.tBodies[0].rows.length} rows` : "";
}

for (const table of document.querySelectorAll("table.sortable")) {
  if (table.tBodies[0].rows.length < FEWEST_TO_FILTER) continue;
  const label = document.createElement("label");
  const input = document.createElement("input");
  const told = document.createElement("span");
  const name = table.caption.textContent.split(":")[0];
  input.type = "search";
  input.setAttribute("aria-label", `Filter rows: ${name}`);
  told.setAttribute("role", "status");
  label.className = "filter";
  label.append("Filter rows ", input, " ", told);
  table.before(label);
  input.addEventListener("input", () => filterRows(table, input.value, told));
}

// a link to a row told in full opens what holds it
function openTarget() {
  let place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const target = place;
  for (; place; place = place.parentElement) if (place.tagName === "DETAILS") place.open = true;
  target?.scrollIntoView();
}
addEventListener("hashchange", openTarget);
if (location.hash) openTarget();

const COLUMNS = ["status", "launches", "planned", "iterations", "check_passed", "noise",
  "metric", "value", "low", "high", "unit", "better", "method"];

function csvOf(whole) {
  const runs = whole.runs ?? [whole];
  const paramsOf = (row) => ({ ...row.case.defaults, ...row.case.params });
  const params = [...new Set(runs.flatMap((run) => run.rows.flatMap((row) => Object.keys(paramsOf(row)))))];
  const lines = [["run", "case", "name", ...params.map((name) => `param_${name}`), ...COLUMNS]];
  for (const run of runs) for (const row of run.rows) {
    const counts = [row.launches, row.planned, row.iterations, row.check.passed, row.grade];
    const values = params.map((name) => paramsOf(row)[name]);
    const known = [run.run.id, row.case.id, row.case.name, ...values, row.status, ...counts];
    const metrics = Object.entries(row.metrics);
    if (!metrics.length) lines.push([...known, ...Array(7).fill(null)]);
    for (const [name, metric] of metrics) {
      lines.push([...known, name, metric.value, metric.low, metric.high, metric.unit, metric.better, metric.method]);
    }
  }
  return lines.map((line) => line.map(quoted).join(",") + "\n").join("");
}

function word(value) {
  return value === true ? "True" : value === false ? "False" : String(value);
}

function quoted(value) {
  const text = value === null || value === undefined ? "" : word(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const embedded = document.getElementById("embedded");
for (const button of document.querySelectorAll("[data-download]")) {
  const kind = button.dataset.download;
  button.hidden = false;
  button.addEventListener("click", () => {
    const link = document.createElement("a");
    const content = kind === "csv" ? csvOf(JSON.parse(embedded.textContent)) : embedded.textContent;
    link.href = URL.createObjectURL(new Blob([content], { type: button.dataset.type }));
    link.download = `${embedded.dataset.name}.${kind}`;
    link.click();
    URL.revokeObjectURL(link.href);
  });
}
