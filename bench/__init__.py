"""How a run works: config, plan, engine, inputs, numerics, metrics, records, validation, report."""

import os

SUITE_VERSION = "0.1.0"

# Before torch is imported: an installed torch_npu would load itself then, and where CANN is missing take
# `import torch` down with it. backends/ascend.py loads it when it is asked for.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
