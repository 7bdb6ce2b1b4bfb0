"""Where attention runs. One file a platform; this table is the registry.

Adding a backend: write `backends/<name>.py` with `unavailable_reason()` and `create()`, following
`backends.base.Backend`, and add its line here. The module is imported only when somebody asks for
that backend, and must import vendor packages inside `create()`.
"""

import os

# Before torch is imported: an installed torch_npu would load itself then, and where CANN is missing take
# `import torch` down with it. `backends/ascend.py` loads it when it is asked for.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

BACKENDS: dict[str, str] = {
    "cpu": "backends.cpu",
    "cuda": "backends.cuda",
    "ascend": "backends.ascend",
}

# Every kernel name of every backend, so that a config can be checked on a machine that lacks some:
# `triton/*` is no mistake on a laptop, `tritn/*` is one everywhere.
FIX_NAMES = (
    "stock",
    "stabilized",
    "consistent_l",
    "stabilized+consistent_l",
    "delta_fp32",
    "delta_dp",
    "stochastic",
    "shift_const",
)
ABLATION_NAMES = ("o_fp32", "delta_rounded", "stochastic_independent", "delta_flipped", "delta_error_flipped")
OURS = ("eager-stored", "eager-fused", "triton", "composite")
CLOSED = (
    "sdpa-math",
    "sdpa-flash",
    "sdpa-cudnn",
    "sdpa-efficient",
    "flex",
    "flash-attn-2",
    "flash-attn-3",
    "flash-attn-4",
    "npu-fusion",
)
KNOWN_KERNELS = (
    *(f"{implementation}/{fix}" for implementation in OURS for fix in FIX_NAMES),
    *(f"eager-ladder/{fix}" for fix in FIX_NAMES + ABLATION_NAMES),
    *(f"{implementation}/stock" for implementation in CLOSED),
    "composite/stabilized+vendor-backward",
)
