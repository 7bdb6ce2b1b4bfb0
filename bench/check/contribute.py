"""From a finished run to a pull request: is the file fit to be sent, and the exact commands that send it.

Nothing is sent from here: the commands are printed, people run them.
"""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

from bench import RESULTS
from bench.check.validate import validate_file
from bench.errors import UsageError
from bench.files.source import NO_CHECKOUT, ROOT, describe_suite, git, no_checkout
from bench.files.store import BadFile, read_submission
from bench.run.config import read_config
from bench.run.plan import Request


def check_contribution(request: Request) -> None:
    """Before anything runs: what is asked for can become a contribution. Raises UsageError."""
    filters = [name for name in ("backend", "kernel", "case", "unit", "only") if getattr(request, name)]
    if filters:
        raise UsageError(f"--contribute: a file holds a whole config; leave out --{filters[0]}")
    if reason := no_checkout():
        hint = "; it needs a clone of the repository" if reason == NO_CHECKOUT else ""
        raise UsageError(f"--contribute: {reason}{hint}")
    if request.results.resolve() != ROOT / "results":
        given = ["leave out --results"] if request.results != RESULTS else []
        elsewhere = [] if Path.cwd() == ROOT else [_change_directory()]
        raise UsageError(
            f"--contribute: results must be in results/ of this checkout; {' and '.join(given + elsewhere)}"
        )
    name = read_config(request.config)[0].name  # the file's, whatever the config's own is
    if git("check-ignore", f"results/any/{name}.json"):
        raise UsageError(f"--contribute: '{name}' is a first look, not collected; run configs/bias.yaml")


def contribution(path: Path) -> list[str]:
    """Lines for the user: what is wrong with the file, or the commands that make the pull request."""
    problems = validate_file(path, fresh=True)
    if problems:
        return [f"not fit to be sent: {path}", *(f"  {problem}" for problem in problems)]
    lines = []
    if describe_suite().dirty:
        lines.append("note: measured with changed source files: commit or undo the changes, then --force")
    if Path.cwd() != ROOT:
        lines.append(f"In the checkout: {_change_directory()}")
    relative = path.resolve().relative_to(ROOT).as_posix()
    committed = git("show", f"HEAD:{relative}")
    if committed and not _same_machine(committed, path):
        beside = _beside(path).resolve().relative_to(ROOT).as_posix()
        lines += [
            f"{relative} is already there, from another machine or software. Keep both:",
            f"  mv {shlex.quote(relative)} {shlex.quote(beside)} && git checkout -- {shlex.quote(relative)}",
        ]
        relative = beside
    subject = f"Results: {path.parent.name}, {path.stem}"
    return [
        *lines,
        "Send it (after `gh repo fork --remote`, if you cannot push here):",
        f"  git switch -c {shlex.quote(f'results-{path.parent.name}-{path.stem}')}",
        f"  git add {shlex.quote(relative)} && git commit -m {shlex.quote(subject)}",
        "  git push -u origin HEAD && gh pr create --fill",
    ]


def _change_directory() -> str:
    return f"cd {shlex.quote(str(ROOT))}"


def _same_machine(committed: str, path: Path) -> bool:
    """Whether the committed file is an earlier run of the same machine with the same software."""
    temporary = path.with_name(f".{path.name}.committed")
    try:
        temporary.write_text(committed, encoding="utf-8", errors="surrogateescape")
        earlier, _ = read_submission(temporary)
    except BadFile:
        return True  # what cannot be read is replaced
    finally:
        temporary.unlink(missing_ok=True)
    return earlier.machine == read_submission(path)[0].machine


def _beside(path: Path) -> Path:
    """NAME+2.json, NAME+3.json, …: the one that is this machine's already, else the first free one."""
    machine = read_submission(path)[0].machine
    number = 2
    while (other := path.with_name(f"{path.stem}+{number}.json")).exists():
        with contextlib.suppress(BadFile):
            if read_submission(other)[0].machine == machine:
                break
        number += 1
    return other
