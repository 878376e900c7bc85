// ---- what the scores look like: images and tokens, in their task's part ----
const tile = (set, image, size, attributes = {}) => {
  const [height, width] = set.tile, across = set.across, scale = size / width;
  return make(attributes.type ? "button" : "span", { class: "tile", ...attributes, style: {
    width: size + 4 + "px", height: height * scale + 4 + "px", backgroundImage: `url(${set.sprite})`, backgroundSize: `${across * size}px auto`,
    backgroundPosition: `-${(image % across) * size}px -${Math.floor(image / across) * height * scale}px` } });
};
const imageExplorer = (set) => {
  const box = make("div", { class: "explorer" }, make("h4", {}, `${set.description}, seed ${set.seed}: ${set.scores} scores, query by query`),
    make("p", { class: "quiet" }, "Point at a query, or tap it, to see the training images that lower or raise its loss most. Blue frame: the query's own class; orange: another. " + (set.rule ?? "")));
  const strip = make("div", { class: "strip" }), panel = make("div", { class: "pair", "aria-live": "polite" });
  const show = (query, button) => {
    strip.querySelectorAll("button").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    panel.replaceChildren(...Object.entries(query.methods).map(([method, sides]) => make("div", { class: "card" },
      make("h4", {}, `${labelOf(method)}: query ${query.query}, class ${query.label}${query.chosen === "least sure" ? " (least sure)" : ""}`),
      ...["helpful", "harmful"].flatMap((side) => [make("h5", {}, side === "helpful" ? "lower its loss most" : "raise its loss most"),
        make("div", { class: "strip" }, ...sides[side].map((example) => {
          const said = `training image ${example.train}, class ${example.label}, score ${example.score}`;
          return hint(tile(set, example.image, 52, { class: "tile " + (example.label === query.label ? "same" : "other"), tabindex: "0", role: "img", "aria-label": said }), said);
        }))]))));
  };
  for (const query of set.queries) {
    const button = tile(set, query.image, 52, { type: "button", "aria-pressed": "false", "aria-label": `query ${query.query}, class ${query.label}` });
    for (const event of ["mouseenter", "focus", "click"]) button.addEventListener(event, () => show(query, button));
    strip.append(button);
  }
  box.append(strip, panel);
  show(set.queries[0], strip.firstChild);
  return box;
};
const tokenColour = (value, limit) => `rgb(var(--${value < 0 ? "above" : "below"}) / ${(0.85 * Math.min(1, Math.abs(value ?? 0) / limit)).toFixed(3)})`;
const largestOf = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0) || 1;
const tokenExplorer = (set) => {
  const box = make("div", { class: "explorer" }, make("h4", {}, `${set.description}, seed ${set.seed}: ${set.scores}, token by token`),
    make("p", { class: "quiet" }, "Point at a token of the query: the training tokens are coloured by its influence with each. Blue: seeing the training token lowers the query token's loss; orange: raises it. " + (set.rule ?? "")));
  for (const pair of set.pairs) {
    const limit = largestOf(pair.bif.flat());
    const right = make("div", { class: "tokens" }, ...pair.train_tokens.map((token) => make("span", {}, token)));
    const left = make("div", { class: "tokens" });
    const show = (row, span) => {
      left.querySelectorAll("span").forEach((other) => other.classList.toggle("on", other === span));
      pair.bif[row].forEach((value, k) => { right.children[k].style.background = tokenColour(value, limit); });
    };
    pair.query_tokens.forEach((token, row) => {
      const span = make("span", { tabindex: "0" }, token);
      for (const event of ["mouseenter", "focus", "click"]) span.addEventListener(event, () => show(row, span));
      left.append(span);
    });
    const card = make("div", { class: "card" }, make("h4", {}, `training sequence ${pair.train}`), make("h5", {}, `BIF with the chosen token; full colour: ±${Number(limit.toPrecision(2))}`), right);
    if (pair.ekfac) {
      const most = largestOf(pair.ekfac);
      card.append(make("h5", {}, `EK-FAC with the whole query; full colour: ±${Number(most.toPrecision(2))}`), make("div", { class: "tokens" },
        ...pair.train_tokens.map((token, k) => make("span", { style: { background: tokenColour(pair.ekfac[k], most) } }, token))));
    }
    box.append(make("div", { class: "pair" }, make("div", { class: "card" }, make("h4", {}, `query ${pair.query}`), left), card));
    show(pair.strongest, left.children[pair.strongest]);
  }
  return box;
};
for (const [sets, explore] of [[data.images, imageExplorer], [data.tokens, tokenExplorer]]) {
  for (const set of sets) {
    const explorer = explore(set);
    explorer.dataset.task = set.task;
    document.getElementById("explore-" + set.place)?.append(explorer);
  }
}
