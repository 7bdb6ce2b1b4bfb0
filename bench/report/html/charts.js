// The charts: Vega-Lite specifications over the rows that the filters leave.
const MAX_POINTS = 1000;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function chartConfig() {
  const fg = colour("--fg"), soft = colour("--soft"), line = colour("--line");
  return { background: null, font: "system-ui, DejaVu Sans, sans-serif", view: { stroke: line },
    axis: { labelColor: fg, titleColor: soft, gridColor: line, domainColor: line, tickColor: line, labelLimit: narrow() ? 140 : 260, titleFontWeight: "normal" },
    legend: { labelColor: fg, titleColor: soft, labelLimit: 300, orient: "bottom", columns: narrow() ? 1 : 2, symbolLimit: 20, symbolFillColor: soft, symbolStrokeColor: soft },
    title: { color: fg }, header: { labelColor: fg, titleColor: soft }, range: { category: { scheme: "tableau10" } } };
}

async function draw(id, spec, words) {
  const place = document.getElementById(id);
  document.getElementById(`${id}-words`).textContent = words;
  if (!spec) { place.replaceChildren(make("p", { className: "none" }, "Not measured by any row that passes the filters.")); return; }
  await render(place, { ...spec, description: words });
}

async function render(place, spec) {
  const full = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", ...spec, config: chartConfig() };
  const runtime = vega.parse(vegaLite.compile(full).spec, null, { ast: true });
  const view = new vega.View(runtime, { expr: vegaInterpreter, renderer: "svg", hover: false, loader: { load: () => Promise.reject(new Error("no network")) } });
  view.tooltip((handler, event, item, value) => {
    place.title = value ? Object.entries(value).map(([k, v]) => `${k}: ${v}`).join("\n") : "";
  });
  place.replaceChildren();
  await view.initialize(place).runAsync();
  const svg = place.querySelector("svg");
  svg?.setAttribute("role", "img");
}

const narrow = () => innerWidth < 700;
const wide = (id) => Math.max(150, Math.min(560, document.getElementById(id).clientWidth - (narrow() ? 165 : 250)));

// Rows that answer one question, current and measured; at the paper's point unless the reader chose their case.
function pointsOf(rows, numbers, filters, subject, narrower) {
  const found = [];
  for (const n of numbers) {
    const u = rows.unit(n), point = { ...rows.case(n).told_at, ...narrower };
    // A wrong result is no bias: its size would hide all others.
    if (rows.case(n).subject !== subject || !rows.current(n) || !rows.ok(n) || !Number.isFinite(rows.columns.value[n])
      || rows.code("verdict", n) === "out_of_range") continue;
    if (filters.case !== u.case && !Object.entries(point).every(([k, v]) => (k === "dtype" ? u.dtype : u.params[k]) === v)) continue;
    const value = rows.columns.value[n], sem = rows.columns.sem[n] || 0;
    found.push({ row: n, kernel: u.kernel + (u.options.beta > 2 ? ` β=${u.options.beta}` : ""), machine: `${rows.file(n).machine} · ${u.backend}`,
      point: label(u), value, low: value - sem, high: value + sem, verdict: rows.code("verdict", n), fix: u.fix });
    if (found.length >= MAX_POINTS) break;
  }
  return found;
}

function errorBars(id, values, axis, scale, many) {
  const y = { field: "kernel", type: "nominal", sort: null, title: null };
  const tooltip = ["kernel", "machine", "point", "value", "verdict"].map((field) => ({ field }));
  const color = { field: "machine", type: "nominal", title: null, legend: many ? {} : null };
  return { data: { values }, width: wide(id), height: { step: many ? 30 : 16, for: "position" }, encoding: { y, ...(many ? { yOffset: { field: "machine" } } : {}) }, layer: [
    { mark: { type: "rule", color: colour("--soft"), strokeDash: [4, 3] }, encoding: { x: { datum: 0, type: "quantitative" }, y: null, yOffset: null } },
    { mark: { type: "rule", strokeWidth: 2 }, encoding: { x: { field: "low", type: "quantitative", title: axis, scale }, x2: { field: "high" }, color } },
    { mark: { type: "point", filled: true, size: 50, opacity: 1 }, encoding: { x: { field: "value", type: "quantitative", scale }, color, tooltip,
      shape: { field: "verdict", type: "nominal", title: null, legend: { columns: narrow() ? 2 : 4 } } } },
  ] };
}

