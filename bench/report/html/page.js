// Ties filters, tables and charts together. The filters live in the address, so a view can be sent.
const FILTERS = [["machine", "machine"], ["case", "case"], ["implementation", "kernel"], ["fix", "fix"], ["dtype", "dtype"],
  ["backend", "backend"], ["verdict", "verdict"], ["provenance", "provenance"], ["state", "state"]];

function choices(rows) {
  const { units, codes } = rows.data, of = (f) => [...new Set(units.map(f))].sort();
  return { machine: [...codes.machine].sort(), case: of((u) => u.case), implementation: of((u) => u.implementation), fix: of((u) => u.fix),
    dtype: of((u) => u.dtype), backend: of((u) => u.backend), verdict: [...new Set(codes.verdict.map(word))].filter(Boolean).sort(),
    provenance: ["measured", "predicted"], state: codes.state };
}

function buildFilters(rows, filters, changed) {
  const form = document.getElementById("filters"), all = choices(rows);
  for (const [name, shownAs] of FILTERS) {
    const select = make("select", { name, id: `f-${name}` }, make("option", { value: "" }, "all"), ...all[name].map((v) => make("option", { value: v }, v)));
    select.value = all[name].includes(filters[name]) ? filters[name] : "";
    filters[name] = select.value;
    select.addEventListener("change", () => { filters[name] = select.value; changed(); });
    form.append(make("label", {}, shownAs, select));
  }
  const search = make("input", { type: "search", name: "text", id: "f-text", value: filters.text || "", placeholder: "words, e.g. repeats=2" });
  let timer = 0;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => { filters.text = search.value; changed(); }, 200); });
  const reset = make("button", { type: "button", id: "reset" }, "Reset");
  reset.addEventListener("click", () => {
    for (const [name] of FILTERS) { filters[name] = name === "state" ? "current" : ""; form.elements[name].value = filters[name]; }
    filters.text = search.value = "";
    changed();
  });
  form.append(make("label", {}, "contains", search), reset);
  form.addEventListener("submit", (event) => event.preventDefault());
}

function readAddress() {
  const filters = { state: "current" };
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) filters[name] = value;
  return filters;
}

function writeAddress(filters) {
  const parts = new URLSearchParams(Object.entries(filters).filter(([name, value]) => value && !(name === "state" && value === "current")));
  history.replaceState(null, "", parts.size ? `#${parts}` : location.pathname + location.search);
}

function useTheme(redraw) {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = "";
  const apply = () => { root.dataset.theme = chosen || (dark.matches ? "dark" : "light"); };
  apply();
  dark.addEventListener("change", () => { apply(); redraw(); });
  document.getElementById("theme").addEventListener("click", () => { chosen = root.dataset.theme === "dark" ? "light" : "dark"; apply(); redraw(); });
}

async function start() {
  const state = { filters: readAddress(), numbers: new Int32Array() };
  let rows = null;
  useTheme(() => rows && drawAll(rows, state));
  rows = new Rows(await unpack("data"));
  const open = (n) => openDetails(rows, n);
  const options = { data: [], columns: [], layout: "fitDataStretch", maxHeight: "32rem", placeholder: "no rows pass the filters" };
  answersTable(rows.data, open);
  filesTable(rows.data);
  const matrix = new Tabulator("#matrix", options), same = new Tabulator("#same", options);
  await Promise.all([matrix, same].map((t) => new Promise((done) => { t.on("tableBuilt", done); })));
  state.numbers = rows.filter(state.filters);
  const table = rowsTable(rows, state, open);
  const matrixWords = document.getElementById("matrix-words").textContent;
  const update = () => {
    state.numbers = rows.filter(state.filters);
    writeAddress(state.filters);
    document.getElementById("count").textContent = `${state.numbers.length} of ${rows.length} rows pass the filters.`;
    document.getElementById("matrix-words").textContent = matrixWords + fillMatrix(matrix, rows, state.numbers, open);
    document.getElementById("bits-words").textContent = fillSame(same, rows, state.numbers, open);
  };
  buildFilters(rows, state.filters, async () => { update(); await table.setPage(1); await drawAll(rows, state); });
  const { awaited, left_out: leftOut } = rows.data;
  document.getElementById("awaited").textContent = awaited.length ? `Missing so far: ${awaited.join(", ")}. A result file of one of these is very welcome.` : "";
  document.getElementById("left-out").textContent = leftOut.length ? `Left out, not readable: ${leftOut.join("; ")}` : "";
  update();
  await drawAll(rows, state);
  document.body.dataset.ready = "yes";
}
start();
