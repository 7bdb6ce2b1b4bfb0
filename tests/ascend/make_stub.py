"""Make the libraries of CANN that torch_npu links against, out of nothing but their names.

    python tests/ascend/make_stub.py DIRECTORY

Needs gcc, nm and readelf, and torch and torch_npu installed (they are not imported). `cann_stub.c` holds
the functions that do something; every other function that torch_npu asks for and nobody offers returns 0.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("cann_stub.c")
MAIN = "libascendcl.so"  # holds every function; the others are links to it
LOOKED_UP = (
    "aclrtSetDeviceSatMode",
    "aclSetCompileopt",
    "aclrtSetSysParamOpt",
    "aclrtCtxSetSysParamOpt",
    "aclrtSetOpExecuteTimeOut",
    "aclrtDestroyStreamForce",
    "aclrtSynchronizeDeviceWithTimeout",
    "aclrtSynchronizeStreamWithTimeout",
)


def package(name: str) -> Path:
    """Folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"{name} is not installed")
    return Path(spec.origin).parent


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def symbols(library: Path, which: str) -> set[str]:
    """Dynamic symbols, `--defined-only` or `--undefined-only`, without those of a named version."""
    names = (line.split()[-1] for line in output("nm", "-D", which, library).splitlines())
    return {name for name in names if "@" not in name}


def needed(library: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-d", library)))


def main(directory: Path) -> None:
    npu, torch = package("torch_npu"), package("torch")
    own = [*npu.glob("_C*.so"), *(npu / "lib").glob("libt*.so"), npu / "lib" / "libnpu_profiler.so"]
    system = re.compile(r"lib(c10|torch\w*|stdc\+\+|m|gcc_s|pthread|c|dl|rt|tensorpipe|npu_profiler)\.so|ld-")
    missing = {name for library in own for name in needed(library) if not system.match(name)}
    offered = [*own, *(torch / "lib").glob("lib*.so*")]
    wanted = set().union(*(symbols(library, "--undefined-only") for library in own))
    wanted -= set().union(*(symbols(library, "--defined-only") for library in offered))
    prefixes = ("acl", "rt", "Hccl", "hccl", "Msprof", "ge", "tdt")
    wanted = {name for name in wanted if name.startswith(prefixes)}
    written = set(re.findall(r"^[\w *]*?\b(\w+)\(", SOURCE.read_text(), re.MULTILINE))
    wanted |= set(LOOKED_UP)
    generated = "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(wanted - written))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "stub.c").write_text(SOURCE.read_text() + generated)
    output("gcc", "-shared", "-fPIC", "-w", "-o", directory / MAIN, directory / "stub.c")
    for library in missing - {MAIN}:  # torch_npu looks functions up in the library that has them
        (directory / library).unlink(missing_ok=True)
        (directory / library).symlink_to(MAIN)
    print(f"{len(wanted)} functions, {len(written & wanted)} written, in {len(missing)} libraries")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
