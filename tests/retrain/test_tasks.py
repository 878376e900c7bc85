"""Conformance: the same tests over every file in retrain/tasks/, so a new task is covered too."""

import math
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from baselines.method import Retrained, available_methods, load_method
from bench.cli import lds_main as main
from retrain import subsets
from retrain.jobs import Unit
from retrain.store import Store
from retrain.task import Task
from retrain.tasks import available_tasks, load_task
from retrain.train import train_checkpoint, train_one
from retrain.units import Plan, checkpoint_unit, retrain_units, task_from, task_specification
from tests.helpers.made_up import small_options
from tests.helpers.problems import CPU, problem_of
from tests.helpers.problems import refused as refused_in_one_line


@pytest.fixture(scope="module", params=available_tasks())
def task(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, images: Path) -> Task:
    """Every task, on data made here: one that cannot be had is a failure, not a skip."""
    return load_task(request.param, **small_options(request.param, tmp_path_factory.mktemp(request.param), images))


@pytest.fixture(scope="module")
def model(task: Task) -> torch.nn.Module:
    return trained(task)


def trained(task: Task, count: int = 20, init_seed: int = 1, order_seed: int = 2) -> torch.nn.Module:
    return task.train(np.arange(count), init_seed=init_seed, order_seed=order_seed, device=CPU)


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_data_is_the_same_every_time_and_query_splits_are_disjoint_and_cover(task: Task) -> None:
    again = task_from(task_specification(task))
    assert again.train_data.fingerprint == task.train_data.fingerprint
    assert again.query_data.fingerprint == task.query_data.fingerprint
    assert again.config == task.config
    tune, report = task.query_indices("tune"), task.query_indices("report")
    assert min(len(tune), len(report)) > 0
    assert sorted([*tune, *report]) == list(task.query_indices("all"))


def test_training_is_a_function_of_its_seeds_and_leaves_the_global_generator_alone(task: Task, model) -> None:
    torch.manual_seed(0)
    start = weights(task.build_model(1))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert torch.equal(start, weights(task.build_model(1)))
    assert torch.equal(start, weights(task.build_model(2))) == task.pretrained
    one = weights(model)
    assert torch.equal(one, weights(trained(task)))
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(one, weights(trained(task, order_seed=3)))
    assert torch.equal(one, weights(trained(task, init_seed=3))) == task.pretrained
    assert not torch.equal(one, weights(trained(task, count=19)))


def test_losses_are_finite_even_of_one_example_and_do_not_depend_on_the_batch(task: Task, model) -> None:
    losses = task.losses(model, task.query_data, CPU)
    assert losses.shape == (len(task.query_data),)
    assert losses.dtype == torch.float32
    assert torch.isfinite(losses).all()
    part = task.losses(model, task.query_data.select([7, 3]), CPU)
    torch.testing.assert_close(part, losses[[7, 3]], rtol=1e-4, atol=1e-5)
    assert torch.isfinite(task.losses(trained(task, count=1), task.query_data, CPU)).all()


# A skip that hides a failure is a defect: beside a missing extra, only what stands here with its reason is excused.
WITHOUT_WORDS = ("cifar10", "digits", "googlenet", "smooth_digits", "table")
LANGUAGE = ("language", "pythia14m", "smollm2", "stories15m")
NOT_REPLAYED = ("cifar10", "googlenet", "table", "text_classifier", *LANGUAGE)  # CIFAR-10 under its protocol `paper`
CANNOT: set[tuple[str, str]] = {(task, "bm25") for task in WITHOUT_WORDS} | {
    *((task, method) for task in NOT_REPLAYED for method in ("magic", "tracin", "source")),
    ("tinylm", "source"),  # whose steps are Adam's
    *((task, "same_class") for task in ("tinylm", *LANGUAGE)),  # no classes
}

QUICK = {
    "bif": {"chains": 2, "draws": 3, "minibatch": 16, "gamma": 1e5, "step_size": 1e-5, "n_beta": 200.0},
    "trak": {"projection": 110, "ridge": 1.0},
    "datamodel": {"retrains": 12},
    "arnoldi": {"iterations": 4, "damping": 10.0},
    "if_cg": {"iterations": 1, "damping": 10.0},
    "astra": {"iterations": 2},
    "bif_gaussian": {"draws": 4},
    "daunce": {"models": 2, "steps": 1},
}

QUICK["bif_cv"] = QUICK["bif_devinterp"] = QUICK["bif"]


