"""One report in any format, to a file or as text to print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.errors import UsageError
from bench.files.load import all_rows, load_all
from bench.files.store import write_text
from bench.report.current import current
from bench.report.export import write_parquet
from bench.report.formats import FORMATS
from bench.report.html.page import write_page
from bench.report.render import render


def write_report(
    form: str, paths: Sequence[Path], output: Path | None, links: str | None
) -> tuple[str | None, list[str]]:
    """Make the report `form` of the result files at `paths`.

    Args: output: the file to write; links: URL of the results folder for links of the page (without it they
    are relative to the page). Returns the text where there is no `output`, and a line
    for every file that was left out. Raises UsageError.
    """
    if form not in FORMATS:
        raise UsageError(f"--format: '{form}'; allowed: {', '.join(FORMATS)}")
    if form in ("html", "parquet") and output is None:
        raise UsageError(f"--format {form} needs -o FILE")
    try:
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
        if form == "html" and output is not None:
            return None, write_page(paths, output, links)
        loaded, problems = load_all(paths)
        if not loaded:
            raise UsageError(f"{', '.join(map(str, paths))}: no readable result files (*.json) there")
        if form == "parquet" and output is not None:
            found = all_rows(loaded)
            write_parquet(found, current(found), output)
            return None, problems
        text = render(form, loaded, output.parent if output else Path())
        if output is None:
            return text, problems
        write_text(output, text)
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from error
    return None, problems
