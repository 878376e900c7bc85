// ---- paired differences: a matrix of the leaderboard's methods, whichever way round the records have a pair ----
const turned = (pair) => ({ ...pair, series: pair.against, against: pair.series, difference: -pair.difference,
  low: pair.high === null ? null : -pair.high, high: pair.low === null ? null : -pair.low, per_seed: pair.per_seed.map((value) => -value) });
let pairedScores = "raw";
const fillPairs = (rows, share, truth) => {
  const alpha = at.alpha === "" ? Math.min(...rows.map((row) => row.alpha)) : Number(at.alpha);
  const kinds = unique(rows.map((row) => row.scores)).sort(ascending);
  if (!kinds.includes(pairedScores)) pairedScores = kinds[0];
  const names = unique(rows.filter((row) => row.scores === pairedScores).sort((a, b) => b.lds - a.lds).map((row) => row.series));
  const pairs = data.pairs.filter((pair) => pair.ground === at.ground && pair.truth === truth && pair.scores === pairedScores
    && pair.alpha_attribution === Number(share) && pair.alpha === alpha && names.includes(pair.series) && names.includes(pair.against));
  const both = [...pairs, ...pairs.map(turned)];
  const find = (row, column) => both.find((pair) => pair.series === row && pair.against === column);
  const largest = Math.max(1e-9, ...both.map((pair) => Math.abs(pair.difference ?? 0)));
  $("#pair-detail").replaceChildren();
  if (!pairs.length) {
    $("#pair-matrix").replaceChildren(make("p", { class: "empty" }, "No run has two of these methods beside each other."));
    return;
  }
  const state = { scores: pairedScores };
  const form = make("form", { class: "choices" });
  choices(form, [{ key: "scores", title: `Scores, at α retrain ${alpha}`, options: kinds }], state, () => { pairedScores = state.scores; fillPairs(rows, share, truth); });
  const cell = (row, column) => {
    if (row === column) return make("td", {}, "·");
    const pair = find(row, column);
    if (!pair || pair.difference === null) return make("td", { class: "quiet" }, "–");
    const sure = pair.low !== null && (pair.low > 0 || pair.high < 0);
    const button = make("button", { type: "button", "aria-pressed": "false", "aria-label": `${row} minus ${column}: ${number(pair.difference)}`, style: {
      background: `rgb(var(--${pair.difference > 0 ? "above" : "below"}) / ${(0.55 * Math.abs(pair.difference) / largest).toFixed(3)})`, fontWeight: sure ? "700" : "400" } },
      (pair.difference > 0 ? "+" : "") + number(pair.difference));
    button.addEventListener("click", () => {
      $("#pair-matrix").querySelectorAll("td button").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      showPair(pair, sure);
    });
    return make("td", {}, button);
  };
  const table = make("table", { class: "matrix" },
    make("thead", {}, make("tr", {}, make("th", { class: "text" }, "minus"), ...names.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...names.map((row) => make("tr", {}, make("th", { scope: "row", class: "text" }, row), ...names.map((column) => cell(row, column))))));
  const columns = ["ground", "truth", "alpha_attribution", "alpha", "scores", "series", "against", "difference", "low", "high", "bar", "seeds", "p", "runs"].map((key) => ({ key }));
  $("#pair-matrix").replaceChildren(
    make("div", { class: "toolbar" }, form, csvButton(`Paired differences ${at.ground}`, columns, pairs)),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Paired differences" }, table));
};
const showPair = (pair, sure) => {
  const seeds = pair.per_seed.map((value) => (value > 0 ? "+" : "") + number(value)).join(", ");
  $("#pair-detail").replaceChildren(make("div", { class: "card" },
    make("h4", {}, `${pair.series} minus ${pair.against}, ${pair.scores} scores`),
    make("p", {}, `${pair.difference > 0 ? "+" : ""}${number(pair.difference)} [${number(pair.low)}, ${number(pair.high)}], ${pair.bar}: `
      + (sure ? `${pair.difference > 0 ? pair.series : pair.against} has the higher LDS.` : "the interval holds 0, so neither is ahead.")),
    make("p", { class: "quiet" }, `${pair.truth}; α attribution ${pair.alpha_attribution}, α retrain ${pair.alpha}; per seed ${seeds}`
      + (pair.p === null ? "" : `; p = ${pair.p.toPrecision(2)}`) + "; run ", ...runLinks(pair.runs))));
};
