"""The published JSON Schema is that of the models, and holds every committed file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.files.schema import schema_text
from conftest import RunIt, committed_results

ROOT = Path(__file__).resolve().parents[3]
PUBLISHED = ROOT / "docs" / "schema" / "submission-v1.json"
jsonschema = pytest.importorskip("jsonschema", reason="pip install -r requirements-dev.txt")


@pytest.fixture
def validator():
    schema = json.loads(PUBLISHED.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_published_schema_is_up_to_date() -> None:
    assert PUBLISHED.read_text() == schema_text(), (
        "run: python runner.py schema > docs/schema/submission-v1.json"
    )


def test_results_follow_the_schema(validator, run_tiny: RunIt) -> None:
    files = [run_tiny().path, *committed_results()]
    for path in files:
        assert [e.message for e in validator.iter_errors(json.loads(path.read_text()))] == [], path


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("verdict", "a\u202eb"),
        ("seeds", 0),
        ("dtype", "int8"),
        ("metrics", {"x": "nan"}),
        ("reason", "x" * 501),
        ("digests", {"o": "0"}),
        ("params", {"<b>": 1}),
        ("extra", 1),
    ],
)
def test_the_schema_refuses_what_the_models_refuse(
    validator, run_tiny: RunIt, field: str, value: object
) -> None:
    tree = json.loads(run_tiny().path.read_text())
    tree["rows"][0][field] = value
    assert not validator.is_valid(tree)


def test_non_finite_numbers_are_strings(validator, run_tiny: RunIt) -> None:
    tree = json.loads(run_tiny().path.read_text())
    tree["rows"][0]["metrics"] = {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1.5}
    assert validator.is_valid(tree)
