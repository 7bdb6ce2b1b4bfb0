"""How a run works: config, plan, engine, inputs, numerics, metrics, records, validation, report."""

SUITE_VERSION = "0.1.0"
