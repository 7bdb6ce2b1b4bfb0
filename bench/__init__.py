"""Everything around a measurement, in rooms: each folder says what lives there and what it may import."""

import backends  # noqa: F401  what it sets must be set before any module here imports torch

SUITE_VERSION = "0.1.0"