# The presets of `language` differ from it in options that are made small here: the same training, and the same model.
@pytest.mark.parametrize("task", [name for name in available_tasks() if name not in LANGUAGE[1:]], indirect=True)
@pytest.mark.parametrize("name", available_methods())
def test_every_method_runs_on_every_task(task: Task, model: torch.nn.Module, name: str, scratch) -> None:
    method = load_method(name, **QUICK.get(name, {}))
    if reason := method.skip(task):
        assert (task.name, name) in CANNOT or "pip install" in reason, f"{name} on {task.name}: {reason}"
        pytest.skip(reason)
    made_up = np.random.default_rng(0)
    retrained = Retrained(made_up.random((12, 4)) < 0.5, made_up.random((12, 6), dtype=np.float32))
    train = task.train_data.select(np.arange(30))
    problem = problem_of(
        task, scratch, model, train=train, queries=range(6), chosen=[5, 2, 9, 11], retrained=lambda: retrained
    )
    attribution = method.score(problem, method.fit(problem))
    assert attribution.scores.shape == (6, 4)
    assert torch.isfinite(attribution.scores).all()


# ---- subsets ----
def test_fixed_subsets_have_exactly_their_size_and_are_pure() -> None:
    masks = subsets.masks(seed=3, num_subsets=20, alpha=0.1, n=200)
    assert (masks.sum(1) == 20).all()
    assert np.array_equal(masks, subsets.masks(3, 20, 0.1, 200))
    assert np.array_equal(masks[7], subsets.mask(3, 7, 0.1, 200)), "a subset does not depend on how many there are"
    assert len({mask.tobytes() for mask in masks}) == 20
    assert not np.array_equal(masks, subsets.masks(4, 20, 0.1, 200))


def test_every_example_is_kept_equally_often() -> None:
    groups = np.repeat(np.arange(5), 10)
    for scheme in subsets.SCHEMES:
        masks = subsets.masks(0, 2000, 0.3, 50, scheme, groups=groups)
        assert abs(masks.mean() - 0.3) < 0.01
        assert np.abs(masks.mean(0) - 0.3).max() < 5 * np.sqrt(0.3 * 0.7 / 2000)


def test_bernoulli_subsets_vary_in_size_and_are_never_empty() -> None:
    sizes = subsets.masks(0, 200, 0.02, 50, "bernoulli").sum(1)
    assert sizes.min() == 1
    assert sizes.std() > 0.5


def test_balanced_subsets_keep_every_groups_share_exactly_in_total_and_are_nested() -> None:
    groups = np.random.default_rng(0).choice(7, size=613, p=np.arange(1, 8) / 28) * 10  # any labels, unequal groups
    sizes = np.array([(groups == group).sum() for group in np.unique(groups)])
    before = np.zeros((6, 613), dtype=bool)
    for alpha in (0.05, 0.1, 0.1007, 0.31, 0.5, 0.93):
        masks = subsets.masks(3, 6, alpha, 613, "balanced", "learn", groups)
        assert (masks.sum(1) == subsets.subset_size(613, alpha)).all(), "as many as the other schemes keep"
        counts = np.stack([[mask[groups == group].sum() for group in np.unique(groups)] for mask in masks])
        assert (counts == counts[0]).all(), "subsets do not differ in what they hold of a group"
        assert np.abs(counts[0] - alpha * sizes).max() < 1
        assert (masks >= before).all(), "nested in alpha"
        assert len({mask.tobytes() for mask in masks}) == 6
        before = masks
    alone = subsets.mask(3, 2, 0.1, 613, "balanced", "learn", groups)
    assert np.array_equal(alone, subsets.masks(3, 6, 0.1, 613, "balanced", "learn", groups)[2])


def test_balanced_subsets_need_groups_and_lose_none_in_silence(tmp_path: Path) -> None:
    def units(task: Task, alpha: float = 0.1, share: float = 1.0) -> list:
        plan = Plan(alpha=alpha, alpha_attribution=share, seed=1, num_subsets=2, scheme="balanced")
        return retrain_units(task, plan, "cpu")

    digits = load_task("digits")
    assert len({unit.key for unit in units(digits)}) == 2
    refused_in_one_line(lambda: units(load_task("tinylm")), "tinylm has no groups")
    refused_in_one_line(lambda: units(digits, alpha=0.004), "alpha 0.004 keeps none of ", " of 10 groups")
    store, (unit, _) = Store(tmp_path), units(load_task("digits", epochs=1))
    assert train_one(store, unit).record["num_kept"] == 120


def test_attributed_examples_are_nested_and_sorted_and_impossible_alphas_refused() -> None:
    for alpha in (0, 1, 1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match="expected a fraction"):
            subsets.mask(0, 0, alpha, 10)
    small, large = (subsets.attributed_indices(1, share, 1000) for share in (0.01, 0.1))
    assert len(small) == 10
    assert set(small) <= set(large)
    assert (np.diff(large) > 0).all()
    assert np.array_equal(subsets.attributed_indices(1, 1.0, 5), np.arange(5))


