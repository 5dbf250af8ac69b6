"use strict";
// The page works without scripts. They sort and filter tables.

function sortRows(table, index, ascending) {
  const value = (row) => row.cells[index].dataset.sort ?? row.cells[index].textContent;
  const order = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === ""); // Unknown values go last in both orders.
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

// A short table needs no filter.
const MIN_ROWS_TO_FILTER = 6;

function filterRows(table, text, status) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of table.tBodies[0].rows) {
    const content = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => content.includes(word));
    shown += !row.hidden;
  }
  status.textContent = words.length ? `${shown} of ${table.tBodies[0].rows.length} rows` : "";
}

for (const table of document.querySelectorAll("table.sortable")) {
  if (table.tBodies[0].rows.length < MIN_ROWS_TO_FILTER) continue;
  const label = document.createElement("label");
  const input = document.createElement("input");
  const status = document.createElement("span");
  const name = table.caption.textContent.split(":")[0];
  input.type = "search";
  input.setAttribute("aria-label", `Filter rows: ${name}`);
  status.setAttribute("role", "status");
  label.className = "filter";
  label.append("Filter rows ", input, " ", status);
  table.before(label);
  input.addEventListener("input", () => filterRows(table, input.value, status));
}
