"""python -m retrain: the ground truth alone, and what it says to bad input."""

import pytest

from retrain import __main__ as command
from retrain.jobs.unit import JobBatch
from retrain.store import Store

SMALL = ["--task", "digits", "--alpha", "0.05", "--subsets", "2", "--replicates", "1", "--device", "cpu"]
QUICK = ["--set", "digits.epochs=1", "--set", "digits.num_train=300"]


def test_ground_truth_is_made_once_and_found_again(tmp_path, capsys):
    cache = ["--cache", str(tmp_path / "cache")]
    assert command.main([*SMALL, *QUICK, *cache, "--dry-run"]) == 0
    assert "0 of 3 units are cached, 3 to do" in capsys.readouterr().out
    assert command.main([*SMALL, *QUICK, *cache]) == 0
    assert "3 of 3 units" in capsys.readouterr().out
    store = Store(tmp_path / "cache")
    assert sorted(info.kind for info in store.entries()) == ["model", "retrain", "retrain"]
    assert JobBatch.all(store)[0].describe()["name"] == "digits ground truth"
    assert command.main([*SMALL, *QUICK, *cache]) == 0
    assert "0 computed now" in capsys.readouterr().out
    # Collecting more than there is starts nothing.
    assert command.main([*SMALL[:5], "3", *SMALL[6:], *QUICK, *cache, "--collect"]) == 1
    assert "1 pending" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--alpha", "0"], "out of range"),
        (["--alpha", "1.5"], "out of range"),
        (["--alpha", "x"], "is no number"),
        (["--alpha", "0.9999"], "keeps all of them: subsets would not differ"),
        (["--alpha", "0.0001"], "keeps none of them: subsets would not differ"),
        (["--subsets", "0"], "too few"),
        (["--replicates", "-1"], "too few"),
        (["--seeds", "-1"], "is negative"),
        (["--substs", "3"], "unknown option --substs; did you mean --subsets?"),
        (["--task", "nowhere"], "digits"),
        (["--set", "bif.chains=4"], "which is not the task (digits)"),
        (["--cluster", "cloud"], "inline"),
        (["--slurm", "partition=gpu"], "--cluster slurm"),
        (["--jobs", "0"], "--jobs"),
        (["--cache", ""], "empty path"),
        (["--cache", "/proc/nowhere"], "cannot be used"),
        (["--protocol", "magic"], "scratch"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(tmp_path, capsys, words, reason):
    try:
        code = command.main([*SMALL, "--cache", str(tmp_path / "cache"), *words])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert code == 2
    assert said.count("\n") == 1
    assert said.startswith("python -m retrain: ")
    assert reason in said
