"""Command line of attnrepro: parse, call, print. `python runner.py --help`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bench.check.contribute import check_contribution, contribution
from bench.check.validate import taken_on_trust, validate_path
from bench.compare.captures import SUFFIX as CAPTURE
from bench.compare.captures import compare_captures, read_capture
from bench.compare.captures_text import captures_text
from bench.compare.submissions import compare as compare_submissions
from bench.compare.submissions import comparison_text
from bench.errors import UsageError
from bench.files.load import Found, Loaded, load_all
from bench.files.records import Row, dumps
from bench.files.schema import schema_text
from bench.files.source import ROOT, commit_note
from bench.files.store import RESULTS, BadFile, read_submission, write_text
from bench.report.cases import run_tables
from bench.report.findings import findings
from bench.report.plot import figures
from bench.report.render import text_table
from bench.report.write import FORMATS, write_report
from bench.run.catalog import catalog, catalog_text
from bench.run.config import find_config
from bench.run.distributed import end, launcher, leave
from bench.run.engine import Request, Run, execute, prepare
from bench.run.plan import Unit
from bench.terminal import spell_out
from cases.processes import world

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reproducibility benchmark for low-precision attention.",
)
messages = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
Results = Annotated[
    Path, typer.Option(help="Where result files are kept: a folder of the working directory.")
]
OptionalPaths = Annotated[
    list[Path] | None, typer.Argument(help="Result files or folders; `results` unless given.")
]
Glob = Annotated[str | None, typer.Option(help="Only units that match this glob.")]


def say(text: str) -> None:
    """Progress and messages go to stderr, results to stdout."""
    messages.print(text)


class ProgressBar:
    """A bar with ETA on a terminal; elsewhere a line every tenth of the run."""

    def __init__(self, run: Run):
        self.total, self.done = len(run.todo), 0
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=messages,
            disable=not messages.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("", total=self.total)

    def started(self, unit: Unit) -> None:
        self.bar.update(self.task, description=f"{unit.case} {unit.kernel}")

    def said(self, text: str) -> None:
        self.bar.console.print(text)

    def finished(self, unit: Unit, row: Row) -> None:
        self.done += 1
        self.bar.advance(self.task)
        if row.status == "error":
            self.bar.console.print(f"error: {unit.case} {unit.kernel}: {row.reason}")
        step = max(1, self.total // 10)
        if not messages.is_terminal and (self.done % step == 0 or self.done == self.total):
            say(f"{self.done}/{self.total} {unit.case} {unit.kernel}")


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A YAML file, see configs/.")],
    results: Results = RESULTS,
    backend: Glob = None,
    kernel: Glob = None,
    case: Glob = None,
    unit: Annotated[str | None, typer.Option(help="Only the unit of this id (the page shows it).")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="key=value of a parameter or option; repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Measure again what is already in the file.")] = False,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Units side by side.")] = 1,
    contribute: Annotated[bool, typer.Option(help="End with the commands of a pull request.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Print the plan and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Measure what a config asks for, writing the result file after every unit."""
    request = Request(find_config(config), results, backend, kernel, case, unit, only or (), force, jobs)
    if contribute:
        check_contribution(request)
    planned = prepare(request)
    if note := commit_note():
        planned.notes.append(note)
    say(f"{request.config}: {len(planned.units)} units on {planned.machine.slug} → {planned.path}")
    if dry_run:
        _print_plan(planned, as_json)
        return
    _terminate_like_ctrl_c()
    watcher = ProgressBar(planned)
    command = resume_command(request, contribute)
    try:
        with watcher.bar:
            execute(planned, request, watcher)
    except KeyboardInterrupt:
        kept = len(planned.selected_rows())
        say(f"\nstopped: {kept} of {len(planned.units)} units are in {planned.path}")
        say(f"resume with: {command}")
        leave()
        raise typer.Exit(130) from None
    leave()
    for note in planned.notes:
        say(f"note: {note}")
    _print_run(planned, as_json)
    if contribute:
        say("\n".join(["", *contribution(planned.path)]))
    raise typer.Exit(1 if any(row.status == "error" for row in planned.selected_rows()) else 0)


@app.command("list")
def list_(as_json: Json = False) -> None:
    """Backends (with the reason where one is unavailable), kernels, cases, configs."""
    found = catalog()
    print(dumps(found) if as_json else catalog_text(found))


@app.command()
def validate(
    paths: Annotated[list[Path], typer.Argument(help="Result files or folders.")],
    quick: Annotated[bool, typer.Option(help="Structure alone: no inputs are made again.")] = False,
    fresh: Annotated[bool, typer.Option(help="Refuse rows of an older version of a case.")] = False,
    as_json: Json = False,
) -> None:
    """Check result files; every problem is printed, and the exit code is 1 if there is one."""
    found: dict[str, list[str]] = {}
    for path in paths:
        found |= validate_path(path, inputs=not quick, fresh=fresh)
    if not found:
        raise UsageError(f"{_names(paths)}: no result files (*.json) there")
    if as_json:
        print(json.dumps(found, indent=1, sort_keys=True))
    else:
        for file, problems in found.items():
            print(f"{file}: {'ok' if not problems else f'{len(problems)} problems'}")
            for problem in problems:
                print(f"  {problem}")
            if not problems:
                for note in taken_on_trust(Path(file)):
                    say(f"note: {file}: {note}")
    raise typer.Exit(1 if any(found.values()) else 0)


