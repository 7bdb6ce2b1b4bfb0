"""The JSON Schema of a result file, made from the models: `docs/schema/submission-v1.json`."""

from __future__ import annotations

import json
from typing import Any

from bench.files.records import MAX_BYTES, SCHEMA_VERSION, Submission

NOTE = (
    "One result file of attnrepro, at most {limit} bytes: what one machine measured with one config. "
    "The file's text is canonical besides: keys sorted, one top-level entry a line, one row a line, "
    "one trailing newline. `python runner.py validate FILE` checks more than a schema can."
)


def schema_text() -> str:
    """The published schema's text."""
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Submission.model_json_schema(mode="validation"),
        "title": f"attnrepro submission, version {SCHEMA_VERSION}",
        "description": NOTE.format(limit=MAX_BYTES),
    }
    _close(schema)
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


def _close(schema: Any) -> None:
    """Keys that fit no pattern are refused, as the models do."""
    if isinstance(schema, dict):
        if "patternProperties" in schema:
            schema["additionalProperties"] = False
        for item in schema.values():
            _close(item)
    elif isinstance(schema, list):
        for item in schema:
            _close(item)
