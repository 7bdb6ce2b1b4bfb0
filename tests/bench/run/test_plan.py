"""Lists multiply, options go only to the kernels that have them, names are checked."""

from __future__ import annotations

import pytest

from bench.errors import UsageError
from bench.files.records import Offered
from bench.run.config import parse_config
from bench.run.plan import Unit, filter_units, make_plan

OFFERED = [
    Offered(backend="cpu", kernel="eager/stock", dtypes=["bfloat16", "float32"], options={"tile": 128}),
    Offered(backend="cpu", kernel="eager/stabilized", dtypes=["bfloat16"], options={"tile": 128, "beta": 2.0}),
    Offered(backend="cpu", kernel="closed/stock", dtypes=["bfloat16"], options={}),
]  # fmt: skip


def plan(cases: str, head: str = "") -> list[Unit]:
    text = f"version: 1\nname: x\n{head}cases:\n{cases}"
    return make_plan(parse_config(text, "x"), OFFERED)


def test_lists_multiply_and_defaults_are_filled_in() -> None:
    units = plan("  - case: bias/tie_break\n    params: {repeats: [1, 2, 3], gap: [6, 12]}\n")
    assert len(units) == 3 * 2 * len(OFFERED)
    assert units[0].params["value_sign"] == "mixed"
    assert units[0].params["gap"] == 6.0
    assert [u.kernel for u in units[:3]] == [o.kernel for o in OFFERED], "kernels share the inputs"


def test_options_reach_only_kernels_that_have_them() -> None:
    units = plan("  - case: bias/tie_break\n    options: {beta: [2, 7], tile: 64}\n")
    assert [(u.kernel, u.options) for u in units] == [
        ("eager/stock", {"tile": 64}),
        ("eager/stabilized", {"tile": 64, "beta": 2}),
        ("eager/stabilized", {"tile": 64, "beta": 7}),
        ("closed/stock", {}),
    ]


def test_a_pattern_after_an_exclamation_mark_takes_kernels_away() -> None:
    units = plan("  - case: bias/leak\n", "kernels: ['*', '!eager/*']\n")
    assert [u.kernel for u in units] == ["closed/stock"]
    units = plan("  - case: bias/leak\n    kernels: ['!*/stock', 'eager/*']\n")
    assert [u.kernel for u in units] == ["eager/stabilized"], "order does not matter"


def test_equal_units_of_two_entries_run_once() -> None:
    entry = "  - case: bias/tie_break\n"
    assert len(plan(entry + entry)) == len(OFFERED)


def test_seeds_and_dtype_are_part_of_the_key() -> None:
    units = plan("  - case: bias/leak\n    seeds: 3\n    params: {dtype: [bfloat16, float32]}\n")
    assert {u.seeds for u in units} == {3}
    assert len({u.key for u in units}) == len(units) == 2 * len(OFFERED)


