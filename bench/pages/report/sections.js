// ---- figures: hidden where the filters do not want them ----
const filterFigures = () => {
  let shown = 0;
  const figures = [...document.querySelectorAll("figure[data-facts]")];
  for (const figure of figures) {
    figure.hidden = !passes(JSON.parse(figure.dataset.facts));
    shown += !figure.hidden;
  }
  for (const explorer of document.querySelectorAll(".explorer")) explorer.hidden = !passes({ task: explorer.dataset.task });
  for (const group of document.querySelectorAll(".task-figures, .more-figures")) {
    group.hidden = ![...group.querySelectorAll("figure, .explorer")].some((one) => !one.hidden);
  }
  $("#figure-count").textContent = figures.length ? `${shown} of ${figures.length} figures shown.` : "";
};

// ---- drawings: unpacked and parsed as XML when they come near, the rest when the browser has nothing else to do ----
const parser = new DOMParser();
const waitingDrawings = 'script[type="image/svg+xml"]:not([data-begun])';
const unpacked = (text) => {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
};
const place = async (waiting) => {
  waiting.dataset.begun = "true";
  try {
    const drawing = parser.parseFromString(await unpacked(waiting.textContent), "image/svg+xml").documentElement;
    waiting.replaceWith(document.importNode(drawing, true));
  } catch (error) {
    waiting.replaceWith(`This browser cannot unpack the drawing (${error.message}); the figure is in the results folder.`);
  }
};
const nearby = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    nearby.unobserve(target);
    target.querySelectorAll(waitingDrawings).forEach(place);
  }
}, { rootMargin: "1200px" });
document.querySelectorAll("figure .picture").forEach((picture) => nearby.observe(picture));
const placeRest = (idle) => {
  do {
    const waiting = document.querySelector(waitingDrawings);
    if (!waiting) return;
    place(waiting);
  } while (idle.timeRemaining() > 8);
  requestIdleCallback(placeRest);
};
addEventListener("load", () => requestIdleCallback(placeRest));

// ---- tables that are part of the page ----
for (const table of document.querySelectorAll("#answers table, #paper table, figure table")) {
  const columns = [...table.querySelectorAll("thead th")].map((th, k) => ({ key: String(k), title: th.textContent }));
  const rows = [...table.querySelectorAll("tbody tr")].map((tr) => Object.fromEntries([...tr.children].map((td, k) => [String(k), td.textContent])));
  const name = table.closest("figure")?.querySelector("h4").textContent ?? "table";
  table.parentElement.before(make("div", { class: "toolbar" }, make("span", {}), csvButton(name, columns, rows)));
}

// ---- costs ----
const costAt = { ground: "", machine: "" };
const fillCosts = () => {
  const rows = data.costs.filter(passes);
  const grounds = unique(rows.map((row) => row.ground));
  if (!grounds.length) {
    $("#cost-table").replaceChildren(make("p", { class: "empty" }, "No seconds here."));
    $("#cost-experiment").replaceChildren();
    showPlot("cost", []);
    return;
  }
  if (!grounds.includes(costAt.ground)) costAt.ground = grounds.includes(at.ground) ? at.ground : grounds[0];
  const machines = unique(rows.filter((row) => row.ground === costAt.ground).map((row) => row.machine));
  if (!machines.includes(costAt.machine)) costAt.machine = machines[0];
  const title = (name) => { const ground = data.grounds.find((one) => one.ground === name); return `${ground.description}: ${ground.words}`; };
  choices($("#cost-experiment"), [
    { key: "ground", title: "Experiment", options: grounds.map((name) => ({ value: name, title: title(name) })) },
    { key: "machine", title: "Machine", options: machines },
  ], costAt, fillCosts);
  const ground = data.grounds.find((one) => one.ground === costAt.ground);
  showPlot("cost", data.rows.filter((row) => passes(row) && row.ground === costAt.ground && row.machine === costAt.machine
    && row.alpha_attribution === ground.alpha_attribution && row.truth === ground.truth && row.alpha === ground.alpha && row.seconds !== null));
  $("#cost-table").replaceChildren(dataTable(`Costs ${costAt.ground}`, [
    { key: "series", title: "Method", shown: methodCell }, { key: "alpha_attribution", title: "α attribution", kind: "number", digits: 2 },
    { key: "fit", title: "Fit, s", kind: "number", digits: 2 }, { key: "score", title: "Score, s", kind: "number", digits: 2 },
    { key: "seconds", title: "Both, s", kind: "number", digits: 2 }, { key: "memory", title: "Peak memory, MiB", kind: "number", digits: 0 },
    { key: "queries", title: "Queries" }, { key: "seeds", title: "Seeds", kind: "number", digits: 0 }, { key: "machine", title: "Machine", hide: true },
    { key: "settings", title: "Settings", hide: true }, { key: "runs", title: "Runs", shown: (row) => runLinks(row.runs) },
  ], rows.filter((row) => row.ground === costAt.ground && row.machine === costAt.machine), { key: "seconds", down: false }, "; medians over seeds"));
};
const fillScaling = () => {
  const rows = data.scaling.filter(passes);
  $("#scaling-box").hidden = !rows.length;
  if (rows.length) showPlot("scaling", rows);
};

