// ---- filters: tables, plots, figures, methods and runs all follow them ----
const chosen = { task: "", protocol: "", method: "", scores: "" };
const followers = [];
const passes = (facts) => Object.entries(chosen).every(([key, value]) => value === "" || !(key in facts)
  || (Array.isArray(facts[key]) ? facts[key].includes(value) : facts[key] === value));
const labelOf = (method) => data.methods.find((one) => one.method === method)?.label ?? method;
const refilter = () => {
  const of = (key) => unique(data.rows.filter((row) => key === "task" || !chosen.task || row.task === chosen.task).map((row) => row[key])).sort(ascending);
  if (chosen.protocol && !of("protocol").includes(chosen.protocol)) chosen.protocol = "";
  choices($("#filters"), [
    { key: "task", title: "Task", options: of("task"), all: true },
    { key: "protocol", title: "Protocol", options: of("protocol"), all: true },
    { key: "method", title: "Method", options: data.methods.map((one) => ({ value: one.method, title: one.label })), all: true },
    { key: "scores", title: "Scores", options: ["raw", "train-normalised"], all: true },
  ], chosen, refilter);
  const reset = make("button", { type: "button", id: "reset" }, "Show all");
  reset.hidden = Object.values(chosen).every((value) => value === "");
  reset.addEventListener("click", () => { for (const key in chosen) chosen[key] = ""; refilter(); });
  $("#filters").append(reset);
  followers.forEach((follow) => follow());
};

// ---- summary ----
const standings = () => {
  const rows = data.grounds.filter(passes).map((ground) => {
    const here = data.rows.filter((row) => row.ground === ground.ground && row.truth === ground.truth
      && row.alpha_attribution === ground.alpha_attribution && row.alpha === ground.alpha && passes(row) && row.lds !== null);
    const top = here.reduce((best, row) => (!best || row.lds > best.lds ? row : best), null);
    return top && { ...ground, series: top.series, colour: top.colour, lds: top.lds, low: top.low, high: top.high, scores: top.scores,
      rank: top.rank, ceiling: top.ceiling, ratio: top.ratio, runs: top.runs };
  }).filter(Boolean);
  const open = (row) => {
    const button = make("button", { type: "button" }, `${row.task}, ${row.protocol}`);
    button.addEventListener("click", () => { openGround(row.ground); $("#board").scrollIntoView(); });
    return [button, make("small", {}, `${row.description}; ${row.words}`)];
  };
  $("#standings").replaceChildren(dataTable("Where each experiment stands", [
    { key: "ground", title: "Experiment", shown: open }, { key: "alpha", title: "α retrain", kind: "number", digits: 2 },
    { key: "alpha_attribution", title: "α attribution", kind: "number", digits: 2 },
    { key: "series", title: "Highest LDS", shown: methodCell }, { key: "scores", title: "Scores" },
    { key: "lds", title: "LDS", kind: "number" }, { key: "low", title: "From", kind: "number" }, { key: "high", title: "To", kind: "number" },
    { key: "rank", title: "Rank" }, { key: "ceiling", title: "Ceiling", kind: "number", digits: 2 },
    { key: "ratio", title: "LDS / ceiling", kind: "number", digits: 2 },
    { key: "runs", title: "Runs", shown: (row) => runLinks(row.runs) },
  ], rows, null, "; each at its smallest share retrained on"));
};