@pytest.mark.parametrize(
    ("cases", "head", "expected"),
    [
        ("  - case: bias/tie_brake\n", "", "cases[0].case: unknown case 'bias/tie_brake'; did you mean 'bias/tie_break'?"),
        ("  - case: bias/leak\n    params: {repeat: 1}\n", "", "cases[0].params: repeat: unknown key; did you mean 'repeats'?"),
        ("  - case: bias/leak\n    params: {repeats: [1, two]}\n", "", "repeats: input should be a valid integer, got 'two'"),
        ("  - case: bias/leak\n    params: {repeats: []}\n", "", "cases[0].params.repeats: an empty list"),
        ("  - case: bias/leak\n    params: {repeats: [[1]]}\n", "", "a list, expected plain values"),
        ("  - case: bias/leak\n    params: {dtype: bf16}\n", "", "params.dtype: 'bf16'; did you mean 'bfloat16'?"),
        ("  - case: bias/leak\n    options: {betta: 2}\n", "", "options.betta: no selected kernel has this option; did you mean 'beta'?"),
        ("  - case: bias/leak\n", "kernels: [eager/stok]\n", "unknown kernel 'eager/stok'; did you mean 'eager/stock'?"),
        ("  - case: bias/leak\n", "kernels: ['tritn/*']\n", "kernels: unknown kernel 'tritn/*'"),
        ("  - case: bias/leak\n", "kernels: ['*', '!tritn/*']\n", "kernels: unknown kernel 'tritn/*'"),
        ("  - case: bias/leak\n", "kernels: ['!eager/*']\n", "none of ['!eager/*'] is available"),
        ("  - case: bias/leak\n", "kernels: ['triton/*']\n", "kernels: none of ['triton/*'] is available on this machine"),
        ("  - case: bias/leak\n    kernels: ['closed/stok']\n", "", "cases[0].kernels: unknown kernel"),
        ("  - case: determinism/run_to_run\n    params: {heads: 3, kv_heads: 2}\n", "", "heads: 3 is not a multiple"),
        ("  - case: bias/leak\n    params: {gap: [" + ",".join(map(str, range(2_000))) + "]}\n", "", "6000 units up to here; a config has at most 2500"),
        (("  - case: bias/leak\n    params: {gap: [" + ",".join(map(str, range(41))) + "]}\n") * 25, "", "2583 units up to here"),
        ("  - case: bias/leak\n    seeds: 1024\n", "", "1073741824 input values a unit, at most"),
        ("  - case: determinism/run_to_run\n    params: {batch: 64, heads: 64, kv_heads: 64, tokens: 8192, head_dim: 256}\n", "", "input values a unit, at most"),
        ("  - case: bias/leak\n    kernels: ['closed/stock']\n", "kernels: [nope]\n", "kernels: unknown kernel 'nope'"),
    ],
)  # fmt: skip
def test_wrong_plans_say_where_and_what_is_allowed(cases: str, head: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(cases, head)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_entry_for_kernels_of_other_machines_is_passed_over() -> None:
    units = plan(
        "  - case: bias/leak\n  - case: bias/leak\n    kernels: ['triton/*']\n    options: {block_n: 64}\n"
    )
    assert len(units) == len(OFFERED)


def test_a_value_given_twice_counts_once() -> None:
    assert len(plan("  - case: bias/leak\n    params: {repeats: [1, 1, 1]}\n")) == len(OFFERED)


def test_filters_are_globs_and_say_which_one_leaves_nothing() -> None:
    units = plan("  - case: bias/tie_break\n  - case: bias/leak\n")
    assert {u.case for u in filter_units(units, None, None, "bias/l*")} == {"bias/leak"}
    assert len(filter_units(units, "cpu", "*/stock", None)) == 4
    with pytest.raises(UsageError, match="--kernel 'eager/stok' matches no unit; did you mean 'eager/stock'"):
        filter_units(units, None, "eager/stok", None)


def test_only_selects_by_parameter_or_option() -> None:
    units = plan(
        "  - case: bias/tie_break\n    params: {gap: [6, 12]}\n    options: {beta: [2, 7]}\n"
        "  - case: bias/tile_size\n"
    )

    def left(*only: str) -> list[Unit]:
        return filter_units(units, None, None, None, only)

    assert {u.params["gap"] for u in left("gap=6")} == {6.0}
    assert {u.params["value_sign"] for u in left("value_sign=mixed")} == {"mixed"}
    assert {(u.kernel, u.options["beta"]) for u in left("beta=7")} == {("eager/stabilized", 7)}
    assert len(left("gap=6.0", "beta=2,7")) == 2  # and 2.0 of the other case has no gap
    for wrong, message in (
        ("gap", "--only 'gap': expected key=value, as in seed=0"),
        ("gab=6.0", "--only gab: no unit has it; did you mean 'gap'?"),
        ("beta=3", "--only beta=3: no unit; the values are 2, 2.0, 7"),
    ):
        with pytest.raises(UsageError) as raised:
            left(wrong)
        assert str(raised.value) == message
