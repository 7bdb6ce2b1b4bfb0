"""How a run works: config, plan, engine, inputs, numerics, metrics, records, validation, report."""

import backends  # noqa: F401  what it sets must be set before any module here imports torch

SUITE_VERSION = "0.1.0"
