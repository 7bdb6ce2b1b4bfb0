"""Configs: YAML in, checked model out. Whatever is wrong is one line that says where and what is allowed."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.errors import UsageError, explain, nearest
from bench.files.records import Slug
from bench.files.source import ROOT

MAX_BRACKETS = 20  # open at once: PyYAML takes quadratic time over deeper ones
MAX_CONFIG_BYTES = 16 * 1024  # a config may come from a stranger's result file: 0.2 s to parse


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Seeds = Annotated[int, Field(ge=1, le=1024)]
Globs = Annotated[list[Annotated[str, Field(max_length=80)]], Field(min_length=1, max_length=32)]


class CaseEntry(_Strict):
    """One case with its parameters; every list is one factor of a product."""

    case: Annotated[str, Field(max_length=80)]
    params: dict[str, Any] = {}
    options: dict[str, Any] = {}  # of the kernels: tile, beta, …
    kernels: Globs | None = None  # narrows the config's list
    seeds: Seeds | None = None


class Config(_Strict):
    """A config file."""

    version: Literal[1]
    name: Slug
    backends: Globs = ["auto"]
    kernels: Globs = ["*"]  # globs; `!glob` takes away
    seeds: Seeds = 16
    cases: Annotated[list[CaseEntry], Field(min_length=1, max_length=64)]


class _Loader(yaml.SafeLoader):
    """safe_load without aliases (a few lines can expand to gigabytes) and without repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise UsageError(f"line {mark.line + 1}: YAML aliases (*name) are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise UsageError(f"line {key_node.start_mark.line + 1}: key {key!r} must be text")
            if key in seen:
                raise UsageError(f"line {key_node.start_mark.line + 1}: key '{key}' appears twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-3 as text; people mean the number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def own_configs() -> list[Path]:
    """The configs that come with the suite, wherever it was started from."""
    return sorted((ROOT / "configs").glob("*.yaml"))


def find_config(path: Path) -> Path:
    """`path` as given, or in the suite's folder where only that has it: `configs/bias.yaml` from anywhere."""
    own = ROOT / path
    return own if not path.exists() and own.is_file() else path


def read_config(path: Path) -> tuple[Config, str]:
    """Read and check a config; returns it with its text. Raises UsageError: `file: key: problem`."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise UsageError(f"{path}: not a file; name one config, for example configs/quick.yaml")
        if size > MAX_CONFIG_BYTES:
            raise UsageError(f"{path}: {size} bytes; a config has at most {MAX_CONFIG_BYTES}")
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        known = sorted(p.relative_to(ROOT).as_posix() for p in own_configs())
        raise UsageError(f"{path}: no such file{nearest(str(path), known)}") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text at byte {error.start}") from error
    return parse_config(text, str(path)), text


def parse_config(text: str, where: str) -> Config:
    """Check a config's text; `where` opens every message."""
    if len(text.encode()) > MAX_CONFIG_BYTES:
        raise UsageError(f"{where}: a config has at most {MAX_CONFIG_BYTES} bytes")
    if _brackets(text) > MAX_BRACKETS:
        raise UsageError(f"{where}: nested too deeply to be a config")
    try:
        data = yaml.load(text, Loader=_Loader)  # noqa: S506  (a SafeLoader, stricter still)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{where}: nested too deeply to be a config") from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        at = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"{where}: {at}not valid YAML: {problem}") from error
    if data is None:
        raise UsageError(f"{where}: empty; a config needs version, name and cases")
    if not isinstance(data, dict):
        raise UsageError(f"{where}: a {type(data).__name__}, expected a mapping (version, name, …)")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{where}: {explain(error, Config, CaseEntry)}") from error


def _brackets(text: str) -> int:
    """How many [ and { are open at once, at most; those in comments and quotes count too."""
    steps = (1 if c in "[{" else -1 if c in "]}" else 0 for c in text)
    return max(itertools.accumulate(steps), default=0)
