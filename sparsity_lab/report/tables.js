"use strict";
// A click on a column's name sorts its table: numbers from the largest, words from A; again, the other way round.

function key(row, column) {
  const text = row.cells[column].dataset.sort;
  if (text === undefined) return null;
  const value = Number(text);
  return text.trim() === "" || Number.isNaN(value) ? text : value;
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

function sort(table, heads, column) {
  const head = heads[column];
  const first = head.classList.contains("number") ? "descending" : "ascending";
  const other = first === "ascending" ? "descending" : "ascending";
  const order = head.getAttribute("aria-sort") === first ? other : first;
  const sign = order === "ascending" ? 1 : -1;
  const body = table.tBodies[0];
  const rows = Array.from(body.rows, (row) => ({ row, value: key(row, column) }));
  rows.sort((a, b) => {
    if (a.value === null || b.value === null) return (a.value === null) - (b.value === null);
    return sign * compare(a.value, b.value);
  });
  body.append(...rows.map(({ row }) => row));
  heads.forEach((each) => each.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", order);
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sort(table, heads, column));
  });
}
