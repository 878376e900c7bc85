"""A fitted method in a folder: new queries have a fresh run's scores, wherever the folder lies."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from baselines.support.kept_rows import KeptRows
from bench import Experiment
from bench.experiment import Execution
from bench.runner import Session
from bench.score_store import ScoreStore, main, make_store
from retrain.errors import UsageError
from retrain.examples import Examples

LOGISTIC = "retrain.logistic:LogisticDigits"
METHODS = ("kfac", "soft=kfac@relative_damping=1", "shampoo", "gradsim", "trak", "random")


def made(folder: Path, *methods: str, queries: int = 3) -> tuple[Session, list[np.ndarray]]:
    options = {"num_train": 80, "num_queries": 40}
    asked = Experiment(task=LOGISTIC, task_options=options, methods=methods, queries=queries)
    session = Session(asked, Execution(cache=str(folder / "cache"), progress=False))
    (block,) = session.blocks
    fresh = [session.scorer(variant, *block) for variant in session.active]
    for scorer in fresh:
        scorer.make(())
    return session, [scorer.stored_scores().scores.numpy() for scorer in fresh]


@pytest.mark.parametrize("most_bytes", [2**30, 0], ids=["gradients kept", "gradients computed again"])
def test_new_queries_have_the_scores_of_a_fresh_run(tmp_path: Path, most_bytes: float) -> None:
    methods = METHODS[:3] + (("gradsim",) if most_bytes else ()) + ("trak", "two=trak@checkpoints=2")
    session, expected = made(tmp_path, *methods, queries=20)
    one, _ = made(tmp_path, *methods, queries=1)
    make_store(one, tmp_path / "there", most_bytes)
    shutil.move(tmp_path / "there", tmp_path / "here")
    store = ScoreStore(tmp_path / "here", "cpu")
    queries = session.question(*session.blocks[0]).queries
    for label, scores in zip([variant.label for variant in session.active], expected, strict=True):
        answer = store.ask(label, queries)
        np.testing.assert_allclose(answer.attribution.scores, scores, rtol=1e-3, atol=1e-4 * np.abs(scores).max())
        assert (tmp_path / "here" / label / "rows.npy").exists() == (most_bytes > 0 and label not in ("trak", "two"))
        assert answer.num_bytes > 0


def test_what_has_nothing_to_keep_and_kept_gradients_of_others_are_refused(tmp_path: Path) -> None:
    session, _ = made(tmp_path, "random", queries=1)
    with pytest.raises(UsageError, match="neither a fit"):
        make_store(session, tmp_path / "store", 2**30)
    np.save(tmp_path / "rows.npy", np.zeros((3, 4), dtype=np.float32))
    assert KeptRows(tmp_path / "rows.npy").open(3, 4) is not None
    with pytest.raises(UsageError, match=r"expected float32 of shape \(3, 5\)"):
        KeptRows(tmp_path / "rows.npy").open(3, 5)


def test_the_commands_make_it_and_ask_it(tmp_path: Path) -> None:
    task = ["--task", LOGISTIC, "--set", f"{LOGISTIC}.num_train=60", "--cache", str(tmp_path / "cache")]
    assert main(["make", *task, "--methods", "gradsim", "--out", str(tmp_path / "store")]) == 0
    own = Examples(torch.randn(2, 16), torch.tensor([3, 4]))
    np.savez(tmp_path / "own.npz", inputs=own.inputs.numpy(), targets=own.targets.numpy())
    asked = ["ask", str(tmp_path / "store"), "--inputs", str(tmp_path / "own.npz"), "--out", str(tmp_path / "out")]
    assert main(asked) == 0
    assert np.load(tmp_path / "out" / "gradsim.npy").shape == (2, 60)
    assert len(np.load(tmp_path / "out" / "attributed.npy")) == 60
    assert main(["ask", str(tmp_path / "store"), "--queries", "9999"]) == 2
    assert main(["ask", str(tmp_path / "store"), "--methods", "trak"]) == 2