const severalMachines = (values) => new Set(values.map((v) => v.machine)).size > 1;

function biasChart(rows, numbers, filters) {
  const values = pointsOf(rows, numbers, filters, "bias", { row_jitter: 0.5 });
  const spec = values.length ? errorBars("bias", values, "mean error of O, ulp", {}, severalMachines(values)) : null;
  return draw("bias", spec, "Mean rounding error of O where two keys share the row maximum (BF16, gap 12, rows that vary), ±1 standard error. "
    + "0 is unbiased; kernels whose result is simply wrong (out_of_range) are left out. Choose the case bias/tie_break above to see all its points.");
}

function leakChart(rows, numbers, filters) {
  const values = pointsOf(rows, numbers, filters, "leak", {});
  const spec = values.length ? errorBars("leak", values, "mean rowsum(dS)", { type: "symlog", constant: 1e-6 }, severalMachines(values)) : null;
  if (spec) spec.layer[1].encoding.x.axis = { format: ".0e", values: [-1e-2, -1e-4, -1e-6, 0, 1e-6, 1e-4, 1e-2] };
  return draw("leak", spec, "rowsum(dS) is exactly 0 in exact arithmetic; what is left comes from the error in δ and reaches dQ. "
    + "Logarithmic on both sides of 0, linear below 1e-6.");
}

// Only a training run's verdict names a step.
function ladderChart(rows, numbers) {
  const values = [];
  for (const n of numbers) {
    const u = rows.unit(n), verdict = rows.code("verdict", n), step = Number(verdict.split("@")[1]);
    if (!rows.current(n) || !Number.isFinite(step) || values.length >= MAX_POINTS) continue;
    values.push({ bits: u.options.mantissa_bits == null ? "full" : String(u.options.mantissa_bits), fix: u.fix, step: Math.max(1, step), verdict,
      outcome: verdict.startsWith("exploded") ? "exploded at this step" : "no explosion up to this step", machine: `${rows.file(n).machine} · ${u.backend}`, seed: u.params.seed ?? 0 });
  }
  const color = { field: "fix", type: "nominal", title: null, sort: null, legend: { columns: narrow() ? 1 : 3 } };
  const many = (field) => new Set(values.map((v) => v[field])).size, marks = many("bits") * many("fix");
  const space = document.getElementById("ladder").clientWidth - 90;
  const spec = values.length ? { data: { values }, facet: { row: { field: "machine", type: "nominal", title: null } }, resolve: { scale: { x: "independent" } },
    spec: { width: { step: Math.max(4, Math.min(14, space / marks)) }, height: 190, mark: { type: "point", size: 50, strokeWidth: 2, opacity: 1 },
      encoding: { x: { field: "bits", type: "ordinal", title: "mantissa bits of P̄ and O", axis: { labelAngle: 0 } }, xOffset: { field: "fix", sort: null },
        y: { field: "step", type: "quantitative", scale: { type: "log", nice: false, padding: 14 }, title: "training step (log)" }, color,
        shape: { field: "outcome", type: "nominal", title: null, legend: { columns: 1 },
          scale: { domain: ["exploded at this step", "no explosion up to this step"], range: ["cross", "triangle-up"] } },
        tooltip: ["fix", "bits", "seed", "verdict", "machine"].map((field) => ({ field })) } } } : null;
  return draw("ladder", spec, "Step at which training exploded, by mantissa bits and fix; one mark a training run, one panel a machine (their models may differ in size). A triangle did not explode as long as it ran.");
}

