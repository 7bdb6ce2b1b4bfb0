"""Validate the result files that a pull request changes, and write a summary table.

    python suite/.github/validate_changes.py REQUEST BASE_COMMIT

REQUEST is a checkout of the request with its history. Its files are read, never run: this script and
everything that it imports come from the folder above it.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

SUITE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SUITE))

from bench.check.validate import validate_file  # noqa: E402
from bench.files.store import short  # noqa: E402

Findings = dict[str, list[str]]


def changed(request: Path, base: str) -> list[tuple[str, str]]:
    """Status letter and path of every change since the request left the base branch."""
    command = ["git", "diff", "--name-status", "--no-renames", "-z", f"{base}...HEAD"]
    done = subprocess.run(command, cwd=request, capture_output=True, check=True)
    listed = done.stdout.decode("utf-8", "surrogateescape")
    parts = listed.split("\0")[:-1]
    return list(zip(parts[::2], parts[1::2], strict=True))


def findings(request: Path, changes: list[tuple[str, str]]) -> Findings:
    """Problems by changed file; a file outside results/ is for people to review, not a problem."""
    found: Findings = {}
    for status, name in changes:
        path = Path(name)
        if path.parts[:1] != ("results",) or path.name == "REPORT.md":
            continue
        if status == "D":
            found[name] = ["removes a result: explain why in the request"]
        elif len(path.parts) != 3 or path.suffix != ".json":
            found[name] = ["is no result file: results/<machine>/<config>.json"]
        else:
            found[name] = validate_file(request / path, fresh=True)
    return found


def summary(found: Findings) -> str:
    """A Markdown table; a stranger's text stands in it as code, without what could end the code."""
    lines = ["| file | result |", "|---|---|"]
    for name, problems in found.items():
        shown = "<br>".join(_code(p) for p in problems[:20]) or "valid"
        more = f"<br>and {len(problems) - 20} more" if len(problems) > 20 else ""
        lines.append(f"| {_code(name)} | {shown}{more} |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return "`" + short(text).replace("`", "'").replace("|", "¦") + "`"


def main(request: Path, base: str) -> int:
    found = findings(request, changed(request, base))
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}")  # nothing that a file says is a command of the runner
    for name, problems in found.items():
        print(f"{short(name)}: {'valid' if not problems else f'{len(problems)} problems'}")
        for problem in problems:
            print(f"  {problem}")
    if not found:
        print("no result files changed")
    print(f"::{token}::")
    if target := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(target, "a", encoding="utf-8") as handle:
            handle.write(summary(found))
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