def test_a_base_model_that_diverged_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    diverged = Mock(losses=Mock(return_value=torch.tensor([1.0, math.nan])))
    monkeypatch.setattr("retrain.train.task_from", lambda _: diverged)
    call, payload = "retrain.train:train_checkpoint", {"task": "", "device": "cpu"}
    unit = Unit("model", {"init_seed": 0, "order_seed": 0}, call, payload)
    with pytest.raises(FloatingPointError, match="the base model's loss on the queries is nan: its training diverged"):
        train_checkpoint(Store(tmp_path / "cache"), unit)


# ---- the GoogLeNet task on made-up images and weights: no download, and one clear line for whatever is missing ----
def test_it_trains_its_last_layer(images: Path) -> None:
    task = load_task("googlenet", data_dir=str(images), model=str(images / "weights.pth"), size=64, epochs=40)
    assert len(task.train_data) == 30
    assert task.class_names == ("cat", "dog")
    assert len(task.query_data) == 16
    assert task.train_data.inputs.shape[1:] == task.image_shape() == (3, 64, 64)
    before = task.build_model(1)
    model = trained(task, 30)
    assert torch.equal(model.conv1.conv.weight, before.conv1.conv.weight)  # type: ignore[union-attr]
    assert task.losses(model, task.train_data, CPU).mean() < task.losses(before, task.train_data, CPU).mean()
    assert "weights" in task.config


def test_missing_data_and_unusable_weights_are_one_line(images: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    from torchvision.models import GoogLeNet_Weights

    for folder, text in (("", "needs --data-dir with the folders"), ("/nowhere", '"/nowhere/train" is no folder')):
        refused_in_one_line(lambda folder=folder: load_task("googlenet", data_dir=folder).train_data, text)
    (tmp_path / "text.pth").write_text("no weights")
    torch.save({"fc.weight": torch.zeros(2)}, tmp_path / "other.pth")
    for name in ("text.pth", "other.pth", "absent.pth"):
        task = load_task("googlenet", data_dir=str(images), model=str(tmp_path / name), size=64)
        refused_in_one_line(lambda task=task: task.build_model(0))

    def announce(*arguments: object, **options: object) -> dict[str, torch.Tensor]:
        print("Downloading: ...")
        return {}

    monkeypatch.setattr(GoogLeNet_Weights, "get_state_dict", announce)
    assert load_task("googlenet", data_dir=str(images), size=64)._pretrained == {}  # type: ignore[attr-defined]
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "Downloading: ...\n"), "stdout is for --json"
    monkeypatch.setattr(GoogLeNet_Weights, "get_state_dict", Mock(side_effect=OSError("no network")))
    task = load_task("googlenet", data_dir=str(images), size=64)
    refused_in_one_line(lambda: task.build_model(0), "(no network); give a file of them with --model")


# ---- a task in a file of one's own ----
def test_bad_names_and_broken_files_are_one_line(tmp_path: Path, refused: Callable[..., str]) -> None:
    for number, text in enumerate(("x = 1 / 0\n", "def f(:\n", "x = 1\n")):
        (tmp_path / f"broken_{number}.py").write_text(text)
    for task, words in (
        (f"{tmp_path}/broken_0.py", "ZeroDivisionError"),
        (f"{tmp_path}/broken_1.py", "SyntaxError"),
        (f"{tmp_path}/broken_2.py", "defines 0 Task"),
        ("no_such_file.py", "there is no such file"),
        ("../../evil:Cls", "names no task"),
        ("tests.helpers.planted:Nobody", "has no class Nobody"),
        ("tests.helpers.planted:RIDGE", "is not a retrain.task.Task"),
    ):
        assert words in refused(main, ["--task", task, "--alpha", "0.5", "--cache", str(tmp_path / "cache")])


def test_a_tables_own_network_is_in_its_key_by_its_weights(tmp_path: Path) -> None:
    """Also of a file with whole numbers alone, which a network takes as floats."""
    (tmp_path / "own_net.py").write_text(
        "from torch import nn\n\nclass Net(nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(nn.Linear(2, 2, bias=False), nn.Softplus())\n"
    )
    (tmp_path / "rows.csv").write_text("a,b,label\n" + "".join(f"{k},{k % 3},{k % 2}\n" for k in range(20)))
    keys = []
    for number in (1.0, 2.0):
        torch.save({"0.weight": torch.full((2, 2), number)}, tmp_path / "net.pt")
        options = {"train_file": str(tmp_path / "rows.csv"), "model": str(tmp_path / "net.pt")}
        task = load_task("table", **options, network=f"{tmp_path}/own_net.py:Net")
        assert float(task.build_model(0)[0].weight[0, 0]) == number
        keys.append(checkpoint_unit(task, 1, 0, "cpu").key)
    assert keys[0] != keys[1]
    other = load_task("table", **options, network=f"{tmp_path}/own_net.py:Other")
    refused_in_one_line(lambda: other.build_model(0), "no class Other")
