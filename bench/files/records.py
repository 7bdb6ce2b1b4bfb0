"""What a result file holds: pydantic models, the row key and the canonical text form.

One file is one submission: everything that one machine measured with one config. Its text is
canonical (the same content is the same bytes): keys sorted, one top-level entry a line, one row a
line, one trailing newline. NaN and ±Inf are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    SerializerFunctionWrapHandler,
    StrictBool,
    StrictInt,
    WithJsonSchema,
    model_serializer,
)

SCHEMA_VERSION = 1
MAX_BYTES = 4 * 1024 * 1024
MAX_SERIES = 500  # points of one curve
MAX_ROWS = 2_500  # rows of about 1.3 KiB
MAX_TEXT = 500

# Every list, text and number is bounded, so that a hostile file is refused within a second, and no text
# holds a control, direction or zero-width character: what a reviewer sees is what is there.
_UNSEEN = (
    r"\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\x00-\x08\x0b\x0c\x0e-\x1f"
)
NON_FINITE = ("NaN", "Infinity", "-Infinity")
_NUMBER_SCHEMA = {"anyOf": [{"type": "number"}, {"enum": list(NON_FINITE)}]}
Number = Annotated[float, WithJsonSchema(_NUMBER_SCHEMA)]
Int = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
Text = Annotated[str, Field(max_length=MAX_TEXT, pattern=rf"^[^{_UNSEEN}\t\r\n]*$")]
KEY_PATTERN = r"^[A-Za-z0-9_.+:/-]{1,80}$"  # checked by `bench.files.store`, once for each distinct key
Key = Annotated[str, WithJsonSchema({"type": "string", "pattern": KEY_PATTERN})]
Scalar = StrictBool | Int | Number | Text | None
Scalars = Annotated[dict[Key, Scalar], Field(max_length=32)]
Texts = Annotated[list[Text], Field(max_length=64)]
Facts = Annotated[dict[Key, Scalar | Texts | Scalars], Field(max_length=32)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+:/-]{1,80}$")]
Slug = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,79}$")]
Status = Literal["ok", "unsupported", "error", "not_run"]
Provenance = Literal["measured", "predicted"]
DTypeName = Literal["bfloat16", "float16", "float32"]
Curve = Annotated[list[Number], Field(max_length=MAX_SERIES)]


class Record(BaseModel):
    """Base of every stored model: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class OfKernel(Record):
    """What belongs to one version of a kernel. Version 1 is not written: files older than versions keep
    their text, and their rows their keys."""

    kernel_version: Annotated[StrictInt, Field(ge=1, le=10_000)] = 1

    @model_serializer(mode="wrap")
    def _without_the_first(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_first_version(serialize(self))


def without_first_version(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as they are written: `kernel_version` only where it is not 1."""
    return {k: v for k, v in fields.items() if k != "kernel_version" or v != 1}


class Row(OfKernel):
    """The result of one unit. Its key is every field that a config can vary."""

    case: Name
    case_version: Annotated[StrictInt, Field(ge=1, le=10_000)]
    kernel: Name
    backend: Name
    dtype: DTypeName
    params: Scalars
    options: Scalars  # of the kernel: tile, beta, …
    seeds: Annotated[StrictInt, Field(ge=1, le=1024)]
    status: Status
    reason: Text = ""
    verdict: Annotated[Text, Field(max_length=80)] = ""
    metrics: Annotated[dict[Key, Number], Field(max_length=200)] = {}
    digests: Annotated[dict[Key, Sha256], Field(max_length=16)] = {}
    launch: Scalars = {}
    series: Annotated[dict[Key, Curve], Field(max_length=64)] = {}
    provenance: Provenance = "measured"
    wall_s: Number = 0.0

    @property
    def key(self) -> str:
        return row_key(self)

    @property
    def implementation(self) -> str:
        """`eager-fused` of `eager-fused/stabilized`."""
        return self.kernel.partition("/")[0]

    @property
    def fix(self) -> str:
        """`stabilized` of `eager-fused/stabilized`."""
        return self.kernel.partition("/")[2]

    @property
    def is_stock(self) -> bool:
        """Whether the kernel is an implementation without a fix."""
        return self.fix == "stock"


KEY_FIELDS = (
    "case",
    "case_version",
    "kernel",
    "kernel_version",
    "backend",
    "dtype",
    "params",
    "options",
    "seeds",
)


def row_key(item: Any) -> str:
    """Canonical JSON of the fields that identify a row; works on a Row and on a planned unit."""
    return dumps(without_first_version({name: getattr(item, name) for name in KEY_FIELDS}))


def unit_id(item: Any) -> str:
    """Twelve hex digits that name a row or unit: `runner.py run CONFIG --unit ID` runs it alone."""
    return hashlib.sha256(row_key(item).encode()).hexdigest()[:12]


class Suite(Record):
    """Which code measured: release, git commit, and a hash of the measuring source files."""

    version: Annotated[str, Field(pattern=r"^[0-9A-Za-z.+-]{1,40}$")]
    commit: Annotated[str, Field(pattern=r"^([0-9a-f]{40}|unknown)$")]
    dirty: StrictBool
    source_sha256: Sha256


class ConfigRecord(Record):
    """The config as text, so that a file explains itself."""

    name: Slug
    sha256: Sha256
    text: Annotated[str, Field(max_length=65536, pattern=rf"^[^{_UNSEEN}]*$")]


class Offered(OfKernel):
    """A kernel that the machine offered when the run was planned: lets anyone redo the plan."""

    backend: Name
    kernel: Name
    dtypes: Annotated[list[DTypeName], Field(max_length=3)]
    options: Scalars  # defaults


class Machine(Record):
    """Identity of the machine. Compared between machines; nothing personal."""

    slug: Slug
    cpu: Facts
    os: Facts
    versions: Annotated[dict[Key, Text | None], Field(max_length=64)]
    backends: Annotated[
        dict[Name, Facts], Field(max_length=4)
    ]  # accelerator, driver, determinism knobs … of each backend used


def slug_of(backends: dict[str, Any]) -> str:
    """Folder name of a machine: the accelerator's name, that of the CPU only where it is alone."""
    names = [name for name in sorted(backends) if name != "cpu"] or sorted(backends)
    accelerator = str(backends[names[0]].get("accelerator", "")) if names else ""
    return re.sub(r"[^a-z0-9]+", "-", accelerator.lower()).strip("-")[:80] or "unknown"


def sha256_text(text: str) -> str:
    """sha256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


class Submission(Record):
    """One result file."""

    schema_version: Literal[1]
    suite: Suite
    config: ConfigRecord
    machine: Machine
    offered: Annotated[list[Offered], FailFast(), Field(max_length=300)]
    volatile: Facts  # time, load, memory: never compared
    rows: Annotated[list[Row], FailFast(), Field(max_length=MAX_ROWS)]


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(", ", ": "), allow_nan=False)


def _plain(value: Any) -> Any:
    """JSON-ready copy: non-finite floats become strings, −0.0 and everything else stays."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def dumps(value: Any) -> str:
    """One line of canonical JSON."""
    try:
        return _ENCODER.encode(value)
    except ValueError:  # NaN or ±Inf somewhere: rare, and the copy takes longer than the text
        return _ENCODER.encode(_plain(value))


def row_text(row: Row) -> str:
    """A row's line in the file."""
    return dumps(row.model_dump())


def submission_text(submission: Submission, row_lines: list[str] | None = None) -> str:
    """The canonical text of a submission; `row_lines` may bring rows already turned into text."""
    head = submission.model_dump(exclude={"rows"})
    lines = [row_text(row) for row in submission.rows] if row_lines is None else row_lines
    entries = {name: dumps(value) for name, value in head.items()}
    entries["rows"] = "[\n" + ",\n".join(lines) + "\n]" if lines else "[]"
    body = ",\n".join(f'"{name}": {entries[name]}' for name in sorted(entries))
    return "{\n" + body + "\n}\n"
