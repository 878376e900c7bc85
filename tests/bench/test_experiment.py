"""An Experiment is a value: checked, written into every record, read back from it, and run without a command line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import Execution, Experiment, load_checkpoint, read_experiment, run, scores
from bench.cli import lds_main as main
from bench.methods import build_variants, parse_method_spec
from bench.records import load_results
from retrain import plugins, source
from retrain.errors import UsageError
from retrain.tasks import load_task

PLANTED = "tests.helpers.planted:Planted"


def small(**changes: object) -> Experiment:
    asked = {"task": PLANTED, "alpha": 0.5, "subsets": 12, "replicates": 1, "methods": ["gradsim", "random"]}
    return Experiment(**{**asked, **changes})  # type: ignore[arg-type]


def test_a_run_gives_a_frame_and_a_table_and_other_results_have_other_ids(execution: Execution) -> None:
    result = run(small(), execution)
    frame = result.frame()
    assert set(frame["method"]) == {"gradsim", "random"}
    assert frame[frame["method"] == "gradsim"]["lds"].min() > 0.3
    assert "gradsim" in str(result)
    assert len(result.pairs()) == 2
    assert frame["run_id"].unique().tolist() == [result.run_id]
    others = {run(small(**changes), execution).run_id for changes in ({"subsets": 13}, {"methods": ["gradsim"]})}
    assert len(others | {result.run_id}) == 3


def test_a_record_is_the_same_run_again(execution: Execution, tmp_path: Path) -> None:
    first = run(small(methods=["stiff=ekfac@damping=1", "ekfac@damping=1e-4"]), execution)
    raw = first.frame()[lambda frame: ~frame["normalised"]].set_index("label")
    assert list(raw.index) == ["stiff", "ekfac@damping=0.0001"]
    assert raw.loc["ekfac@damping=0.0001", "settings"] == "damping=0.0001"
    (pair,) = [pair for pair in first.out.pairs if not pair["normalised"]]
    assert (pair["label"], pair["against"]) == ("stiff", "ekfac@damping=0.0001")
    assert pair["difference"] == pytest.approx(raw["lds"].iloc[0] - raw["lds"].iloc[1], abs=1e-9)
    path = first.save(tmp_path / "runs", "python -m bench.lds ...")
    again = run(read_experiment(path), execution)
    assert again.run_id == first.run_id
    before = path.read_text()
    again.save(tmp_path / "runs", "another command")
    assert path.read_text() == before, "a cached rerun does not overwrite the first one's command and seconds"
    record = json.loads(before)
    assert record["commit"] is None or isinstance(record["commit"], str)
    assert (len(record["code"]), record["task_version"]) == (16, "Planted-scratch/1")
    assert "task Planted-scratch/1:" in str(again)
    assert "task Planted-scratch/1:" in str(load_results(tmp_path / "runs"))


def test_a_toml_file_is_an_experiment_and_a_bad_one_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(
        'task = "digits"\nalpha = [0.1, 0.5]\nseeds = [1, 2]\nmethods = ["ekfac", "stiff=ekfac@damping=1"]\n'
        "[task_options]\nepochs = 2\n[options.ekfac]\nself_influence = false\n"
    )
    assert read_experiment(path) == Experiment(
        task="digits", alpha=(0.1, 0.5), seeds=(1, 2), methods=("ekfac", "stiff=ekfac@damping=1"),
        task_options={"epochs": 2}, options={"ekfac": {"self_influence": False}},
    )  # fmt: skip
    path.write_text(f"alpha = 0.1{'0' * 400}")
    assert read_experiment(path).alpha == (0.1,), "absurd numbers are numbers"
    for text, words in (
        ("alhpa = 0.1", '"alhpa"'),
        ("alpha = 1.5", "alpha[0] is 1.5; expected"),
        ("subsets = 2", "subsets is 2; expected"),
        (f"seeds = [{'9' * 400}]", "seeds[0] is a number of more than 20 digits"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError) as error:
            read_experiment(path)
        assert words in str(error.value)
        assert "\n" not in str(error.value)


def test_scores_and_checkpoints_come_as_arrays_and_models(execution: Execution) -> None:
    for normalised in (False, True):
        assert scores("gradsim", PLANTED, execution=execution, normalised=normalised).shape == (25, 200)
    assert next(load_checkpoint(PLANTED, execution=execution).parameters()).shape == (1, 4)


def test_fresh_initialisations_are_another_ground_truth(execution: Execution) -> None:
    digits = {"task": "digits", "task_options": {"epochs": 1, "num_train": 100}, "methods": "random", "subsets": 4}
    shared = run(small(**digits), execution)
    fresh = run(small(**digits, initialisation="fresh", replicates=2), execution)
    assert fresh.out.ceilings[0]["initialisation"] == "fresh"
    assert "fresh initialisations" in str(fresh)
    assert shared.out.ceilings[0]["mean_loss"] != fresh.out.ceilings[0]["mean_loss"]


METHOD = """
from dataclasses import dataclass
import torch
from baselines.method import Attribution, Method