@app.command()
def report(
    paths: OptionalPaths = None,
    format: Annotated[str, typer.Option(help=f"{', '.join(FORMATS)}.")] = "text",
    output: Annotated[Path | None, typer.Option("-o", help="Write to a file.")] = None,
    links: Annotated[
        str | None, typer.Option(help="html: URL of the results folder, for the page's links.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tables over result files: for a terminal, a paper, a browser, a spreadsheet."""
    text, problems = write_report("json" if as_json else format, paths or [RESULTS], output, links)
    for problem in problems:
        say(f"left out: {problem}")
    if text is None:
        say(f"wrote {output}")
    else:
        print(text, end="")


@app.command()
def plot(
    paths: OptionalPaths = None,
    output: Annotated[Path, typer.Option("-o", help="Folder for the figures.")] = Path("figures"),
    as_json: Json = False,
) -> None:
    """Figures of the crash ladder over result files, as SVG; needs matplotlib."""
    loaded = _load(paths or [RESULTS])
    written = []
    for name, svg in figures(loaded).items():
        _write(output / name, svg)
        written.append(str(output / name))
    if as_json:
        print(dumps({"written": written}))


@app.command()
def schema() -> None:
    """The JSON Schema of a result file (docs/schema/submission-v1.json)."""
    print(schema_text(), end="")


@app.command()
def compare(a: Path, b: Path, as_json: Json = False) -> None:
    """Two result files: facts, bits and biases that differ. Two captures (.safetensors): errors too."""
    if a.suffix == b.suffix == CAPTURE:
        captured = compare_captures(read_capture(a), read_capture(b))
        print(dumps(captured.as_json()) if as_json else captures_text(captured, str(a), str(b)))
        return
    submissions = []
    for path in (a, b):
        if path.suffix == CAPTURE:
            raise UsageError(f"{path}: a capture; the other file is none ({CAPTURE})")
        try:
            submissions.append(read_submission(path)[0])
        except BadFile as problem:
            raise UsageError(f"{path}: {problem}") from problem
    result = compare_submissions(*submissions)
    print(dumps(result.as_json()) if as_json else comparison_text(result, str(a), str(b)))


def _load(paths: list[Path]) -> list[Loaded]:
    """The readable submissions at `paths`; what is not one is named and left out."""
    loaded, problems = load_all(paths)
    for problem in problems:
        say(f"left out: {problem}")
    if not loaded:
        raise UsageError(f"{_names(paths)}: no readable result files (*.json) there")
    return loaded


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
    say(f"wrote {path}")


def _names(paths: list[Path]) -> str:
    return ", ".join(map(str, paths))


def _print_plan(planned: Run, as_json: bool) -> None:
    done = {unit.key for unit in planned.units} & planned.rows.keys()
    if as_json:
        units = [vars(unit) for unit in planned.units]
        print(dumps({"path": str(planned.path), "units": units}))
        return
    for unit in planned.units:
        params = " ".join(f"{k}={v}" for k, v in unit.params.items())
        options = " ".join(f"{k}={v}" for k, v in unit.options.items() if v is not None)
        mark = "done  " if unit.key in done else ""
        print(f"{mark}{unit.case}  {unit.kernel}  {unit.dtype}  {params}  [{options}]")


def _print_run(planned: Run, as_json: bool) -> None:
    rows = planned.selected_rows()
    if as_json:
        print(dumps({"path": str(planned.path), "rows": [row.model_dump() for row in rows]}))
        return
    found = [Found(row, None, i) for i, row in enumerate(rows)]
    print()
    for table in run_tables(found, planned.machine.slug):
        print(text_table(table), end="\n\n")
    for line in findings(rows):
        print(f"* {line}")
    print(f"\nresult file: {planned.path}")
    print(f"next: {shlex.join(['python', program(), 'validate', str(planned.path)])}")


def program() -> str:
    """This file as a command to copy names it: by its path, but in its own folder."""
    return "runner.py" if Path.cwd() == ROOT else str(ROOT / "runner.py")


def resume_command(request: Request, contribute: bool) -> str:
    """What goes on with a stopped run; without --force, which would measure again what is done."""
    arguments = [program(), "run", str(request.config)]
    if request.results != RESULTS:
        arguments += ["--results", str(request.results)]
    if request.jobs > 1:
        arguments += ["--jobs", str(request.jobs)]
    for flag in ("backend", "kernel", "case"):
        if (pattern := getattr(request, flag)) is not None:
            arguments += [f"--{flag}", pattern]
    if request.unit is not None:
        arguments += ["--unit", request.unit]
    for condition in request.only:
        arguments += ["--only", condition]
    if contribute:
        arguments.append("--contribute")
    return f"{launcher()} {shlex.join(arguments)}"


def _terminate_like_ctrl_c() -> None:
    """A polite kill ends a run as Ctrl-C does: file intact, how to resume."""

    def stop(number: int, frame: FrameType | None) -> Any:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


def main() -> None:
    """Usage errors are one line on stderr and exit code 2. Of a torchrun's processes one speaks."""
    spell_out()
    if not world().is_main:
        messages.quiet = True
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        code = app(standalone_mode=False) or 0
    except UsageError as error:
        code = 2
        if world().is_main:
            print(f"error: {error}", file=sys.stderr)
        else:
            time.sleep(1)  # torchrun ends all processes once one has ended: rank 0 speaks first
    except typer.Abort:
        code = 130
    except BrokenPipeError:  # `| head` closed the pipe
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:  # typer's own errors: a wrong command, flag or argument
        if not hasattr(error, "format_message"):
            raise
        code = 2
        if (message := error.format_message()) and world().is_main:
            print(f"error: {message} (see --help)", file=sys.stderr)
    end(code)


if __name__ == "__main__":
    main()
