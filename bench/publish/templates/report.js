"use strict";
// A click on a head sorts its table: by numbers where cells begin with one, else by letters; a second click turns it.
for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("th").forEach((head, k) => head.addEventListener("click", () => {
    const down = head.dataset.down !== "true";
    head.dataset.down = String(down);
    const rows = [...table.tBodies[0].rows];
    const text = (row) => row.cells[k].textContent.trim();
    const value = (row) => (Number.isNaN(parseFloat(text(row))) ? -Infinity : parseFloat(text(row)));
    const numbers = rows.some((row) => value(row) > -Infinity);
    rows.sort((a, b) => (numbers ? value(b) - value(a) : text(a).localeCompare(text(b))) * (down ? 1 : -1));
    table.tBodies[0].append(...rows);
  }));
}
// The box finds boards by their title or a method in them.
const find = document.getElementById("find");
find.addEventListener("input", () => {
  const wanted = find.value.trim().toLowerCase();
  for (const board of document.querySelectorAll(".board")) {
    board.hidden = wanted !== "" && !board.textContent.toLowerCase().includes(wanted);
    if (wanted !== "" && !board.hidden) board.open = true;
  }
});
// A link to something folded opens it.
const open = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let one = target; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
};
addEventListener("hashchange", open);
open();
document.documentElement.dataset.ready = "true";
