"""A thousand result files for timing the page: rows of committed results under other machines' names.

    python bench/tools/benchmarks/many_submissions.py FOLDER [FILES]
    time python runner.py report FOLDER --format html -o FOLDER/index.html

Metrics and a fifth of the digests are changed so that nothing compresses better than real files would.
The files are for timing alone: no machine measured them.
"""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from bench.files.records import Row, row_text, submission_text  # noqa: E402
from bench.files.store import read_submission  # noqa: E402

SOURCE = ROOT / "results" / "amd-epyc-family-26-model-2-2-cores"
ROWS = 500


def main(folder: Path, files: int) -> None:
    parts = {
        name: read_submission(SOURCE / f"{name}.json")[0] for name in ("ladder-cpu", "determinism", "bias")
    }
    rows = [*parts["ladder-cpu"].rows[:4], *parts["determinism"].rows[:80], *parts["bias"].rows][:ROWS]
    base = parts["bias"]
    base.rows = []
    random.seed(1)
    for number in range(files):
        base.machine.slug = f"machine-{number:04d}"
        base.volatile["written"] = f"2026-{1 + number % 12:02d}-01T00:00:00+00:00"
        target = folder / base.machine.slug / "bias.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(submission_text(base, [row_text(_changed(row, number)) for row in rows]))


def _changed(row: Row, number: int) -> Row:
    copy = row.model_copy()
    copy.metrics = {
        name: value if "step" in name or value in (0.0, 1.0) else value * random.uniform(0.999, 1.001)
        for name, value in row.metrics.items()
    }
    copy.digests = {
        name: digest
        if name == "inputs" or random.random() < 0.8
        else hashlib.sha256(f"{number}{digest}".encode()).hexdigest()
        for name, digest in row.digests.items()
    }
    return copy


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