// ---- leaderboard ----
const at = { ground: "", place: "", alpha: "" };
const placeOf = (row) => `${row.alpha_attribution}|${row.truth}`;
const inGround = () => data.rows.filter((row) => row.ground === at.ground && passes(row));
const openGround = (name) => {
  const ground = data.grounds.find((one) => one.ground === name);
  Object.assign(at, { ground: name, place: placeOf(ground), alpha: String(ground.alpha) });
  fillBoard();
};
const meter = (row) => {
  const low = -0.1, place = (x) => (100 * (Math.min(1, Math.max(low, x)) - low)) / (1 - low);
  const box = make("span", { class: "meter", role: "img", "aria-label": `LDS ${number(row.lds)}, ceiling ${number(row.ceiling)}` });
  if (row.lds === null) return box;
  box.append(make("em", { style: { left: place(0) + "%" } }));
  const [from, to] = [Math.min(0, row.lds), Math.max(0, row.lds)];
  box.append(make("i", { style: { left: place(from) + "%", width: place(to) - place(from) + "%", background: row.colour } }));
  if (row.low !== null) box.append(make("u", { style: { left: place(row.low) + "%", width: Math.max(0.5, place(row.high) - place(row.low)) + "%" } }));
  if (row.ceiling !== null) box.append(make("s", { style: { left: place(row.ceiling) + "%" } }));
  return box;
};
const intervalCell = (row) => {
  if (row.low === null) return ["–"];
  const [text, kind] = row.error !== null ? [`± ${number(row.error)}`, "standard error"]
    : [`[${number(row.low)}, ${number(row.high)}]`, row.seeds > 1 ? `95 %, span of ${row.seeds} seeds` : "95 % interval"];
  return [hint(make("span", { tabindex: "0" }, text, make("small", {}, kind)), row.bar)];
};
const ldsCell = (row) => {
  const link = make("a", { href: "#run-" + row.runs[0], class: /^1(-|$)/.test(row.rank) ? "best" : null }, number(row.lds));
  const said = `${row.subsets} subsets, ${row.queries} queries, ${row.replicates} replicate(s); run ${row.runs.join(", ")}`;
  return [hint(link, row.note ? `${said}\n${row.note}` : said), ...(row.note ? [make("small", {}, "see note")] : [])];
};
const ceilingCell = (row) => {
  const text = number(row.ceiling, 2) + (row.shaky ? " *" : "");
  const said = [row.shaky ? "its interval touches 0" : "", row.ceiling_runs.length ? `from the replicates of run ${row.ceiling_runs.join(", ")}` : ""].filter(Boolean).join("; ");
  if (!said) return [text];
  return [hint(row.ceiling_runs.length ? make("a", { href: "#run-" + row.ceiling_runs[0] }, text) : make("span", { tabindex: "0" }, text), said)];
};
const boardColumns = () => [
  { key: "series", title: "Method", shown: methodCell }, { key: "scores", title: "Scores" },
  { key: "lds", title: "LDS", kind: "number", shown: ldsCell },
  { key: "interval", title: "Interval", kind: "number", shown: intervalCell, value: (row) => row.lds, csv: false },
  { key: "low", title: "From", hide: true }, { key: "high", title: "To", hide: true },
  { key: "meter", title: "", shown: (row) => [meter(row)], csv: false },
  { key: "rank", title: "Rank", shown: (row) => [row.rank || "–"], value: (row) => (row.rank ? parseInt(row.rank, 10) : null), csv: false },
  { key: "rank", name: "Rank", title: "Rank range", hide: true },
  { key: "ratio", title: "LDS / ceiling", kind: "number", digits: 2 }, { key: "ceiling", title: "Ceiling", kind: "number", shown: ceilingCell },
  ...(at.alpha === "" ? [{ key: "alpha", title: "α retrain", kind: "number", digits: 2 }] : []),
  { key: "seeds", title: "Seeds", kind: "number", digits: 0, rare: true }, { key: "undefined", title: "Undefined", kind: "number", digits: 0, rare: true },
  { key: "seconds", title: "Seconds", kind: "number", digits: 1 }, { key: "memory", title: "Memory, MiB", kind: "number", digits: 0 },
  { key: "machine", title: "Machine", rare: true }, { key: "settings", title: "Settings", hide: true }, { key: "runs", title: "Runs", hide: true }, { key: "note", title: "Note", hide: true },
];
const fillBoard = () => {
  const grounds = data.grounds.filter((ground) => data.rows.some((row) => row.ground === ground.ground && passes(row)));
  if (!grounds.length) {
    for (const id of ["#board-table", "#dots-plot", "#lds-plot", "#pair-matrix", "#pair-detail", "#experiment"]) $(id).replaceChildren();
    $("#about-experiment").textContent = "";
    $("#board-table").append(make("p", { class: "empty" }, ...(data.rows.length ? ["Nothing passes these filters."]
      : ["No results yet. Make some with ", make("code", {}, data.command)])));
    return;
  }
  if (!grounds.some((ground) => ground.ground === at.ground)) return openGround(grounds[0].ground);
  const all = inGround();
  const places = unique(all.map(placeOf)).sort(ascending);
  if (!places.includes(at.place)) at.place = places[0];
  const [share, truth] = at.place.split("|");
  const here = all.filter((row) => placeOf(row) === at.place);
  const alphas = unique(here.map((row) => row.alpha)).sort(ascending);
  if (at.alpha !== "" && !alphas.includes(Number(at.alpha))) at.alpha = String(alphas[0]);
  choices($("#experiment"), [
    { key: "ground", title: "Experiment", options: grounds.map((one) => ({ value: one.ground, title: `${one.description}: ${one.words}` })) },
    { key: "place", title: "α attribution, ground truth", options: places.map((place) => ({ value: place, title: place.replace("|", ": ") })) },
    { key: "alpha", title: "α retrain", options: alphas, all: true },
  ], at, (key) => (key === "ground" ? openGround(at.ground) : fillBoard()));
  const ground = grounds.find((one) => one.ground === at.ground);
  $("#about-experiment").textContent = `${ground.description}; ${ground.words}; ${truth}; ${share} of the training set attributed.`;
  const rows = here.filter((row) => at.alpha === "" || row.alpha === Number(at.alpha));
  const same = (key, name) => { const values = unique(rows.map((row) => row[key])); return values.length === 1 ? `; ${name(values[0])}` : ""; };
  const note = same("seeds", (n) => `${n} seed${n === 1 ? "" : "s"}`) + same("undefined", (n) => `${n} undefined values`) + same("machine", String);
  const table = dataTable(`Leaderboard ${at.ground}`, telling(boardColumns(), rows), rows, { key: "lds", down: true }, note);
  $("#board-table").replaceChildren(table);
  showPlot("dots", at.alpha === "" ? here.filter((row) => row.alpha === alphas[0]) : rows);
  $("#lds-box").hidden = alphas.length < 2;
  showPlot("lds", here);
  fillPairs(rows, share, truth);
};
