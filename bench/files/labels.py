"""Names of rows beside each other: the kernel and the parameter point, and of them only what varies."""

from __future__ import annotations

from collections.abc import Sequence

from bench.files.records import Row


def point(row: Row) -> dict[str, object]:
    """Everything but the kernel that tells two rows apart."""
    return {**row.params, "dtype": row.dtype, "seeds": row.seeds, "version": row.case_version}


def varying(rows: Sequence[Row]) -> list[str]:
    """Names of the parameters that take more than one value in `rows`, in order of appearance."""
    values: dict[str, set[str]] = {}
    for row in rows:
        for name, value in point(row).items():
            values.setdefault(name, set()).add(repr(value))
    return [name for name, seen in values.items() if len(seen) > 1]


def point_label(row: Row, names: Sequence[str]) -> str:
    """`repeats=2 gap=12 float16`: the values of the varying parameters."""
    own = point(row)
    parts = [
        str(own[name]) if name == "dtype" else f"{name}={_short(own[name])}" for name in names if name in own
    ]
    return " ".join(parts)


def kernel_labels(rows: Sequence[Row]) -> list[str]:
    """For each row the kernel, its backend if there are several, and those of its options that vary."""
    own: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        own.setdefault((row.kernel, row.backend), []).append(row)
    options = {kernel: _varying_options(members) for kernel, members in own.items()}
    return [
        _label(name, row, options[row.kernel, row.backend])
        for name, row in zip(kernel_names(rows), rows, strict=True)
    ]


def kernel_label(row: Row, rows: Sequence[Row]) -> str:
    """The label of one row of `rows`; for the labels of all, `kernel_labels`."""
    own = [r for r in rows if r.kernel == row.kernel and r.backend == row.backend]
    return _label(_name(row, _several(rows)), row, _varying_options(own))


def _label(name: str, row: Row, shown: set[str]) -> str:
    options = [f"{key}={_short(value)}" for key, value in row.options.items() if key in shown]
    return " ".join([name, *options])


def _varying_options(rows: Sequence[Row]) -> set[str]:
    """Options that take more than one value in `rows`; one left out counts as None."""
    names = {name for row in rows for name in row.options}
    return {name for name in names if len({repr(row.options.get(name)) for row in rows}) > 1}


def kernel_names(rows: Sequence[Row]) -> list[str]:
    """`eager-fused/stock`, or `eager-fused/stock @cuda` where `rows` come from several backends."""
    several = _several(rows)
    return [_name(row, several) for row in rows]


def _several(rows: Sequence[Row]) -> bool:
    return len({row.backend for row in rows}) > 1


def _name(row: Row, several: bool) -> str:
    return f"{row.kernel} @{row.backend}" if several else row.kernel


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
