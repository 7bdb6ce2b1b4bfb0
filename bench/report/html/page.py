"""One HTML file with everything inside: no network, works from disk, nothing of a file can run.

The page's policy (a Content-Security-Policy) names the hashes of its own scripts: any other script, any
request to anywhere, any evaluation of text is refused by the browser even if an escape were forgotten.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import jinja2

from bench import SUITE_VERSION
from bench.errors import UsageError
from bench.files.store import write_text
from bench.report.html.data import compress, gather

HERE = Path(__file__).resolve().parent
VENDOR = HERE / "vendor"
SCRIPTS = ("columns.js", "tables.js", "charts.js", "details.js", "page.js")


def write_page(paths: Sequence[Path], output: Path, links: str | None) -> list[str]:
    """Write the page over the result files at `paths`; a line for every file that was left out.

    Args: output: the page; links: what stands before `machine/config.json` in links, for example
    `https://github.com/OWNER/REPO/blob/main/results/`; without it links are relative to the page.
    """
    data, problems = gather(paths, output.parent, links)
    if not data.files:
        raise UsageError(f"{', '.join(map(str, paths))}: no readable result files (*.json) there")
    content = data.finish() | {"left_out": problems}
    libraries = [
        vendored("tabulator.min.js"),
        vendored("vega.min.js"),
        vendored("vega-lite.min.js"),
    ]
    scripts = [*libraries, interpreter(), "\n".join((HERE / n).read_text() for n in SCRIPTS)]
    if any("</script" in script.lower() for script in scripts):
        raise ValueError("a script would end its own element")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    text = environment.get_template("page.html.j2").render(
        policy=" ".join(f"'sha256-{_hash(script)}'" for script in scripts),
        styles=[vendored("tabulator_simple.min.css"), (HERE / "page.css").read_text()],
        scripts=scripts,
        data=compress(content),
        blocks=data.blocks,
        answers=content["answers"],
        machines=len(data.machines),
        files=len(data.files),
        rows=len(data.entries),
        suite=SUITE_VERSION,
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    write_text(output, text)
    return problems


@cache
def vendored(name: str) -> str:
    """A library's text; ValueError if it is not the file that was reviewed."""
    content = (VENDOR / name).read_bytes()
    sums = dict(line.split()[::-1] for line in (VENDOR / "SHA256SUMS").read_text().splitlines())
    if sums[name] != hashlib.sha256(content).hexdigest():
        raise ValueError(f"{VENDOR / name} is not the file that SHA256SUMS names")
    lines = content.decode().splitlines()
    return "\n".join(line for line in lines if "sourceMappingURL" not in line)


def interpreter() -> str:
    """vega-interpreter as a plain script: it is published as a module alone."""
    text = vendored("vega-interpreter.js")
    for module, plain in (
        (
            "import { ascending, isString, DisallowedObjectProperties } from 'vega-util';",
            "const { ascending, isString, DisallowedObjectProperties } = vega;",
        ),
        ("export { expression as expressionInterpreter };", "window.vegaInterpreter = expression;"),
    ):
        if module not in text:
            raise ValueError(f"vega-interpreter.js lacks the line: {module}")
        text = text.replace(module, plain)
    return "(() => {" + text + "\n})();"


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
