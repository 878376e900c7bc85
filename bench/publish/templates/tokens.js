"use strict";
const pairs = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
let pair, matrix, pinned = null, shown = null;      // a choice is [side, index]: side 0 the query, 1 the training text
const sides = [$("query"), $("train")];

const number = (value) => (value === null ? "–" : value === 0 ? "0" : Math.abs(value) < 0.001 || Math.abs(value) >= 10000
  ? value.toExponential(1).replace("e+", "e") : Math.abs(value) >= 1000 ? value.toFixed(0) : value.toPrecision(3)
).replaceAll("-", "\u2212");
const name = (text) => text === "\n" ? "line end" : text.trim() === "" ? "space" : `“${text.trim()}”`;
const at = (query, train) => matrix[query][train];

function profile(side, choice) {                    // a number for every token of `side`
  const [rows, columns] = [matrix.length, matrix[0].length], out = new Float32Array(side ? columns : rows);
  if (choice && choice[0] !== side) {
    for (let k = 0; k < out.length; k++) out[k] = side ? at(rows === 1 ? 0 : choice[1], k) : at(k, choice[1]);
  } else {
    const share = 1 / (side ? rows : columns);
    for (let q = 0; q < rows; q++) for (let t = 0; t < columns; t++) out[side ? t : q] += share * at(q, t);
  }
  return out;
}
function paint(choice) {
  shown = choice;
  const whole = matrix.length === 1;                  // one score a training token: nothing to tell query tokens apart by
  let largest = 0;
  const profiles = [0, 1].map((side) => {
    if ((choice && choice[0] === side) || (whole && side === 0)) return null;
    const values = profile(side, choice);
    for (const value of values) largest = Math.max(largest, Math.abs(value));
    return values;
  });
  for (const side of [0, 1]) {
    const spans = sides[side].children, values = profiles[side];
    for (let k = 0; k < spans.length; k++) {
      const strength = values ? values[k] / (largest || 1) : 0;
      spans[k].style.background = Math.abs(strength) < 0.02 ? "" :
        `rgb(var(--${strength < 0 ? "helps" : "harms"}) / ${(0.8 * Math.abs(strength)).toFixed(3)})`;
      spans[k].title = values ? number(values[k]) : "";
      const on = Boolean(choice && choice[0] === side && choice[1] === k);
      if ((spans[k].getAttribute("aria-pressed") === "true") !== on) spans[k].setAttribute("aria-pressed", on);
    }
  }
  $("low").textContent = number(-largest); $("high").textContent = "+" + number(largest);
  if (!choice) {
    $("said").textContent = whole ? "Every training token's part of the score; they sum to it."
      : "No token chosen: each token's average over the other sequence.";
    return;
  }
  const other = 1 - choice[0], values = profiles[other], texts = other ? pair.train_tokens : pair.query_tokens;
  const own = (choice[0] ? pair.train_tokens : pair.query_tokens)[choice[1]];
  const order = [...values.keys()].sort((a, b) => Math.abs(values[b]) - Math.abs(values[a])).slice(0, 3);
  $("said").textContent = `${choice[0] ? "Training" : "Query"} token ${choice[1] + 1}, ${name(own)}: strongest with ` +
    order.map((k) => `${name(texts[k])} (${k + 1}): ${number(values[k])}`).join(", ");
}
function choose(side, index, pin) {
  const same = pinned && pinned[0] === side && pinned[1] === index;
  if (pin) pinned = same ? null : [side, index];
  paint(pin ? pinned : [side, index]);
}
function fill(side, texts) {
  const box = sides[side], selectable = matrix.length > 1;
  box.replaceChildren(...texts.map((text, k) => {
    const span = document.createElement("span");
    span.className = "token"; span.textContent = text === "\n" ? "↵\n" : text;
    if (text === "\n" || text === "\ufffd") span.classList.add("control");
    if (selectable) {
      span.setAttribute("role", "button"); span.setAttribute("aria-pressed", "false");
      span.setAttribute("aria-label", `token ${k + 1}, ${name(text)}`);
      span.tabIndex = k === 0 ? 0 : -1;
    }
    span.dataset.index = k;
    return span;
  }));
}
function load() {
  pair = pairs[$("pair").selectedIndex];
  matrix = pair.measures[$("measure").value];
  pinned = null;
  fill(0, pair.query_tokens); fill(1, pair.train_tokens);
  $("query-name").textContent = `query ${pair.query}`; $("train-name").textContent = `sequence ${pair.train}`;
  $("score").textContent = `Sequence-level score ${number(pair.score)}` +
    (pair.correlation === undefined ? "" : `, correlation ${number(pair.correlation)}`) + ".";
  paint(null);
}
pairs.forEach((p, k) => $("pair").add(new Option(`${k + 1}: query ${p.query}, training sequence ${p.train}`)));
for (const measure of Object.keys(pairs[0].measures)) $("measure").add(new Option(measure));
$("measure").parentElement.hidden = Object.keys(pairs[0].measures).length === 1;
if (pairs[0].measures[$("measure").value].length === 1) $("keys").hidden = true;
$("pair").onchange = load; $("measure").onchange = load;
sides.forEach((box, side) => {
  const token = (event) => event.target.closest(".token[role]");
  box.addEventListener("mouseover", (event) => {
    if (!pinned && token(event)) choose(side, +token(event).dataset.index, false);
  });
  box.addEventListener("mouseleave", () => paint(pinned));
  box.addEventListener("click", (event) => { if (token(event)) choose(side, +token(event).dataset.index, true); });
  box.addEventListener("focusin", (event) => {
    const span = token(event);
    if (!span) return;
    box.querySelectorAll('[tabindex="0"]').forEach((s) => { s.tabIndex = -1; });
    span.tabIndex = 0;
    if (!pinned && span.matches(":focus-visible")) choose(side, +span.dataset.index, false);
  });
  box.addEventListener("focusout", () => { if (!pinned) paint(null); });
  box.addEventListener("keydown", (event) => {
    const span = token(event);
    if (!span) return;
    const last = box.children.length - 1, k = +span.dataset.index;
    const to = { ArrowRight: k + 1, ArrowDown: k + 1, ArrowLeft: k - 1, ArrowUp: k - 1, Home: 0, End: last }[event.key];
    if (to !== undefined) { event.preventDefault(); box.children[Math.min(last, Math.max(0, to))].focus(); }
    else if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(side, k, true); }
  });
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") { pinned = null; paint(null); } });
load();
document.documentElement.dataset.ready = "true";
