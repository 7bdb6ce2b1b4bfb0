"""Names of the report's formats, apart from what makes them: the command line's help lists them."""

from __future__ import annotations

TEXT_FORMATS = ("text", "markdown", "paper", "csv", "json")
FORMATS = (*TEXT_FORMATS, "html", "parquet")
