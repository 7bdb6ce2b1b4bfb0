"""Whatever is wrong with a config is one line: file, place, problem, what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.errors import UsageError
from bench.run.config import MAX_CONFIG_BYTES, parse_config, read_config

GOOD = "version: 1\nname: x\ncases:\n  - case: bias/tie_break\n"


def test_good_config_has_defaults() -> None:
    config = parse_config(GOOD, "x.yaml")
    assert (config.backends, config.kernels, config.seeds) == (["auto"], ["*"], 16)


def test_scientific_notation_is_a_number() -> None:
    config = parse_config(GOOD + "    params: {floor: 1e-3}\n", "x.yaml")
    assert config.cases[0].params == {"floor": 1e-3}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        ("# nothing\n", "empty"),
        ("- a\n- b\n", "a list, expected a mapping"),
        ("just text", "a str, expected a mapping"),
        ("a: b: c", "line 1: not valid YAML"),
        (GOOD + "kernel: ['*']\n", "kernel: unknown key; did you mean 'kernels'?"),
        (GOOD + "    parms: {}\n", "cases[0].parms: unknown key; did you mean 'params'?"),
        (GOOD + "seeds: many\n", "seeds: input should be a valid integer, got 'many'"),
        (GOOD + "seeds: '16'\n", "seeds: input should be a valid integer, got '16'"),
        (GOOD + "seeds: true\n", "seeds: input should be a valid integer"),
        (GOOD + "seeds: 0\n", "seeds: input should be greater than or equal to 1"),
        (GOOD + "kernels: []\n", "kernels: list should have at least 1 item"),
        (GOOD.replace("version: 1", "version: 9"), "version: input should be 1, got 9"),
        (GOOD.replace("name: x", "name: ../../etc/passwd"), "name: string should match"),
        ("version: 1\nname: x\ncases: []\n", "cases: list should have at least 1 item"),
        ("version: 1\nname: x\n", "cases: field required"),
        (GOOD + "name: y\n", "line 5: key 'name' appears twice"),
        ("a: &a [1]\nb: [*a, *a]\n", "line 2: YAML aliases"),
        ("? [1, 2]\n: x\n", "line 1: key"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("[" * 16_000, "nested too deeply"),
        ("x: \x00", "not valid YAML"),
    ],
)
def test_bad_config_is_one_clear_line(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_config(text, "x.yaml")
    message = str(caught.value)
    assert message.startswith("x.yaml: ")
    assert expected in message
    assert "\n" not in message


def test_an_alias_bomb_is_refused_before_it_expands() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    with pytest.raises(UsageError, match="aliases"):
        parse_config("\n".join(lines), "bomb.yaml")


def test_files_that_are_no_configs(tmp_path: Path) -> None:
    big, binary = tmp_path / "big.yaml", tmp_path / "binary.yaml"
    big.write_bytes(b"a" * (MAX_CONFIG_BYTES + 1))
    binary.write_bytes(b"\xff\xfe\x00")
    for path, expected in [
        (big, "at most"),
        (binary, "not UTF-8"),
        (tmp_path / "none.yaml", "no such file"),
        (tmp_path, "not a file"),
    ]:
        with pytest.raises(UsageError, match=expected):
            read_config(path)


def test_a_hundred_megabytes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as handle:
        handle.truncate(100 * 1024 * 1024)
    with pytest.raises(UsageError, match="104857600 bytes"):
        read_config(path)


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=str)
def test_shipped_configs_say_what_they_do(path: Path) -> None:
    config, text = read_config(path)
    head = text.split("version:")[0]
    assert config.name == path.stem
    assert f"python runner.py run {path.as_posix()}" in head
    assert "minute" in head.lower() or "hours" in head.lower(), "the first lines say how long it takes"
