from collections.abc import Sequence
from pathlib import Path


def write_page(paths: Sequence[Path], output: Path, links: str | None) -> list[str]:
    return []