function curvesChart(rows, data, filters) {
  const machines = [...new Set(data.curves.map((c) => c.machine))];
  const machine = machines.includes(filters.machine) ? filters.machine : filters.machine ? null : machines[0];
  const own = data.curves.filter((c) => c.machine === machine);
  const bits = Math.min(...own.filter((c) => c.bits != null).map((c) => c.bits));
  const values = own.filter((c) => c.bits === bits).flatMap((c) => c.step.flatMap((step, i) => [
    { kernel: c.kernel, step, what: "loss", value: Number(c.loss[i]) }, { kernel: c.kernel, step, what: "norm", value: Number(c.w_q[i]) }]))
    .filter((v) => Number.isFinite(v.value));
  const part = (what, axis, scale, last) => ({ width: wide("curves") + 120, height: 150, transform: [{ filter: { field: "what", equal: what } }],
    mark: { type: "line", strokeWidth: 1.6 }, encoding: { x: { field: "step", type: "quantitative", title: last ? "training step" : null },
      y: { field: "value", type: "quantitative", title: axis, scale }, color: { field: "kernel", type: "nominal", title: null, sort: null } } });
  const spec = values.length ? { data: { values }, resolve: { scale: { color: "shared" } },
    vconcat: [part("loss", "loss, nats", { zero: false }, false), part("norm", "largest ‖W_Q‖₂ (log)", { type: "log" }, true)] } : null;
  return draw("curves", spec, values.length ? `Loss and the largest spectral norm of W_Q of one training run a kernel, ${bits} mantissa bit${bits === 1 ? "" : "s"}, seed 0, on ${machine}. `
    + "The norm grows long before the loss does." : "Loss and the largest ‖W_Q‖₂ of a run that explodes.");
}

function speedChart(rows, numbers) {
  const key = (n) => { const u = rows.unit(n); return JSON.stringify([rows.file(n).machine, u.backend, u.dtype, u.params, u.seeds, u.implementation]); };
  const timed = [...numbers].filter((n) => rows.case(n).subject === "cost" && rows.current(n) && rows.columns.value[n] > 0);
  const stock = new Map(timed.filter((n) => rows.unit(n).fix === "stock").map((n) => [key(n), rows.columns.value[n]]));
  const values = timed.filter((n) => rows.unit(n).fix !== "stock" && stock.has(key(n))).slice(0, MAX_POINTS).map((n) => {
    const p = rows.unit(n).params;
    return { kernel: rows.unit(n).kernel, machine: rows.file(n).machine, ratio: rows.columns.value[n] / stock.get(key(n)),
      shape: `batch ${p.batch}, heads ${p.heads}, tokens ${p.tokens}, head_dim ${p.head_dim}`, ms: rows.columns.value[n] };
  });
  const spec = values.length ? { data: { values }, width: wide("speed"), height: { step: 22 }, encoding: { y: { field: "kernel", type: "nominal", sort: null, title: null } }, layer: [
    { mark: { type: "rule", color: colour("--soft"), strokeDash: [4, 3] }, encoding: { x: { datum: 1, type: "quantitative" }, y: null } },
    { mark: { type: "point", filled: true, size: 60 }, encoding: { x: { field: "ratio", type: "quantitative", scale: { zero: false }, title: "time over that of stock" },
      color: { field: "shape", type: "nominal", title: null, legend: { columns: 1 } }, shape: { field: "machine", type: "nominal", title: null, legend: { columns: 1 } },
      tooltip: ["kernel", "machine", "shape", "ms", "ratio"].map((field) => ({ field })) } }] } : null;
  return draw("speed", spec, "Time of forward and backward with a fix over that of the same implementation without it, same shape, same machine. 1 costs nothing. "
    + "Times are never compared across machines.");
}

// Charts show as many machines as can be told apart; the matrix above says which.
async function drawAll(rows, state) {
  const { filters } = state, machines = new Set(machinesOf(rows, state.numbers).slice(0, MAX_MACHINES));
  const numbers = state.numbers.filter((n) => machines.has(rows.file(n).machine));
  await biasChart(rows, numbers, filters);
  await leakChart(rows, numbers, filters);
  await ladderChart(rows, numbers);
  await curvesChart(rows, rows.data, filters);
  await speedChart(rows, numbers);
}
