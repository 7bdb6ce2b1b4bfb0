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
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from bench import RESULTS
from bench.errors import UsageError
from bench.report.formats import FORMATS
from bench.run.distributed import end, launcher, leave
from bench.terminal import spell_out
from cases.processes import world

if TYPE_CHECKING:  # every command imports what it needs: torch alone takes seconds, and help needs none of it
    from bench.files.load import Loaded
    from bench.run.plan import PlannedRun, Request

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
    # All of it now: a run may take days, and a file of the checkout may be another by then.
    from bench.check.contribute import check_contribution, contribution
    from bench.files.records import dumps
    from bench.files.source import commit_note
    from bench.report.run_end import run_text
    from bench.run.config import find_config
    from bench.run.engine import execute, prepare
    from bench.run.plan import Request
    from bench.run.progress_bar import ProgressBar

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
    watcher = ProgressBar(len(planned.todo), messages)
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
    rows = planned.selected_rows()
    if as_json:
        print(dumps({"path": str(planned.path), "rows": [row.model_dump() for row in rows]}))
    else:
        print(f"\n{run_text(rows, planned.machine.slug)}\nresult file: {planned.path}")
        print(f"next: {shlex.join(['python', program(), 'validate', str(planned.path)])}")
    if contribute:
        say("\n".join(["", *contribution(planned.path)]))
    raise typer.Exit(1 if any(row.status == "error" for row in rows) else 0)


@app.command("list")
def list_(as_json: Json = False) -> None:
    """Backends (with the reason where one is unavailable), kernels, cases, configs."""
    from bench.files.records import dumps
    from bench.run.catalog import catalog, catalog_text

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
    from bench.check.validate import taken_on_trust, validate_path

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
    from bench.report.write import write_report

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
    from bench.files.records import dumps
    from bench.report.plot import figures

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
    from bench.files.schema import schema_text

    print(schema_text(), end="")


@app.command("compare")
def compare_(a: Path, b: Path, as_json: Json = False) -> None:
    """Two result files: facts, bits and biases that differ. Two captures (.safetensors): errors too."""
    from bench.compare.captures import SUFFIX as CAPTURE
    from bench.compare.captures import compare_captures, read_capture
    from bench.compare.captures_text import captures_text
    from bench.compare.submissions import compare, comparison_text
    from bench.files.records import dumps
    from bench.files.store import BadFile, read_submission

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
    result = compare(*submissions)
    print(dumps(result.as_json()) if as_json else comparison_text(result, str(a), str(b)))


def _load(paths: list[Path]) -> list[Loaded]:
    """The readable submissions at `paths`; what is not one is named and left out."""
    from bench.files.load import load_all

    loaded, problems = load_all(paths)
    for problem in problems:
        say(f"left out: {problem}")
    if not loaded:
        raise UsageError(f"{_names(paths)}: no readable result files (*.json) there")
    return loaded


def _write(path: Path, text: str) -> None:
    from bench.files.store import write_text

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
    say(f"wrote {path}")


def _names(paths: list[Path]) -> str:
    return ", ".join(map(str, paths))


def _print_plan(planned: PlannedRun, as_json: bool) -> None:
    from bench.files.records import dumps

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


def program() -> str:
    """This file as a command to copy names it: by its path, but in its own folder."""
    here = Path(__file__).resolve()
    return here.name if Path.cwd() == here.parent else str(here)


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
