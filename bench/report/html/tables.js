// The tables of the page. Tabulator draws them; cells are elements made by `make`, never HTML text.
const MAX_MACHINES = 8;  // columns of a matrix
const LETTER_COLOURS = ["#a6cee3", "#fdbf6f", "#b2df8a", "#fb9a99", "#cab2d6", "#ffff99", "#80cdc1", "#f4a582"];
const text = (value) => make("span", {}, String(value ?? ""));
const plain = (cell) => text(cell.getValue());
const title = (name) => ({ titleFormatter: () => text(name), title: "" });

function opener(content, row, bad, open) {
  if (row < 0) return make("span", { className: "off" }, content);
  const button = make("button", { type: "button", className: `cell ${bad ? "bad" : "good"}` }, content);
  button.addEventListener("click", (event) => { event.stopPropagation(); open(row); });
  return button;
}

function answersTable(data, open) {
  if (innerWidth < 700) return answersByMachine(data, open);
  const columns = [{ ...title("machine"), field: "machine", formatter: plain, frozen: innerWidth > 700, minWidth: 170, widthGrow: 1 },
    ...data.answers.questions.map((q, i) => ({ ...title(q), field: `c${i}`, minWidth: 150, widthGrow: i === 3 ? 2 : 1, headerSort: false,
      formatter: (cell) => { const c = cell.getValue(); return opener(c.text, c.row, c.bad, open); } }))];
  const rows = data.answers.rows.map((r) => ({ machine: r.machine, ...Object.fromEntries(r.cells.map((c, i) => [`c${i}`, c])) }));
  return new Tabulator("#answers", { data: rows, columns, layout: "fitColumns", placeholder: "no answers yet",
    ...(rows.length > 25 ? { pagination: true, paginationSize: 25, maxHeight: "40rem" } : {}) });
}

// The same for a narrow screen: a question a line, grouped by machine.
function answersByMachine(data, open) {
  const rows = data.answers.rows.flatMap((r) => r.cells.map((c, i) => ({ machine: r.machine, question: data.answers.questions[i], answer: c })));
  return new Tabulator("#answers", { data: rows, layout: "fitColumns", groupBy: "machine", groupHeader: (machine) => text(machine), headerVisible: false,
    pagination: rows.length > 100, paginationSize: 50, columns: [{ ...title("question"), field: "question", formatter: plain, width: 120 },
      { ...title("answer"), field: "answer", formatter: (cell) => { const c = cell.getValue(); return opener(c.text, c.row, c.bad, open); } }] });
}

// Machines of the rows, those with the newest files first.
function machinesOf(rows, numbers) {
  const newest = new Map();
  for (const n of numbers) {
    const file = rows.file(n);
    if (!(newest.get(file.machine) > file.written)) newest.set(file.machine, file.written);
  }
  return [...newest.keys()].sort((a, b) => (newest.get(a) < newest.get(b) ? 1 : -1));
}

function matrixData(rows, numbers, machines) {
  const lines = new Map();
  for (const n of numbers) {
    if (!rows.current(n)) continue;
    const at = machines.indexOf(rows.file(n).machine);
    if (at < 0) continue;
    const u = rows.unit(n), key = `${u.case} · ${u.kernel} @${u.backend}`;
    if (!lines.has(key)) lines.set(key, { case: u.case, kernel: `${u.kernel} @${u.backend}` });
    const line = lines.get(key), cell = (line[`m${at}`] ??= { count: {}, total: 0, worst: n });
    const name = rows.ok(n) ? word(rows.code("verdict", n)) : rows.code("status", n);
    cell.count[name] = (cell.count[name] || 0) + 1;
    cell.total += 1;
    if (badness(rows, n) > badness(rows, cell.worst)) cell.worst = n;
  }
  return [...lines.values()];
}

// A failing verdict first, then the size of its value; a crash is worse the sooner it comes.
function badness(rows, n) {
  const verdict = rows.code("verdict", n), low = verdict.startsWith("exploded") || rows.unit(n).worst === "low";
  const step = Number(verdict.split("@")[1]), size = Number.isFinite(step) ? step : Math.abs(rows.columns.value[n]) || 0;
  return (isFine(verdict) ? 0 : 1e9) + (low ? -Math.min(size, 1e8) : Math.min(size, 1e8));
}

function matrixCell(rows, open) {
  return (cell) => {
    const c = cell.getValue();
    if (!c) return text("");
    const words = Object.entries(c.count).map(([name, k]) => (c.total === 1 ? name : `${name} ${k}/${c.total}`)).join(", ");
    const bad = rows.ok(c.worst) && !isFine(rows.code("verdict", c.worst));
    const worst = rows.code("verdict", c.worst).includes("@") ? rows.code("verdict", c.worst) : measured(rows, c.worst);
    return opener(bad && worst ? `${words}: ${worst}` : words, c.worst, bad, open);
  };
}

function fillMatrix(table, rows, numbers, open) {
  const all = machinesOf(rows, numbers), machines = all.slice(0, MAX_MACHINES);
  table.setColumns([{ ...title("case"), field: "case", formatter: plain, width: narrow() ? 110 : 170 }, { ...title("kernel"), field: "kernel", formatter: plain, width: narrow() ? 150 : 270 },
    ...machines.map((m, i) => ({ ...title(m), field: `m${i}`, formatter: matrixCell(rows, open), minWidth: 220, headerSort: false }))]);
  table.setData(matrixData(rows, numbers, machines));
  return all.length > machines.length ? ` The ${machines.length} newest of ${all.length} machines are shown here and in the charts: choose one in the filter.` : "";
}

