// ---- plots: Vega-Lite draws them, without eval; made when they come into view ----
const plots = {};
const theme = () => {
  const [ink, quiet, grid] = [colour("--ink"), colour("--quiet"), colour("--grid")];
  const words = { labelColor: quiet, titleColor: ink, labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500 };
  return { background: null, font: "system-ui, sans-serif", view: { stroke: null },
    axis: { ...words, domainColor: quiet, tickColor: quiet, gridColor: grid, gridOpacity: 0.7 },
    legend: { ...words, symbolSize: 70, labelLimit: 320, orient: innerWidth < 900 ? "bottom" : "right", columns: innerWidth < 900 ? 1 : undefined },
    point: { strokeWidth: 1.5 } };
};
const tooltip = (handler, event, item, value) => {
  if (!value) return hideTip();
  const lines = Object.entries(value).filter(([, text]) => text !== "" && text !== "null" && text !== null).map(([name, text]) => `${name}: ${text}`);
  showTip(lines.join("\n"), event.clientX + 12, event.clientY - 12, event.clientY + 6);
};
// The library is text until the first plot is drawn; the page's policy knows it by its digest and lets nothing else run.
const loadCharts = () => {
  const waiting = $("#charts");
  if (waiting) waiting.replaceWith(make("script", {}, waiting.textContent));
};
const draw = (name) => {
  const { box, rows, legend } = plots[name];
  if (!rows.length) { box.replaceChildren(make("p", { class: "quiet" }, "Nothing to plot.")); return; }
  loadCharts();
  const spec = JSON.parse(JSON.stringify(data.plots[name]));
  const series = unique(rows.map((row) => row.series));
  const colours = series.map((one) => rows.find((row) => row.series === one).colour);
  const extra = legend ? [legend] : [];
  spec.encoding.color.scale = { domain: [...series, ...extra], range: [...colours, ...extra.map(() => colour("--ink"))] };
  if (name === "lds") {
    spec.encoding.x.axis = { values: unique(rows.map((row) => row.alpha)).sort(ascending) };
    if (!legend) spec.layer.pop();                                            // no ceiling, no line for it
  }
  if (name === "dots" && !legend) spec.layer.shift();
  Object.assign(spec, { data: { values: rows.map((row) => ({ ...row })) }, width: Math.max(240, box.clientWidth - 24), autosize: { type: "fit-x", contains: "padding" } });
  const compiled = charts.compile(spec, { config: theme(), logger: quietly }).spec;
  const runtime = charts.parse(compiled, null, { ast: true });
  plots[name].view?.finalize();
  box.replaceChildren();
  const view = new charts.View(runtime, { renderer: "svg", container: box, hover: true, expr: charts.expressionInterpreter, loader: nothing, logLevel: 0 });
  plots[name].view = view.tooltip(tooltip);
  view.runAsync().then(() => { box.dataset.drawn = "true"; });
};
const quietly = { level: () => quietly, error: () => quietly, warn: () => quietly, info: () => quietly, debug: () => quietly };
const refuse = () => Promise.reject(new Error("nothing is loaded from anywhere"));
const nothing = { load: refuse, sanitize: refuse, http: refuse, file: refuse };
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const name = entry.target.dataset.plot;
    plots[name].visible = entry.isIntersecting;
    if (entry.isIntersecting && plots[name].stale) { plots[name].stale = false; draw(name); }
  }
}, { rootMargin: "300px" });
const showPlot = (name, rows) => {
  const box = $(`#${name}-plot`);
  if (!plots[name]) {
    plots[name] = { box, visible: false };
    box.dataset.plot = name;
    seen.observe(box);
  }
  delete box.dataset.drawn;
  Object.assign(plots[name], { rows, stale: true, legend: ["lds", "dots"].includes(name) && rows.some((row) => row.ceiling !== null) ? "noise ceiling" : null });
  if (plots[name].visible) { plots[name].stale = false; draw(name); }
};
const redraw = () => { for (const name in plots) showPlot(name, plots[name].rows); };
repaint.push(redraw);
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
