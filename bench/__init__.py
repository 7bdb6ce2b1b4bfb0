"""Everything around a measurement, in rooms: each folder says what lives there and what it may import."""

from pathlib import Path

import backends  # noqa: F401  what it sets must be set before any module here imports torch

RESULTS = Path("results")  # of the working directory: where result files are kept unless told otherwise
SUITE_VERSION = "0.1.0"