// ---- methods ----
const fillMethods = () => {
  const here = data.methods.filter((one) => !chosen.method || one.method === chosen.method);
  $("#method-list").replaceChildren(...here.map((one) => {
    const rows = data.rows.filter((row) => row.method === one.method && passes(row));
    const box = make("details", { id: "method-" + one.method.replace(/[^a-zA-Z0-9_-]/g, "-") }, make("summary", {},
      make("span", { class: "swatch", style: { background: one.colour } }), make("b", {}, one.label), ` · ${rows.length} rows`));
    box.addEventListener("toggle", () => {
      if (!box.open || box.dataset.filled) return;
      box.dataset.filled = "true";
      const only = make("button", { type: "button" }, "Show this method only");
      only.addEventListener("click", () => { chosen.method = one.method; refilter(); $("#board").scrollIntoView(); });
      box.append(make("p", {}, one.about || "A method from elsewhere."), make("p", {}, only), dataTable(`Method ${one.label}`, [
        { key: "ground", title: "Experiment" }, { key: "alpha_attribution", title: "α attribution", kind: "number", digits: 2 },
        { key: "alpha", title: "α retrain", kind: "number", digits: 2 }, { key: "series", title: "Series", shown: methodCell }, { key: "scores", title: "Scores" },
        { key: "lds", title: "LDS", kind: "number", shown: ldsCell }, { key: "interval", title: "Interval", kind: "number", shown: intervalCell, csv: false },
        { key: "ratio", title: "LDS / ceiling", kind: "number", digits: 2 }, { key: "seconds", title: "Seconds", kind: "number", digits: 1 },
        { key: "machine", title: "Machine" }, { key: "settings", title: "Settings", hide: true },
      ], rows));
    });
    return box;
  }));
  if (!here.length) $("#method-list").append(make("p", { class: "empty" }, "No methods yet."));
};

// ---- runs ----
const settingsTable = (run) => {
  const options = unique(run.settings.flatMap((method) => Object.keys(method))).filter((name) => name !== "name" && name !== "label").sort();
  const rows = options.map((option) => ({ option, ...Object.fromEntries(run.settings.map((method, k) => [`m${k}`, method[option]])) }));
  const said = (value) => (value === undefined ? "–" : value === "" ? "all" : typeof value === "object" ? JSON.stringify(value) : String(value));
  return dataTable(`Settings of run ${run.run_id}`, [{ key: "option", title: "Option" },
    ...run.settings.map((method, k) => ({ key: `m${k}`, title: method.label ?? method.name, shown: (row) => [said(row[`m${k}`])], value: (row) => said(row[`m${k}`]) }))], rows);
};
const fillRuns = () => {
  const here = data.runs.filter((run) => passes({ task: run.tasks, protocol: run.protocols, method: run.methods }));
  $("#run-list").replaceChildren(...here.map((run) => {
    const box = make("details", { id: "run-" + run.run_id }, make("summary", {}, make("b", {}, run.run_id), ` · ${run.task}, ${run.protocols.join(", ")}, ${run.device} · ${run.finished}`));
    box.addEventListener("toggle", () => {
      if (!box.open || box.dataset.filled) return;
      box.dataset.filled = "true";
      const left = run.shown < run.rows ? ` (${run.shown} of its ${run.rows} rows are shown; a later run measured the others again)` : "";
      box.append(make("p", {}, make("code", {}, run.command)), make("p", {}, make("a", { href: run.href }, run.path), left),
        make("h4", {}, "Settings of the methods"), settingsTable(run), make("h4", {}, "Record"), make("pre", { tabindex: "0" }, JSON.stringify(run.record, null, 1)));
    });
    return box;
  }));
  if (!here.length) $("#run-list").append(make("p", { class: "empty" }, data.runs.length ? "No run passes these filters." : "No runs yet."));
};
const openTarget = () => {
  const target = /^#(run|method|paper|figure)-/.test(location.hash) && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let one = target; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
  target.scrollIntoView();
};
addEventListener("hashchange", openTarget);
document.addEventListener("click", (event) => {
  const link = event.target.closest?.('a[href^="#run-"], a[href^="#method-"], a[href^="#paper-"], a[href^="#figure-"]');
  if (!link) return;
  const target = document.getElementById(link.hash.slice(1));
  if (!target || target.closest("[hidden]")) { for (const key in chosen) chosen[key] = ""; refilter(); }
  if (link.hash === location.hash) openTarget();
});
