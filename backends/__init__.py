"""Where attention runs. One file a platform; this table is the registry.

Adding a backend: write `backends/<name>.py` with `unavailable_reason()` and `create()`, following
`backends.base.Backend`, and add its line here. The module is imported only when somebody asks for
that backend, and must import vendor packages inside `create()`. Names of kernels and fixes are in
`backends.names` and `backends.fixes`; neither imports torch.
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
