"use strict";
// The page reads without this: it only sorts tables and offers the embedded data as files.

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

const embedded = document.getElementById("embedded");
for (const button of document.querySelectorAll("[data-download]")) {
  const kind = button.dataset.download;
  button.hidden = false;
  button.addEventListener("click", () => {
    const link = document.createElement("a");
    const content = JSON.parse(embedded.textContent)[kind];
    link.href = URL.createObjectURL(new Blob([content], { type: button.dataset.type }));
    link.download = `${embedded.dataset.name}.${kind}`;
    link.click();
    URL.revokeObjectURL(link.href);
  });
}
