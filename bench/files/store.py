"""Reading and writing result files so that nothing is ever lost.

A file is replaced atomically after every unit. One that cannot be read is kept aside as
`.corrupt-N`; one that belongs to another plan (config, code or machine changed) as `.stale-N`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.errors import UsageError
from bench.files.records import KEY_PATTERN, MAX_BYTES, MAX_ROWS, Submission

RESULTS = Path("results")  # of the working directory: where result files are kept unless told otherwise
MAX_KEYS = 256  # of one object
_KEY = re.compile(KEY_PATTERN.replace("$", r"\Z"))
MAX_VALUES = 400_000  # of all rows
MAX_FACTS = 2_000
MAX_OBJECTS = 8 * MAX_ROWS + 1000


class BadFile(Exception):
    """A file that is no submission; the text says why."""


class _Objects:
    """Takes the place of `dict` in json.loads: refuses repeated keys, and more than a result can hold."""

    def __init__(self) -> None:
        self.count = 0
        self.keys: set[str] = set()

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self.count += 1
        if self.count > MAX_OBJECTS:
            raise BadFile(f"more than {MAX_OBJECTS} objects")
        if len(pairs) > MAX_KEYS:
            raise BadFile(f"an object of {len(pairs)} keys, at most {MAX_KEYS} are allowed")
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in found if names.count(name) > 1)
            raise BadFile(f"key {short(repr(twice))} appears twice")
        self.keys.update(found)
        return found

    def check_keys(self) -> None:
        for key in sorted(self.keys):
            if not _KEY.match(key):
                raise BadFile(f"key {short(repr(key))}: only letters, digits and _.+:/- are allowed")


def _check_size(data: Any) -> None:
    """Bounds on the number of values: a model that refuses each of a million takes seconds."""
    if not isinstance(data, dict):
        return
    for name, limit in (("machine", MAX_FACTS), ("volatile", MAX_FACTS), ("rows", MAX_VALUES)):
        if (count := _count(data.get(name))) > limit:
            raise BadFile(f"{name}: {count} values, at most {limit} are allowed")


def _count(value: Any) -> int:
    """Values in a nested value, itself included."""
    count, left = 0, [value]
    while left:
        item = left.pop()
        count += 1
        if isinstance(item, dict):
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
    return count


def _no_constant(text: str) -> Any:
    raise BadFile(f"bare {text}: write it as a string")


def short(text: str, limit: int = 300) -> str:
    """A stranger's text as one printable line: what cannot be printed becomes its escape."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


def read_submission(path: Path, strict: bool = True) -> tuple[Submission, str]:
    """Parse a result file; returns it with its text. Raises BadFile with the reason.

    Not `strict` is twice as fast, for a report over many files that were validated when they came: a
    key that appears twice then has its last value, and a bare NaN is one.
    """
    text = _read_text(path)
    if not strict:
        try:
            return Submission.model_validate_json(text), text
        except ValidationError as error:
            raise _not_a_submission(error) from error
    objects = _Objects()
    try:
        data = json.loads(text, object_pairs_hook=objects, parse_constant=_no_constant)
        objects.check_keys()
        _check_size(data)
    except json.JSONDecodeError as error:
        raise BadFile(f"not JSON: {error.msg} at line {error.lineno}") from error
    except (RecursionError, ValueError) as error:
        raise BadFile(f"not readable JSON: {type(error).__name__}: {str(error)[:120]}") from error
    try:
        return Submission.model_validate(data), text
    except ValidationError as error:
        raise _not_a_submission(error) from error


def _not_a_submission(error: ValidationError) -> BadFile:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return BadFile(short(f"not a submission: {where or 'top level'}: {first['msg']}"))


def _read_text(path: Path) -> str:
    """The text of a regular file of at most MAX_BYTES; links and devices are never opened."""
    try:
        if path.is_symlink() or path.parent.is_symlink() or not path.is_file():
            raise BadFile("not a regular file")
        # What was looked at may have been replaced since: the size is that of what is read.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as handle:
            content = handle.read(MAX_BYTES + 1)
            size = max(len(content), os.fstat(handle.fileno()).st_size)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadFile(f"cannot be read: {getattr(error, 'strerror', error)}") from error
    if size > MAX_BYTES:
        raise BadFile(f"{size} bytes, at most {MAX_BYTES} are allowed")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadFile(f"not UTF-8 text at byte {error.start}") from error


def write_text(path: Path, text: str) -> None:
    """Replace `path` atomically: the old or the new content is there at every moment."""
    write_bytes(path, [text.encode()])


def write_bytes(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Replace `path` atomically by the joined parts, and see them to the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as handle:
            for part in parts:
                handle.write(part)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def set_aside(path: Path, why: str) -> Path:
    """Rename a file to the first free `<name>.<why>-N`."""
    number = 1
    while (target := path.with_name(f"{path.name}.{why}-{number}")).exists():
        number += 1
    os.rename(path, target)
    return target


def retire(folder: Path) -> None:
    """Rename the work folder of a finished unit to `<name>.done`, in place of an earlier one.

    OSError where the earlier one cannot be removed, or nothing be renamed.
    """
    if not folder.exists():
        return
    done = folder.with_name(f"{folder.name}.done")
    shutil.rmtree(done, ignore_errors=True)
    os.rename(folder, done)


def prepare_directory(path: Path) -> None:
    """Make sure that results can be written under `path`, before anything is measured."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{path}: not a directory; give --results a directory") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot write results there: {error.strerror}") from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep a second run away from the same result file."""
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with open(lock, "w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UsageError(f"{path}: another run is writing this file; wait for it") from error
            # The run before may have removed the file between our open and our lock: then try again.
            if not lock.exists() or os.fstat(handle.fileno()).st_ino != lock.stat().st_ino:
                continue
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return
