// One row, opened: everything of it, its file, and how to repeat exactly that unit.
const blocks = new Map();

async function detailsOf(rows, n) {
  const file = rows.columns.file[n];
  if (!document.getElementById(`block-${file}`)) return null;
  if (!blocks.has(file)) blocks.set(file, await unpack(`block-${file}`));
  const [metrics, digests, launch, series, wall] = blocks.get(file)[rows.columns.index[n]];
  return { metrics, digests, launch, series, wall };
}

function pairs(heading, values) {
  const entries = Object.entries(values);
  if (!entries.length) return [];
  return [make("h3", {}, heading), make("table", {}, make("tbody", {}, ...entries.map(([k, v]) =>
    make("tr", {}, make("th", { scope: "row" }, k), make("td", {}, v === null ? "none" : String(v))))))];
}

function command(rows, n) {
  const config = `configs/${rows.file(n).config}.yaml`;
  return `python runner.py run ${config} --unit ${rows.unit(n).id} --results rerun`;
}

function copyable(value) {
  const button = make("button", { type: "button" }, "Copy");
  const code = make("pre", {}, value);
  button.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(value); button.textContent = "Copied"; } catch {
      getSelection().selectAllChildren(code);  // a page from disk may not write the clipboard
      button.textContent = "Selected: press Ctrl-C";
    }
  });
  return [code, button];
}

function seriesChart(series) {
  const steps = series.step, names = Object.keys(series).filter((name) => name !== "step");
  const values = names.flatMap((name) => series[name].map((v, i) => ({ name, step: Number(steps ? steps[i] : i), value: Number(v) })))
    .filter((v) => Number.isFinite(v.value));
  return { data: { values }, facet: { field: "name", type: "nominal", title: null, sort: null }, columns: innerWidth > 800 ? 2 : 1,
    resolve: { scale: { y: "independent" } }, spec: { width: innerWidth > 800 ? 330 : 230, height: 90, mark: { type: "line", strokeWidth: 1.3 },
      encoding: { x: { field: "step", type: "quantitative", title: null }, y: { field: "value", type: "quantitative", title: null, scale: { zero: false } } } } };
}

async function openDetails(rows, n) {
  const u = rows.unit(n), file = rows.file(n), dialog = document.getElementById("details");
  document.getElementById("details-title").textContent = `${u.case} · ${u.kernel} · ${file.machine}`;
  const body = document.getElementById("details-body"), found = await detailsOf(rows, n);
  const line = file.line + rows.columns.index[n], runs = rows.columns.runs[n];
  const link = make("a", { href: `${file.url}#L${line}`, rel: "noreferrer" }, `${file.path}, line ${line}`);
  const state = rows.code("state", n) + (runs > 1 ? `; ${rows.columns.agree[n]} of ${runs} runs agree bit for bit` : "");
  const note = file.known ? "" : ` The config of this file is not today's ${file.config}.yaml: its text is in the file, under config.text.`;
  const summary = { "result": shown(rows, n), "what it says": u.label, "reason": rows.code("reason", n), "state": state,
    "provenance": rows.columns.predicted[n] ? "predicted by an emulator" : "measured on the machine named",
    "backend, dtype": `${u.backend}, ${u.dtype}`, "seeds": u.seeds, "case version": u.version, "wall seconds": found?.wall };
  body.replaceChildren(
    ...pairs("Result", Object.fromEntries(Object.entries(summary).filter(([, v]) => v !== "" && v !== undefined))),
    make("h3", {}, "Repeat exactly this unit"), ...copyable(command(rows, n)), make("span", { className: "off" }, note),
    make("h3", {}, "File"), make("p", {}, link, ` · written ${file.written} · suite ${file.suite}, commit ${file.commit}`),
    ...pairs("Parameters", u.params), ...pairs("Options of the kernel", u.options),
    ...(found ? [...pairs("Launch facts", found.launch), ...pairs("Metrics", found.metrics), ...pairs("Digests (sha256)", found.digests)]
      : [make("p", { className: "off" }, "Metrics, digests and launch facts of this file are not in the page: see the line above.")]));
  if (found && Object.keys(found.series).length) {
    const place = make("div", { className: "chart" });
    body.append(make("h3", {}, "Curves"), place);
    await render(place, { ...seriesChart(found.series), description: "Curves of this row by training step" });
  }
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}
