// ---- the leaderboard of every task: a line a method, a column a question about one ground truth, ranks in brackets ----
const rankCell = (line, column) => {
  const cell = line.cells[column.column];
  if (!cell || cell.value === null) return ["–"];
  const link = make("a", { href: "#run-" + cell.runs[0], class: cell.best === 1 ? "best" : null }, number(cell.value));
  const said = [`${column.title}: ${number(cell.value)} [${number(cell.low)}, ${number(cell.high)}], ${column.interval}`,
    `rank ${cell.rank} of ${column.ranked}, ${column.better}`, column.ceiling === null ? "" : `ceiling ${number(column.ceiling, 2)}`,
    column.truth, `run ${cell.runs.join(", ")}`, cell.note].filter(Boolean).join("\n");
  return [hint(link, said), ` (${cell.rank})`];
};
const fillBoards = () => {
  const shown = data.boards.filter((board) => passes({ task: board.task, protocol: board.protocol }));
  $("#boards").replaceChildren(...shown.flatMap((board) => {
    const lines = board.lines.filter((line) => passes({ method: line.method }));
    const columns = board.columns.filter((column) => passes({ scores: column.scores }) && lines.some((line) => line.cells[column.column]));
    if (!columns.length) return [];
    const of = (column, name) => (line) => line.cells[column.column]?.[name] ?? null;
    const table = dataTable(`Leaderboard ${board.title}`, [
      { key: "series", title: "Method", shown: methodCell },
      ...columns.flatMap((column) => [
        { key: column.column, title: column.title, kind: "number", shown: (line) => rankCell(line, column), value: of(column, "value") },
        ...[["low", "from"], ["high", "to"], ["rank", "rank"], ["runs", "runs"]].map(([key, name]) => (
          { key: `${column.column} ${key}`, title: `${column.title}, ${name}`, hide: true, value: of(column, key) })),
      ]),
      { key: "seconds", title: "Seconds", kind: "number", digits: 1 }, { key: "memory", title: "Memory, MiB", kind: "number", digits: 0 },
      { key: "machine", title: "Machine", hide: true }, { key: "settings", title: "Settings", hide: true },
    ], lines);
    return [make("h4", {}, board.title), table, make("p", { class: "quiet" }, board.caption)];
  }));
};
