"use strict";
// Data of the page: columns of small numbers, their codes, and what a filter leaves of them.
// Strings of result files reach the page as text nodes alone: no function here builds HTML.

async function unpack(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

class Rows {
  constructor(data) {
    this.data = data;
    this.columns = {};
    for (const [name, values] of Object.entries(data.columns)) {
      // Values that are NaN or infinite come as text.
      this.columns[name] = name === "value" || name === "sem"
        ? Float64Array.from(values, (v) => (v === null ? NaN : Number(v))) : Int32Array.from(values);
    }
    this.length = data.columns.unit.length;
    this.machine = Int32Array.from(data.files, (f) => data.codes.machine.indexOf(f.machine));
    this.words = data.units.map((u) => [u.case, u.kernel, u.backend, u.dtype, label(u)].join(" ").toLowerCase());
    this.points = pointCodes(data.units);
  }

  unit(n) { return this.data.units[this.columns.unit[n]]; }
  case(n) { return this.data.cases[this.unit(n).case]; }
  file(n) { return this.data.files[this.columns.file[n]]; }
  code(name, n) { return this.data.codes[name][this.columns[name][n]]; }
  current(n) { return this.columns.state[n] === 0; }
  ok(n) { return this.code("status", n) === "ok"; }

  // Numbers of the rows that pass every filter; `filters` maps a name to the wanted value or "".
  filter(filters) {
    const { units, codes } = this.data;
    const unit = units.map((u, i) => (!filters.case || u.case === filters.case)
      && (!filters.implementation || u.implementation === filters.implementation)
      && (!filters.fix || u.fix === filters.fix) && (!filters.dtype || u.dtype === filters.dtype)
      && (!filters.backend || u.backend === filters.backend));
    const machine = codes.machine.map((m) => !filters.machine || m === filters.machine);
    const state = codes.state.map((s) => !filters.state || s === filters.state);
    const verdict = codes.verdict.map((v) => !filters.verdict || word(v) === filters.verdict);
    const predicted = { "": -1, measured: 0, predicted: 1 }[filters.provenance || ""];
    const text = (filters.text || "").toLowerCase().trim();
    const has = (value) => String(value).toLowerCase().includes(text);
    const unitText = this.words.map((w) => w.includes(text));
    const verdictText = codes.verdict.map(has), machineText = codes.machine.map(has), reasonText = codes.reason.map(has);
    const c = this.columns, found = [];
    for (let n = 0; n < this.length; n++) {
      if (!unit[c.unit[n]] || !machine[this.machine[c.file[n]]] || !state[c.state[n]] || !verdict[c.verdict[n]]) continue;
      if (predicted >= 0 && c.predicted[n] !== predicted) continue;
      if (text && !unitText[c.unit[n]] && !verdictText[c.verdict[n]] && !machineText[this.machine[c.file[n]]]
        && !reasonText[c.reason[n]]) continue;
      found.push(n);
    }
    return Int32Array.from(found);
  }

  // What a column sorts by: a number, or the place of its text in the sorted codes.
  order(field) {
    const rank = (values) => {
      const sorted = [...values.keys()].sort((a, b) => (values[a] < values[b] ? -1 : 1)), place = [];
      sorted.forEach((code, at) => { place[code] = at; });
      return place;
    };
    const c = this.columns, { units, codes } = this.data;
    if (field === "value") return (n) => c.value[n];
    if (field === "runs") return (n) => c.runs[n];
    if (field === "machine") { const r = rank(codes.machine); return (n) => r[this.machine[c.file[n]]]; }
    if (field === "verdict") { const r = rank(codes.verdict); return (n) => r[c.verdict[n]]; }
    if (field === "state") return (n) => c.state[n];
    const r = rank(units.map((u) => (field === "point" ? label(u) : u[field])));
    return (n) => r[c.unit[n]];
  }
}

// Units that differ in their backend alone ask the same question: their bits may be compared.
function pointCodes(units) {
  const codes = new Map();
  return units.map((u) => {
    const key = JSON.stringify([u.case, u.version, u.kernel, u.dtype, u.params, u.options, u.seeds]);
    if (!codes.has(key)) codes.set(key, codes.size);
    return codes.get(key);
  });
}

const HIDDEN = new Set(["min_z", "floor_ulp"]);
function label(unit) {
  const pairs = [...Object.entries(unit.params).filter(([k]) => !HIDDEN.has(k)),
    ...Object.entries(unit.options).filter(([, v]) => v !== null)];
  return pairs.map(([k, v]) => `${k}=${v}`).join(" ");
}
const word = (verdict) => verdict.split("@")[0];
const isFine = (verdict) => ["", "pass", "holds", "stable", "measured"].includes(word(verdict));

function show(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(1) : String(Number(value.toPrecision(4)));
  return text.replace("-", "−");
}

// `0.219±0.003`: the headline value of a row with its standard error.
function measured(rows, n) {
  const { value, sem } = rows.columns;
  return Number.isNaN(value[n]) ? "" : show(value[n]) + (Number.isNaN(sem[n]) ? "" : "±" + show(sem[n]));
}

const shown = (rows, n) => (rows.ok(n) ? `${measured(rows, n)} ${rows.code("verdict", n)}`.trim() : rows.code("status", n));

// An element with properties and children; text is always a text node.
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}
