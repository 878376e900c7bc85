"""Variants: the same method with other settings is another row, never the same one."""

from pathlib import Path
from typing import Any

import pytest

from bench import Execution, Experiment, run
from bench.methods import build_variants, parse_method_spec
from retrain.errors import UsageError
from retrain.tasks import load_task

PLANTED = "tests.helpers.planted:Planted"


@pytest.mark.parametrize(
    ("text", "name", "options", "label"),
    [
        ("ekfac", "ekfac", {}, ""),
        ("ekfac@damping=1e-4", "ekfac", {"damping": "1e-4"}, ""),
        ("stiff=ekfac@damping=1,strategy=kfac", "ekfac", {"damping": "1", "strategy": "kfac"}, "stiff"),
        ("mine=pkg.mod:Cls@a=b=c", "pkg.mod:Cls", {"a": "b=c"}, "mine"),
        ("dir/mine.py:Cls", "dir/mine.py:Cls", {}, ""),
    ],
)
def test_spelling(text: str, name: str, options: dict[str, str], label: str) -> None:
    found = parse_method_spec(text)
    assert (found.name, dict(found.options), found.label) == (name, options, label)


@pytest.mark.parametrize(
    "text",
    ["@damping=1", "ekfac@", "ekfac@damping", "a\nb=ekfac", "=", "<b>=ekfac", "=ekfac", "ekfac@damping=1,damping=2"],
)
def test_bad_spelling_is_one_line(text: str) -> None:
    with pytest.raises(UsageError):
        parse_method_spec(text)


def variants(*texts: str, **options: Any) -> list[Any]:
    return build_variants(texts, load_task(PLANTED), options, "default")


def test_labels_and_settings_say_what_differs() -> None:
    plain, soft, named = variants("ekfac", "ekfac@damping=1e-4", "stiff=ekfac@damping=1")
    assert [one.label for one in (plain, soft, named)] == ["ekfac", "ekfac@damping=0.0001", "stiff"]
    assert soft.settings == "damping=0.0001"
    assert named.settings == "damping=1"


def test_two_settings_under_one_label_are_refused() -> None:
    with pytest.raises(UsageError, match='two variants are called "same"'):
        variants("same=ekfac@damping=1", "same=ekfac@damping=2")
    assert len(variants("ekfac@damping=1", "ekfac@damping=1.0")) == 1


def test_an_absolute_number_takes_the_place_of_a_tuned_relative_one() -> None:
    """digits' tuned dampings differ for raw and normalised scores; spelled out, there is one variant without either."""
    task = load_task("digits")
    assert len(build_variants(["ekfac"], task, {}, "tuned")) == 2
    (library,) = build_variants(["library=ekfac@damping=1e-8"], task, {}, "tuned")
    assert library.settings == "damping=1e-08"
    assert library.rows == "both"
    (given,) = build_variants(["ekfac@damping=1e-8"], task, {"ekfac": {"relative_damping": "3"}}, "tuned")
    assert given.settings == "damping=1e-08", "the last word counts"
    (relative,) = build_variants(["ekfac"], task, {"ekfac": {"damping": None, "relative_damping": 3.0}}, "tuned")
    assert relative.settings == "relative_damping=3"
    with pytest.raises(UsageError, match="relative_damping does nothing beside damping"):
        build_variants(["ekfac@damping=1e-8,relative_damping=3"], task, {}, "tuned")


def test_a_label_is_no_other_methods_name() -> None:
    with pytest.raises(UsageError, match='"kfac=ekfac": kfac is another method'):
        variants("kfac=ekfac")
    assert variants("ekfac=ekfac@damping=1")[0].label == "ekfac"


def test_set_reaches_every_variant_and_the_variant_has_the_last_word() -> None:
    first, second = variants("ekfac", "ekfac@damping=3", ekfac={"damping": "2", "self_influence": "false"})
    assert (first.method.damping, second.method.damping) == (2.0, 3.0)
    assert not second.method.self_influence
    with pytest.raises(UsageError, match="neither the task"):
        variants("ekfac", trak={"ridge": "1"})


def test_two_dampings_in_one_run_with_their_paired_difference(tmp_path: Path) -> None:
    experiment = Experiment(
        task=PLANTED, alpha=0.5, subsets=12, replicates=1, methods=("ekfac", "ekfac@damping=100"), settings="default"
    )
    result = run(experiment, Execution(device="cpu", cache=str(tmp_path), progress=False))
    raw = result.frame()[lambda frame: ~frame["normalised"]].set_index("label")
    assert list(raw.index) == ["ekfac", "ekfac@damping=100"]
    assert raw.loc["ekfac@damping=100", "settings"] == "damping=100"
    (pair,) = [pair for pair in result.out.pairs if not pair["normalised"]]
    assert (pair["label"], pair["against"]) == ("ekfac", "ekfac@damping=100")
    assert pair["difference"] == pytest.approx(raw["lds"].iloc[0] - raw["lds"].iloc[1], abs=1e-9)