@dataclass(frozen=True, kw_only=True)
class Mine(Method):
    def score(self, problem, state):
        noise = torch.randn(len(problem.queries), len(problem.attributed), generator=torch.Generator().manual_seed(0))
        return Attribution(scores={sign}noise)
"""

SMALL = "--task digits --alpha 0.5 --set digits.num_train=60 --set digits.epochs=1 --subsets 5 --replicates 1"


def write(sign: str) -> None:
    """The file, and a process that has not imported it."""
    Path("mine.py").write_text(METHOD.format(sign=sign))
    for name in [name for name, path in plugins._files.items() if path.name == "mine.py"]:
        del plugins._files[name], sys.modules[name]
    source._first_fingerprint.cache_clear()  # the next module may have the last one's id


def measure(*words: str) -> int:
    return main([*words, "--cache", "cache", "--cluster", "inline"])


def test_an_edit_is_said_of_a_record_run_again_and_undone_in_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for second, sign in enumerate(("", "-", "")):
        time = f"2026-01-01T00:00:0{second}Z"
        monkeypatch.setattr("bench.records.timestamp", lambda time=time: time)
        write(sign)
        if not second:
            assert measure(*SMALL.split(), "--queries", "9", "--methods", "mine.py") == 0
            (record,) = Path("runs").glob("*/run.json")
            capsys.readouterr()
        assert measure("--experiment", str(record)) == 0
        assert ("its code was edited since that record" in capsys.readouterr().err) == (sign == "-")
        rows = load_results("runs").rows.query("label == 'mine' and normalised == False")
        found.append(rows["lds"].item())
    assert found[0] == -found[1] == found[2] != 0


# ---- variants: the same method with other settings is another row, never the same one ----


def test_spelling() -> None:
    for text, name, options, label in (
        ("ekfac", "ekfac", {}, ""),
        ("ekfac@damping=1e-4", "ekfac", {"damping": "1e-4"}, ""),
        ("stiff=ekfac@damping=1,strategy=kfac", "ekfac", {"damping": "1", "strategy": "kfac"}, "stiff"),
        ("mine=pkg.mod:Cls@a=b=c", "pkg.mod:Cls", {"a": "b=c"}, "mine"),
        ("dir/mine.py:Cls", "dir/mine.py:Cls", {}, ""),
    ):
        found = parse_method_spec(text)
        assert (found.name, dict(found.options), found.label) == (name, options, label)
    for text in ("@damping=1", "ekfac@", "ekfac@damping", "a\nb=ekfac", "=", "<b>=ekfac", "=ekfac", "ekfac@a=1,a=2"):
        with pytest.raises(UsageError):
            parse_method_spec(text)


def variants(*texts: str, **options: Any) -> list[Any]:
    return build_variants(texts, load_task(PLANTED), options, "default")


def test_labels_and_settings_say_what_differs_and_a_variant_has_the_last_word() -> None:
    found = variants("ekfac", "ekfac@damping=1e-4", "stiff=ekfac@damping=1")
    labelled = {"ekfac": "", "ekfac@damping=0.0001": "damping=0.0001", "stiff": "damping=1"}
    assert {one.label: one.settings for one in found} == labelled
    assert len(variants("ekfac@damping=1", "ekfac@damping=1.0")) == 1
    assert variants("ekfac=ekfac@damping=1")[0].label == "ekfac"
    with pytest.raises(UsageError, match='two variants are called "same"'):
        variants("same=ekfac@damping=1", "same=ekfac@damping=2")
    with pytest.raises(UsageError, match='"kfac=ekfac": kfac is another method'):
        variants("kfac=ekfac")
    first, second = variants("ekfac", "ekfac@damping=3", ekfac={"damping": "2", "self_influence": "false"})
    assert (first.method.damping, second.method.damping) == (2.0, 3.0)
    assert not second.method.self_influence
    with pytest.raises(UsageError, match="neither the task"):
        variants("ekfac", trak={"ridge": "1"})


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
