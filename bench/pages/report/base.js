// What every part of the page uses: elements from data (never markup), numbers, theme, hints, tables with a CSV button.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (selector) => document.querySelector(selector);
const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(element.style, value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
};
const number = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace(/^-(0\.?0*)$/, "$1"));
const unique = (values) => [...new Set(values)];
const ascending = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));

// ---- light and dark ----
const repaint = [];
const dark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const themed = () => { $("#theme").textContent = dark() ? "Light" : "Dark"; repaint.forEach((again) => again()); };
$("#theme").addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; themed(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themed);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- hints ----
const tip = $("#tip");
const showTip = (text, left, top, bottom) => {
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = Math.max(4, Math.min(left, innerWidth - tip.offsetWidth - 4)) + "px";
  tip.style.top = (bottom + tip.offsetHeight + 10 > innerHeight ? top - tip.offsetHeight - 6 : bottom + 6) + "px";
};
const hideTip = () => { tip.hidden = true; };
const hint = (element, text) => {
  const show = () => { const box = element.getBoundingClientRect(); showTip(text, box.left, box.top, box.bottom); };
  element.addEventListener("mouseenter", show);
  element.addEventListener("focus", show);
  element.addEventListener("mouseleave", hideTip);
  element.addEventListener("blur", hideTip);
  return element;
};
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

// ---- tables ----
// A column: key, title, and if they differ from row[key]: shown(row) -> nodes, value(row) -> what is sorted by and saved.
const csvCell = (value) => {
  let text = value === null || value === undefined ? "" : Array.isArray(value) ? value.join(" ") : String(value);
  if (/^[=+@\t\r-]/.test(text) && Number.isNaN(Number(text))) text = "'" + text;       // no formula for a spreadsheet
  return /[",\n\r]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
};
const csvText = (columns, rows) => [columns.map((column) => csvCell(column.name ?? column.title ?? column.key)),
  ...rows.map((row) => columns.map((column) => csvCell(column.value ? column.value(row) : row[column.key])))]
  .map((cells) => cells.join(",")).join("\r\n") + "\r\n";
const csvButton = (name, columns, rows) => {
  const button = make("button", { type: "button", class: "csv" }, "CSV");
  button.setAttribute("aria-label", `Save ${name} as CSV`);
  button.addEventListener("click", () => {
    const link = make("a", { download: name.toLowerCase().replace(/[^a-z0-9]+/g, "-") + ".csv" });
    link.href = URL.createObjectURL(new Blob([csvText(columns, rows)], { type: "text/csv" }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
  return button;
};
const dataTable = (name, columns, rows, sorted = null, note = "") => {
  const box = make("div", { class: "data-table" });
  const saved = columns.filter((column) => column.csv !== false), visible = columns.filter((column) => !column.hide);
  const redrawTable = () => {
    if (sorted) {
      const column = columns.find((one) => one.key === sorted.key);
      const value = (row) => (column.value ? column.value(row) : row[column.key]);
      rows = [...rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === null || y === null) return (x === null) - (y === null);
        return sorted.down ? ascending(y, x) : ascending(x, y);
      });
    }
    const head = make("tr");
    for (const column of visible) {
      const th = make("th", { scope: "col", class: column.kind === "number" ? null : "text" });
      if (column.title && column.csv !== false) {
        const button = make("button", { type: "button" }, column.title);
        button.addEventListener("click", () => {
          sorted = { key: column.key, down: sorted?.key === column.key ? !sorted.down : column.kind === "number" };
          redrawTable();
          box.querySelector(`th[aria-sort] button`)?.focus();
        });
        th.append(button);
        if (sorted?.key === column.key) th.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
      } else th.append(column.title ?? "");
      head.append(th);
    }
    const body = rows.map((row) => make("tr", {}, ...visible.map((column) => make("td",
      { class: column.kind === "number" ? null : column.kind === "long" ? "text long" : "text" },
      ...(column.shown ? column.shown(row) : [column.kind === "number" ? number(row[column.key], column.digits ?? 3) : String(row[column.key] ?? "–")])))));
    box.replaceChildren(
      make("div", { class: "toolbar" }, make("span", { class: "quiet" }, `${rows.length} rows${note}`), csvButton(name, saved, rows)),
      make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name },
        make("table", {}, make("thead", {}, head), make("tbody", {}, ...body))));
  };
  redrawTable();
  return box;
};
const runLinks = (runs) => runs.flatMap((run, k) => [k ? " " : "", make("a", { href: "#run-" + run }, run)]);
const methodCell = (row) => [make("span", { class: "swatch", style: { background: row.colour } }), row.series,
  ...(row.settings ? [make("small", { class: "settings" }, row.settings)] : [])];
// A column that is the same everywhere goes into words instead; CSV keeps it.
const telling = (columns, rows) => columns.map((column) => (column.rare && unique(rows.map((row) => row[column.key])).length < 2 ? { ...column, hide: true } : column));
const choices = (form, fields, state, changed) => {
  form.replaceChildren(...fields.map(({ key, title, options, all }) => {
    const select = make("select", { name: key });
    if (all) select.append(make("option", { value: "" }, "all"));
    for (const option of options) select.append(make("option", { value: option.value ?? option }, String(option.title ?? option)));
    select.value = String(state[key] ?? "");
    select.addEventListener("change", () => { state[key] = select.value; changed(key); });
    return make("label", {}, title, select);
  }));
};
