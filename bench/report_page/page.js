"use strict";
(() => {
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

  // ---- light and dark ----
  const dark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const label = () => { $("#theme").textContent = dark() ? "Light" : "Dark"; };
  $("#theme").addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; label(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
  label();

  // ---- hints ----
  const tip = $("#tip");
  const hint = (element, text) => {
    const show = () => {
      const box = element.getBoundingClientRect();
      tip.textContent = text;
      tip.hidden = false;
      tip.style.left = Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 4)) + "px";
      tip.style.top = (box.bottom + tip.offsetHeight + 10 > innerHeight ? box.top - tip.offsetHeight - 6 : box.bottom + 6) + "px";
    };
    element.addEventListener("mouseenter", show);
    element.addEventListener("focus", show);
    element.addEventListener("mouseleave", () => { tip.hidden = true; });
    element.addEventListener("blur", () => { tip.hidden = true; });
  };

  // ---- the leaderboard ----
  const columns = [
    ["method", "Method", "text"], ["scores", "Scores", "text"], ["lds", "LDS", "number"], ["interval", "Interval", "number"],
    ["meter", "", "text"], ["ratio", "LDS / ceiling", "number"], ["ceiling", "Ceiling", "number"], ["alpha", "α retrain", "number"],
    ["alpha_attribution", "α attribution", "number"], ["seeds", "Seeds", "number"], ["undefined", "Undefined", "number"],
    ["seconds", "Seconds", "number"], ["memory", "Memory, MiB", "number"], ["machine", "Machine", "text"],
  ];
  const filters = [["task", "Task"], ["protocol", "Protocol"], ["alpha", "α retrain"], ["alpha_attribution", "α attribution"], ["scores", "Scores"]];
  const chosen = {};
  let sorted = { key: "lds", down: true };
  const values = (key) => [...new Set(data.rows.filter((row) => key === "task" || !chosen.task || row.task === chosen.task).map((row) => row[key]))]
    .sort((a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b))));
  const build = () => {
    const form = $("#filters");
    form.replaceChildren();
    for (const [key, title] of filters) {
      const options = values(key);
      if (chosen[key] !== "" && !options.map(String).includes(String(chosen[key]))) chosen[key] = key === "scores" ? "" : String(options[0] ?? "");
      const select = make("select", { name: key });
      select.append(make("option", { value: "" }, "all"));
      for (const option of options) select.append(make("option", { value: option }, String(option)));
      select.value = chosen[key];
      select.addEventListener("change", () => { chosen[key] = select.value; if (key === "task") build(); fill(); });
      form.append(make("label", {}, title, select));
    }
  };
  const meter = (row) => {
    const low = -0.1, at = (x) => (100 * (Math.min(1, Math.max(low, x)) - low)) / (1 - low);
    const box = make("span", { class: "meter", role: "img", "aria-label": `LDS ${number(row.lds)}, ceiling ${number(row.ceiling)}` });
    if (row.lds === null) return box;
    box.append(make("em", { style: { left: at(0) + "%" } }));
    const [from, to] = [Math.min(0, row.lds), Math.max(0, row.lds)];
    box.append(make("i", { style: { left: at(from) + "%", width: at(to) - at(from) + "%", background: row.colour } }));
    if (row.low !== null) box.append(make("u", { style: { left: at(row.low) + "%", width: Math.max(0.5, at(row.high) - at(row.low)) + "%" } }));
    if (row.ceiling !== null) box.append(make("s", { style: { left: at(row.ceiling) + "%" } }));
    return box;
  };
  const cell = (row, key) => {
    if (key === "method") return [make("span", { class: "swatch", style: { background: row.colour } }), row.label];
    if (key === "lds") {
      const link = make("a", { href: "#run-" + row.runs[0] }, number(row.lds));
      hint(link, `${row.subsets} subsets, ${row.queries} queries, ${row.replicates} replicate(s); run ${row.runs.join(", ")}`);
      return [link];
    }
    if (key === "interval") {
      if (row.low === null) return ["–"];
      const [text, kind] = row.error !== null ? [`± ${number(row.error)}`, "standard error"]
        : [`[${number(row.low)}, ${number(row.high)}]`, row.seeds > 1 ? `95 %, span of ${row.seeds} seeds` : "95 % interval"];
      const box = make("span", { tabindex: "0" }, text, make("small", {}, kind));
      hint(box, row.bar);
      return [box];
    }
    if (key === "meter") return [meter(row)];
    if (key === "ratio") return [number(row.ratio, 2)];
    if (key === "ceiling" && row.ceiling_runs.length) {
      const link = make("a", { href: "#run-" + row.ceiling_runs[0] }, number(row.ceiling, 2));
      hint(link, `from the replicates of run ${row.ceiling_runs.join(", ")}`);
      return [link];
    }
    if (key === "ceiling") return [number(row.ceiling, 2)];
    if (key === "seconds") return [number(row.seconds, row.seconds < 10 ? 2 : 1)];
    if (key === "memory") return [number(row.memory, 0)];
    return [String(row[key])];
  };
  const fill = () => {
    const rows = data.rows.filter((row) => filters.every(([key]) => chosen[key] === "" || String(row[key]) === chosen[key]));
    const key = sorted.key === "interval" || sorted.key === "meter" ? "lds" : sorted.key;
    rows.sort((a, b) => {
      const [x, y] = [a[key], b[key]];
      if (x === null || y === null) return (x === null) - (y === null);
      const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
      return (sorted.down ? -order : order) || a.label.localeCompare(b.label);
    });
    // A column that a filter has made the same everywhere says nothing.
    const shown = columns.filter(([name]) => !(name in chosen) || chosen[name] === "");
    const head = make("tr");
    for (const [name, title, kind] of shown) {
      const th = make("th", { scope: "col", class: kind === "text" ? "text" : null });
      if (title) {
        const button = make("button", { type: "button" }, title);
        button.addEventListener("click", () => { sorted = { key: name, down: sorted.key === name ? !sorted.down : kind === "number" }; fill(); });
        th.append(button);
        if (sorted.key === name) th.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
      }
      head.append(th);
    }
    $("#table thead").replaceChildren(head);
    $("#table tbody").replaceChildren(...rows.map((row) => make("tr", { "data-method": row.method },
      ...shown.map(([name, , kind]) => make("td", { class: kind === "text" ? "text" : null }, ...cell(row, name))))));
    $("#count").textContent = `${rows.length} of ${data.rows.length} rows`;
  };
  if (data.rows.length) {
    for (const [key] of filters) chosen[key] = key === "scores" ? "" : String(data.first[key]);
    build();
    fill();
  } else {
    $("#board").replaceChildren($("#board-title"), make("p", { class: "empty" }, "No results yet. Make some with ", make("code", {}, data.command)));
  }

  // ---- what the scores look like ----
  const explorer = $("#explorer");
  const tile = (set, image, size, attributes = {}) => {
    const [height, width] = set.tile, across = set.across;
    const scale = size / width;
    return make(attributes.type ? "button" : "span", { class: "tile", ...attributes, style: {
      width: size + 4 + "px", height: height * scale + 4 + "px", backgroundImage: `url(${set.sprite})`,
      backgroundSize: `${across * size}px auto`, backgroundPosition: `-${(image % across) * size}px -${Math.floor(image / across) * height * scale}px` } });
  };
  for (const set of data.images) {
    explorer.append(make("h3", {}, `${set.description}, seed ${set.seed}: ${set.scores} scores`));
    explorer.append(make("p", { class: "quiet" }, "Point at a query, or tap it, to see the training images that lower or raise its loss most. Blue frame: the query's own class; orange: another."));
    const strip = make("div", { class: "strip" }), panel = make("div", { class: "pair", "aria-live": "polite" });
    const show = (query, button) => {
      strip.querySelectorAll("button").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      panel.replaceChildren(...Object.entries(query.methods).map(([method, sides]) => make("div", { class: "card" },
        make("h4", {}, `${data.labels[method] ?? method}: query ${query.query}, class ${query.label}`),
        ...["helpful", "harmful"].flatMap((side) => [make("h5", {}, side === "helpful" ? "lower its loss most" : "raise its loss most"),
          make("div", { class: "strip" }, ...sides[side].map((example) => {
            const picture = tile(set, example.image, 52, { class: "tile " + (example.label === query.label ? "same" : "other"), tabindex: "0", role: "img",
              "aria-label": `training image ${example.train}, class ${example.label}, score ${example.score}` });
            hint(picture, `training image ${example.train}, class ${example.label}, score ${example.score}`);
            return picture;
          }))]))));
    };
    for (const query of set.queries) {
      const button = tile(set, query.image, 52, { type: "button", "aria-pressed": "false", "aria-label": `query ${query.query}, class ${query.label}` });
      for (const event of ["mouseenter", "focus", "click"]) button.addEventListener(event, () => show(query, button));
      strip.append(button);
    }
    explorer.append(strip, panel);
    show(set.queries[0], strip.firstChild);
  }
  const colour = (value, limit) => `rgba(${value < 0 ? "0,114,178" : "213,94,0"},${Math.min(1, Math.abs(value) / limit).toFixed(3)})`;
  for (const set of data.tokens) {
    explorer.append(make("h3", {}, `${set.description}, seed ${set.seed}: ${set.scores}, token by token`));
    explorer.append(make("p", { class: "quiet" }, "Point at a token of the query: the training tokens are coloured by its influence with each. Blue: seeing the training token lowers the query token's loss; orange: raises it."));
    for (const pair of set.pairs) {
      const limit = Math.max(...pair.bif.flat().map(Math.abs)) || 1;
      const right = make("div", { class: "tokens" }, ...pair.train_tokens.map((token) => make("span", {}, token)));
      const left = make("div", { class: "tokens" });
      const show = (row, span) => {
        left.querySelectorAll("span").forEach((other) => other.classList.toggle("on", other === span));
        pair.bif[row].forEach((value, k) => { right.children[k].style.background = colour(value, limit); });
      };
      pair.query_tokens.forEach((token, row) => {
        const span = make("span", { tabindex: "0" }, token);
        for (const event of ["mouseenter", "focus", "click"]) span.addEventListener(event, () => show(row, span));
        left.append(span);
      });
      const card = make("div", { class: "card" }, make("h4", {}, `training sequence ${pair.train}`), make("h5", {}, `BIF with the chosen token; full colour: ±${Number(limit.toPrecision(2))}`), right);
      if (pair.ekfac) {
        const most = Math.max(...pair.ekfac.map(Math.abs)) || 1;
        card.append(make("h5", {}, `EK-FAC with the whole query; full colour: ±${Number(most.toPrecision(2))}`), make("div", { class: "tokens" },
          ...pair.train_tokens.map((token, k) => make("span", { style: { background: colour(pair.ekfac[k], most) } }, token))));
      }
      explorer.append(make("div", { class: "pair" }, make("div", { class: "card" }, make("h4", {}, `query ${pair.query}`), left), card));
      show(pair.strongest, left.children[pair.strongest]);
    }
  }
  if (!data.images.length && !data.tokens.length) explorer.append(make("p", { class: "empty" }, "No examples yet. Make some with ", make("code", {}, "python -m bench.examples --task digits --out results/examples")));

  // ---- run records ----
  for (const run of data.runs) {
    const summary = make("summary", {}, make("b", {}, run.run_id), ` · ${run.task}, ${run.device} · ${run.finished}`);
    const file = run.href ? make("p", {}, make("a", { href: run.href }, run.path)) : make("p", { class: "quiet" }, run.path);
    $("#run-list").append(make("details", { id: "run-" + run.run_id }, summary, make("p", {}, make("code", {}, run.command)), file,
      make("pre", {}, JSON.stringify(run.record, null, 1))));
  }
  if (!data.runs.length) $("#run-list").append(make("p", { class: "empty" }, "No runs yet."));
  const open = () => {
    const target = location.hash.startsWith("#run-") && document.getElementById(location.hash.slice(1));
    if (target) { target.open = true; target.scrollIntoView(); }
  };
  addEventListener("hashchange", open);
  document.addEventListener("click", (event) => { const link = event.target.closest?.('a[href^="#run-"]'); if (link && link.hash === location.hash) open(); });
  open();
  document.documentElement.dataset.ready = "true";
})();
