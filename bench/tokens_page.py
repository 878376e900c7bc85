"""The page of `bench.tokens`: sequences as coloured tokens, in one file that needs nothing else.

Matrices travel as one byte a number: k in -127..127 stands for sign(k) (k / 127)^2 times the matrix's largest size, so
that small scores keep two digits beside large ones.
"""

import base64
import html
import json
from typing import Any

import numpy as np

LEVELS = 127


def packed(matrix: np.ndarray) -> dict[str, Any]:
    """What the page's script unpacks."""
    largest = float(np.abs(matrix).max()) or 1.0
    levels = np.round(np.sign(matrix) * np.sqrt(np.abs(matrix) / largest) * LEVELS).astype(np.int8)
    return {"rows": matrix.shape[0], "largest": largest, "bytes": base64.b64encode(levels.tobytes()).decode()}


def unpacked(content: dict[str, Any]) -> np.ndarray:
    """What the page shows for `packed`; the script does the same."""
    levels = np.frombuffer(base64.b64decode(content["bytes"]), dtype=np.int8).astype(np.float64)
    values = np.sign(levels) * (levels / LEVELS) ** 2 * content["largest"]
    return values.reshape(content["rows"], -1)


def page(title: str, lead: str, record: dict[str, Any], pairs: list[dict[str, Any]]) -> str:
    """`pairs`: query, train, query_tokens, train_tokens, score, and measures {name: packed matrix}."""
    # "</" would end the script element, wherever it stands in the text of a token.
    data = json.dumps(pairs, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\!--")
    return (
        TEMPLATE.replace("%STYLE%", STYLE)
        .replace("%TITLE%", html.escape(title))
        .replace("%LEAD%", html.escape(lead))
        .replace("%RECORD%", html.escape(json.dumps(record, indent=1)))
        .replace("%SCRIPT%", SCRIPT)
        .replace("%DATA%", data)
    )


STYLE = """
:root { color-scheme: light; --ground: #fbfbfa; --surface: #fff; --ink: #1b1e23; --quiet: #5b626d; --line: #dfe2e7;
  --accent: #00639c; --helps: 0 114 178; --harms: 213 94 0; }
@media (prefers-color-scheme: dark) { :root { color-scheme: dark; --ground: #14161a; --surface: #1c1f25; --ink: #f2f3f5;
  --quiet: #a0a7b2; --line: #333842; --accent: #6cb8ec; --helps: 30 130 200; --harms: 205 92 10; } }
* { box-sizing: border-box; } [hidden] { display: none !important; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem 1.25rem 3rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.35rem; margin: .2rem 0 .3rem; letter-spacing: -.01em; } h2 { font-size: 1rem; margin: 0; }
p { margin: .2rem 0; max-width: 56rem; } #score { margin-top: .8rem; }
.quiet { color: var(--quiet); font-size: .88rem; }
.bar { display: flex; flex-wrap: wrap; gap: .6rem 1.2rem; align-items: center; margin: .9rem 0; }
label { font-size: .85rem; color: var(--quiet); display: flex; gap: .4rem; align-items: center; }
select { font: inherit; color: var(--ink); background: var(--surface); border: 1px solid var(--line);
  border-radius: 6px; padding: .25rem .5rem; max-width: min(30rem, 80vw); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
.panel { background: var(--surface); border: 1px solid var(--line); border-radius: 8px; padding: .8rem .9rem;
  min-width: 0; }
.head { display: flex; justify-content: space-between; gap: 1rem; align-items: baseline; margin-bottom: .45rem; }
.tokens { font: .95rem/1.95 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 65vh; overflow-y: auto; padding: 2px; }
.token { border-radius: 3px; padding: .12rem 0; cursor: pointer; box-shadow: 0 0 0 .5px var(--line); }
.token.control { color: var(--quiet); }
.token[aria-pressed="true"] { outline: 2px solid var(--ink); outline-offset: 0; border-radius: 2px; }
.legend { display: flex; align-items: center; gap: .5rem; font-size: .85rem; font-variant-numeric: tabular-nums; }
.ramp { width: 9rem; height: .8rem; border-radius: 3px; border: 1px solid var(--line);
  background: linear-gradient(90deg, rgb(var(--helps) / .8), transparent, rgb(var(--harms) / .8)); }
#said { min-height: 1.5em; margin: .5rem 0 .8rem; font-variant-numeric: tabular-nums; }
details { margin-top: 1.4rem; } summary { cursor: pointer; color: var(--quiet); }
pre { overflow: auto; font: .8rem/1.5 ui-monospace, Menlo, Consolas, monospace; background: var(--surface);
  border: 1px solid var(--line); border-radius: 8px; padding: .7rem; }
kbd { font: .8rem ui-monospace, Menlo, Consolas, monospace; border: 1px solid var(--line); border-radius: 4px;
  padding: 0 .3rem; background: var(--surface); }
"""

SCRIPT = r"""
"use strict";
const pairs = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const unpack = (content) => {
  const raw = Uint8Array.from(atob(content.bytes), (c) => c.charCodeAt(0));
  const levels = new Int8Array(raw.buffer), values = new Float32Array(levels.length);
  for (let k = 0; k < levels.length; k++) {
    const level = levels[k] / 127;
    values[k] = Math.sign(level) * level * level * content.largest;
  }
  return { rows: content.rows, columns: values.length / content.rows, values };
};
let pair, matrix, pinned = null, shown = null;      // a choice is [side, index]: side 0 the query, 1 the training text
const sides = [$("query"), $("train")];

const number = (value) => (value === 0 ? "0" : Math.abs(value) < 0.001 || Math.abs(value) >= 10000
  ? value.toExponential(1).replace("e+", "e") : Math.abs(value) >= 1000 ? value.toFixed(0) : value.toPrecision(3)
).replaceAll("-", "\u2212");
const name = (text) => text === "\n" ? "line end" : text.trim() === "" ? "space" : `“${text.trim()}”`;
const at = (query, train) => matrix.values[query * matrix.columns + train];

function profile(side, choice) {                    // a number for every token of `side`
  const [rows, columns] = [matrix.rows, matrix.columns], out = new Float32Array(side ? columns : rows);
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
  const whole = matrix.rows === 1;                  // one score a training token: nothing to tell query tokens apart by
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
  const box = sides[side], selectable = !(matrix.rows === 1);
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
  matrix = unpack(pair.measures[$("measure").value]);
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
if (pairs[0].measures[$("measure").value].rows === 1) $("keys").hidden = true;
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
"""

TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>%TITLE%</title><style>%STYLE%</style></head><body>
<h1>%TITLE%</h1>
<p class="quiet">%LEAD%</p>
<div class="bar">
<label>Pair <select id="pair"></select></label>
<label>Measure <select id="measure"></select></label>
<span class="legend" aria-label="colour scale"><span>helps <span id="low"></span></span><span class="ramp"></span>
<span><span id="high"></span> harms</span></span>
</div>
<p class="quiet" id="keys">Point at a token to see how the other sequence's tokens bear on it; click, or
<kbd>Enter</kbd>, keeps it; <kbd>←</kbd> <kbd>→</kbd> move, <kbd>Esc</kbd> lets go.</p>
<p id="said" role="status" aria-live="polite"></p>
<div class="panels">
<section class="panel"><div class="head"><h2>Query</h2><span class="quiet" id="query-name"></span></div>
<div class="tokens" id="query" role="group" aria-label="query tokens"></div></section>
<section class="panel"><div class="head"><h2>Training sequence</h2><span class="quiet" id="train-name"></span></div>
<div class="tokens" id="train" role="group" aria-label="training tokens"></div></section>
</div>
<p class="quiet" id="score"></p>
<details><summary>How this was made</summary><pre>%RECORD%</pre></details>
<script type="application/json" id="data">%DATA%</script>
<script>%SCRIPT%</script>
</body></html>
"""