// Letters for equal digests of all outputs, line by line; rows on other inputs are never compared.
function sameBits(rows, numbers, machines) {
  const lines = new Map();
  for (const n of numbers) {
    const u = rows.unit(n), at = machines.indexOf(rows.file(n).machine);
    if (at < 0 || !rows.current(n) || rows.columns.bits[n] < 0 || !rows.case(n).compares_bits) continue;
    const point = rows.points[rows.columns.unit[n]];
    if (!lines.has(point)) lines.set(point, { case: u.case, kernel: u.kernel, point: `${label(u)} ${u.dtype}`, letters: new Map(), inputs: rows.columns.inputs[n] });
    const line = lines.get(point), known = line.letters, bits = rows.columns.bits[n];
    if (!known.has(bits)) known.set(bits, known.size);
    (line[`m${at}`] ??= []).push({ row: n, letter: rows.columns.inputs[n] === line.inputs ? known.get(bits) : -1 });
  }
  return [...lines.values()];
}

function fillSame(table, rows, numbers, open) {
  const machines = machinesOf(rows, numbers).slice(0, MAX_MACHINES), lines = sameBits(rows, numbers, machines);
  const letters = (cell) => make("span", {}, ...(cell.getValue() || []).map((c) => {
    const letter = c.letter < 0 ? "other inputs" : String.fromCharCode(65 + (c.letter % 26)) + (c.letter > 25 ? Math.floor(c.letter / 26) : "");
    const n = c.row, runs = rows.columns.runs[n], where = cell.getValue().length > 1 ? `${rows.unit(n).backend} ` : "";
    const button = make("button", { type: "button", className: "cell letter" }, where + letter + (runs > 1 ? ` ${rows.columns.agree[n]}/${runs} runs` : ""));
    if (c.letter >= 0) button.style.background = LETTER_COLOURS[c.letter % LETTER_COLOURS.length];
    button.addEventListener("click", () => open(n));
    return button;
  }));
  table.setColumns([{ ...title("case"), field: "case", formatter: plain, width: narrow() ? 110 : 200 }, { ...title("kernel"), field: "kernel", formatter: plain, width: narrow() ? 150 : 270 },
    ...machines.map((m, i) => ({ ...title(m), field: `m${i}`, formatter: letters, headerSort: false, minWidth: 130 })),
    { ...title("parameters"), field: "point", formatter: plain, minWidth: 320, cssClass: "long" }]);
  table.setData(lines);
  const note = machines.length > 1 ? "" : " Only one machine measured this: nothing to compare with yet, so every line is an A.";
  return "Rows of determinism cases. In a line, equal letters (and colours) are equal digests of all outputs, bit for bit; “2/3 runs” "
    + "counts how many submissions of that machine gave the bits shown." + note;
}

function rowsTable(rows, state, open) {
  const line = (n) => {
    const u = rows.unit(n), runs = rows.columns.runs[n];
    return { n, machine: rows.file(n).machine, case: u.case, kernel: u.kernel, backend: u.backend, dtype: u.dtype, point: label(u),
      value: shown(rows, n), verdict: rows.code("verdict", n), state: rows.code("state", n) + (rows.columns.predicted[n] ? ", predicted" : ""),
      runs: runs > 1 ? `${rows.columns.agree[n]} of ${runs} agree` : "1" };
  };
  const page = (params) => {
    let numbers = state.numbers;
    const sort = params.sort?.[0];
    if (sort) {
      const key = rows.order(sort.field), sign = sort.dir === "asc" ? 1 : -1;
      numbers = numbers.slice().sort((a, b) => {
        const x = key(a), y = key(b);
        return Number.isNaN(x) ? (Number.isNaN(y) ? a - b : 1) : Number.isNaN(y) ? -1 : sign * (x - y) || a - b;
      });
    }
    const first = (params.page - 1) * params.size;
    return { last_page: Math.max(1, Math.ceil(numbers.length / params.size)), last_row: numbers.length,
      data: [...numbers.slice(first, first + params.size)].map(line) };
  };
  const opening = (cell) => {
    const { n } = cell.getData();
    return opener(cell.getValue(), n, rows.ok(n) && !isFine(rows.code("verdict", n)), open);
  };
  const column = (name, field, width, formatter = plain) => ({ ...title(name), field, minWidth: width, formatter });
  const table = new Tabulator("#rows", {
    ajaxURL: "rows", ajaxRequestFunc: async (url, config, params) => page(params), pagination: true, paginationMode: "remote",
    sortMode: "remote", paginationSize: 25, paginationSizeSelector: [25, 100, 500], paginationCounter: "rows", layout: "fitDataStretch",
    placeholder: "no rows pass the filters",
    columns: [column("value; verdict", "value", 200, opening), column("case", "case", 150), column("kernel", "kernel", 250),
      column("machine", "machine", 200), column("dtype", "dtype", 90), column("backend", "backend", 80), column("state", "state", 90),
      column("runs", "runs", 80), { ...column("parameters", "point", 320), cssClass: "long" }],
  });
  table.on("rowClick", (event, row) => open(row.getData().n));
  return table;
}

function filesTable(data) {
  const link = (cell) => make("a", { href: cell.getData().url, rel: "noreferrer" }, cell.getValue());
  const column = (name, field, width, formatter = plain) => ({ ...title(name), field, minWidth: width, formatter });
  return new Tabulator("#files", { data: data.files, layout: "fitDataStretch", pagination: data.files.length > 25, paginationSize: 25,
    columns: [column("machine", "machine", 200), column("file", "path", 260, link), column("rows", "rows", 70), column("written", "written", 190),
      column("accelerator", "accelerator", 200), column("versions", "versions", 240), column("system", "system", 220),
      column("suite commit", "commit", 100), column("stale", "stale", 150)] });
}
