"""A model and data of one's own: the right examples are named, whatever the data came as; a mistake is one line."""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from baselines.method import Attribution, Method, checked_answer
from bench import Execution, Experiment, OwnModel, load_results, run, scores
from bench.cli import main
from bench.rows import RunRows
from bench.tables import show
from retrain.errors import UsageError
from retrain.examples import Examples
from retrain.tasks import load_task
from tests.helpers.made_up import sentence_file, table_file
from tests.helpers.tiny_language import save_bert

CLASSES = ("low", "high")


@pytest.fixture(scope="module")
def data() -> SimpleNamespace:
    """Two classes on a line, and a linear model that is not quite right about them."""
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(30, 2))
    labels = (inputs[:, 0] + 0.3 * generator.normal(size=30) > 0).astype(int)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
    return SimpleNamespace(x=inputs[:24], y=labels[:24], new_x=inputs[24:], new_y=labels[24:], model=model)


def expected_scores(data: SimpleNamespace) -> np.ndarray:
    """Minus the inner products of the loss's gradients in weight and bias, in closed form."""

    def residuals(inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            outputs = data.model(torch.from_numpy(inputs).float()).softmax(1).numpy()
        return outputs - np.eye(2)[labels]

    kernel = (data.new_x @ data.x.T) + 1
    return -(residuals(data.new_x, data.new_y) @ residuals(data.x, data.y).T) * kernel


GIVEN: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "float64 arrays": lambda x, y: (x.numpy(), y.numpy()),
    "float64 tensors that want gradients": lambda x, y: (x.requires_grad_(), y),
    "frames": lambda x, y: (framed(x.numpy()), pd.Series(y.numpy())),
    "a frame of one column as labels": lambda x, y: (x.numpy(), pd.DataFrame({"label": y.numpy()})),
    "int32 labels": lambda x, y: (x.float(), y.int()),
    "a data set": TensorDataset,
    "examples": Examples,
}


@pytest.mark.parametrize("kind", GIVEN)
def test_scores_are_those_of_all_queries_whatever_the_data_came_as(kind: str, data: SimpleNamespace) -> None:
    x, y, new_x, new_y = (torch.tensor(one) for one in (data.x, data.y, data.new_x, data.new_y))
    found = scores("gradsim", OwnModel(data.model, GIVEN[kind](x, y), GIVEN[kind](new_x, new_y)))
    assert found.queries.tolist() == list(range(6))
    np.testing.assert_allclose(np.asarray(found), expected_scores(data), rtol=1e-4, atol=1e-6)
    assert found.frame().loc[2, 5] == found[2, 5]


def test_columns_are_put_in_the_order_of_the_training_frame_and_bf16_is_taken(data: SimpleNamespace) -> None:
    task = OwnModel(data.model, (framed(data.x), data.y), (framed(data.new_x)[["b", "a"]], data.new_y))
    np.testing.assert_allclose(np.asarray(scores("gradsim", task)), expected_scores(data), rtol=1e-4, atol=1e-6)
    x, new_x = (torch.from_numpy(one).bfloat16() for one in (data.x, data.new_x))
    found = scores("gradsim", OwnModel(deepcopy(data.model).bfloat16(), (x, data.y), (new_x, data.new_y)))
    np.testing.assert_allclose(np.asarray(found), expected_scores(data), atol=0.05)


def test_the_most_helpful_come_first_with_their_labels_and_features(data: SimpleNamespace, tmp_path: Path) -> None:
    task = own(data, train=(framed(data.x), data.y), class_names=CLASSES)
    shown = scores("gradsim", task).top(3, [4], beside=[scores("repsim", task)])
    expected = expected_scores(data)[4]
    sides = dict(list(shown.frame().query("method == 'gradsim'").groupby("side")))
    helpful = sides["helpful"]
    assert helpful.train.tolist() == np.argsort(expected)[:3].tolist()
    assert sides["harmful"].train.tolist() == np.argsort(-expected)[:3].tolist()
    assert helpful.label.tolist() == [CLASSES[label] for label in data.y[helpful.train]]
    assert helpful.text.iloc[0].startswith(f"a={data.x[helpful.train.iloc[0], 0]:.4g}, b=")
    table, page = shown.save(tmp_path)
    assert len(pd.read_csv(table)) == 12
    assert "<script>" not in page.read_text().split("</table>")[0]
    assert str(shown)


def test_a_table_and_its_checkpoint_are_enough_for_the_command(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    train, queries = table_file(tmp_path / "train.csv"), table_file(tmp_path / "queries.csv", 12)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    torch.save(model.state_dict(), "mlp.pt")
    words = ["inspect", "--model", "mlp.pt", "--train", str(train), "--queries", str(queries), "--cache", "cache"]
    words += ["--methods", "gradsim", "--device", "cpu", "--query", "5", "--top", "4"]
    assert main(words) == 0
    assert "query 5" in capsys.readouterr().out
    (file,) = tmp_path.glob("runs/inspect/*/inspect.csv")
    named = pd.read_csv(file)

    def split(path: Path) -> tuple[np.ndarray, np.ndarray]:
        frame = pd.read_csv(path)
        return frame.drop(columns="label").to_numpy(), (frame.label == "low").astype(int).to_numpy()

    found = scores("gradsim", OwnModel(model, split(train), split(queries)), queries=[5])
    assert named[named.side == "helpful"].train.tolist() == np.argsort(found[0])[:4].tolist()
    assert main(["lds", *words[1:7], "--alpha", "0.5", "--methods", "gradsim", "--cache", "cache"]) == 2


def test_a_hugging_face_classifier_is_taken_as_it_is(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder, frame = save_bert(tmp_path / "bert"), pd.read_json(sentence_file(tmp_path / "rows.jsonl"), lines=True)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    found = tokenizer(list(frame.text), padding=True, return_tensors="pt")
    inputs = {name: found[name] for name in ("input_ids", "attention_mask")}
    task = OwnModel(model, {**inputs, "labels": frame.label}, {**inputs, "labels": frame.label}, texts=list(frame.text))
    made = scores("gradsim", task, queries=5)
    assert made.shape == (5, 60)
    assert (np.asarray(made)[np.arange(5), np.arange(5)] < 0).all(), "each text helps itself"
    assert made.top(1, [0]).frame().text[0] in set(frame.text)


@dataclass(frozen=True, kw_only=True)
class Answers(Method):
    def score(self, problem: Any, state: Any) -> Any:
        return None


def test_a_bare_tensor_or_array_is_an_answer() -> None:
    for answer in (np.ones((2, 3), dtype=np.float16), torch.ones(2, 3, dtype=torch.int32), torch.ones(2, 3).bfloat16()):
        made = checked_answer(answer, Answers(), 2, 3)
        torch.testing.assert_close(made.scores, torch.ones(2, 3))
    wanted = torch.ones(2, 3, requires_grad=True)
    assert not checked_answer(Attribution(scores=wanted, train_scale=np.ones(3)), Answers(), 2, 3).scores.requires_grad


def own(data: SimpleNamespace, **changed: Any) -> OwnModel:
    known = {"model": data.model, "train": (data.x, data.y), "queries": (data.new_x, data.new_y)}
    return OwnModel(**{**known, **changed})


def broken(**changed: Any) -> Callable[[SimpleNamespace, Path], Any]:
    """An OwnModel with something wrong about it."""
    return lambda data, _: own(data, **{name: value(data) for name, value in changed.items()}).train_data


def answered(answer: Any) -> Callable[[SimpleNamespace, Path], Any]:
    return lambda data, folder: checked_answer(answer, Answers(), 2, 3)


def framed(inputs: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(inputs, columns=["a", "b"])


def of_file(task: str, folder: Path, lines: str, **options: str) -> Any:
    path = folder / "rows.csv"
    path.write_text(lines)
    if task == "text_classifier":
        options["model"] = str(save_bert(folder / "bert"))
    return load_task(task, train_file=str(path), query_file=str(path), **options).train_data


def weights_file(data: SimpleNamespace, folder: Path) -> str:
    torch.save(data.model.state_dict(), folder / "mlp.pt")
    return str(folder / "mlp.pt")


MISTAKES: dict[str, Callable[[SimpleNamespace, Path], Any]] = {
    "scores are transposed": answered(torch.ones(3, 2)),
    "scores are complex": answered(torch.ones(2, 3, dtype=torch.complex64)),
    "a list is returned": answered([[1.0, 2.0, 3.0]] * 2),
    "a scale for every score": answered(Attribution(scores=torch.ones(2, 3), train_scale=torch.ones(2, 3))),
    "a negative scale": answered(Attribution(scores=torch.ones(2, 3), train_scale=-torch.ones(3))),
    "a column of words": broken(train=lambda d: (framed(d.x).assign(colour="red"), d.y)),
    "labels that are words": broken(queries=lambda d: (d.new_x, ["low"] * len(d.new_x))),
    "a missing value": broken(train=lambda d: (np.where(d.x > 1, np.nan, d.x), d.y)),
    "fewer labels than inputs": broken(queries=lambda d: (d.new_x, d.new_y[:3])),
    "real numbers as classes": broken(train=lambda d: (d.x, d.x[:, 0]), loss=lambda d: "cross_entropy"),
    "a column too many": broken(queries=lambda d: (np.ones((6, 3)), d.new_y)),
    "weights of another model": broken(state=lambda d: nn.Linear(3, 2).state_dict()),
    "weights that are not there": broken(state=lambda d: "no/such/file.pt"),
    "a model that is a file": broken(model=lambda d: "mlp.pt"),
    "a loss that is none": broken(loss=lambda d: "hinge"),
    "texts of different lengths": broken(train=lambda d: {"input_ids": [[1, 2], [3]], "labels": [0, 1]}),
    "a query that is not there": lambda d, _: scores("gradsim", own(d), queries=[99]),
    "queries named by a word": lambda d, _: scores("gradsim", own(d), queries="first"),  # type: ignore[arg-type]
    "a device that is none": lambda d, _: scores("gradsim", own(d), execution=Execution(device="gpu")),
    "the top none": lambda d, _: scores("gradsim", own(d)).top(0),
    "scores of other data beside": lambda d, _: scores("gradsim", own(d)).top(
        1, beside=[scores("gradsim", own(d, train=(d.new_x, d.new_y)))]
    ),
    "no queries": broken(queries=lambda d: (d.x[:0], d.y[:0])),
    "fewer texts than examples": broken(texts=lambda d: ["one"]),
    "pictures of another shape": broken(image_shape=lambda d: (1, 3, 3)),
    "labels from 1": broken(train=lambda d: (d.x, d.y + 1)),
    "query labels from 1": broken(queries=lambda d: (d.new_x, d.new_y + 1)),
    "labels as real numbers": broken(train=lambda d: (d.x, d.y.astype(float)), queries=lambda d: (d.x, d.y * 1.0)),
    "a label that is missing": broken(train=lambda d: (d.x, np.where(np.arange(24) == 5, np.nan, d.y))),
    "one-hot labels": broken(train=lambda d: (d.x, np.eye(2)[d.y]), queries=lambda d: (d.x, np.eye(2)[d.y])),
    "one-hot whole numbers": broken(train=lambda d: (d.x, np.eye(2, dtype=int)[d.y])),
    "a class name too many": broken(class_names=lambda d: ["a", "b", "c"]),
    "a query column missing": broken(train=lambda d: (framed(d.x), d.y), queries=lambda d: (framed(d.x)[["a"]], d.y)),
    "a query column too many": broken(
        train=lambda d: (framed(d.x), d.y), queries=lambda d: (framed(d.x).assign(c=1.0), d.y)
    ),
    "the top of a query that is not there": lambda d, _: scores("gradsim", own(d)).top(1, [99]),
    "an empty text": lambda d, folder: of_file("text_classifier", folder, "text,label\ngood,1\n,0\n"),
    "an empty label": lambda d, folder: of_file("table", folder, "a,label\n1.5,1\n2.5,\n"),
    "no column of labels": lambda d, folder: of_file("table", folder, "a,b\n1.5,1\n2.5,0\n"),
    "a column missing for the model": lambda d, folder: of_file(
        "table", folder, "a,label\n1.5,1\n2.5,0\n", model=weights_file(d, folder)
    ),
    "a class too many for the model": lambda d, folder: of_file(
        "table", folder, "a,b,label\n1.5,2,1\n2.5,3,0\n", model=weights_file(d, folder), classes="0,1,2"
    ),
    "a folder without results": lambda d, folder: load_results(folder / "rusn"),
    "a table without that column": lambda d, folder: scores(
        "gradsim", "table", task_options={"train_file": str(table_file(folder / "t.csv")), "target": "weight"}
    ),
    "judging without a train": lambda d, folder: run(Experiment(task=str(task_without_train(folder)), subsets=5)),
}


def task_without_train(folder: Path) -> Path:
    path = folder / "untrained.py"
    path.write_text(
        "import torch\nfrom dataclasses import dataclass\nfrom retrain.task import Task\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Untrained(Task):\n"
        "    def load_train_data(self): return torch.ones(9, 2), torch.arange(9) % 2\n"
        "    load_query_data = load_train_data\n"
        "    def build_model(self, seed): return torch.nn.Linear(2, 2)\n"
    )
    return path


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_do(
    mistake: str, data: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TDA_BENCH_CACHE", str(tmp_path / "cache"))
    with pytest.raises((UsageError, RuntimeError)) as error:
        MISTAKES[mistake](data, tmp_path)
    said = str(error.value)
    assert "\n" not in said
    assert len(said) < 500
    assert re.search(r"expected|;|\?|available|fit", said), said


def test_a_flipped_sign_is_remarked() -> None:
    known = {
        "alpha": 0.5, "alpha_attribution": 1.0, "seed": 1, "num_subsets": 9, "num_queries": 4, "num_undefined": 0,
        "origin": "default", "settings": "", "lds_within_groups": None, "fit_seconds": 0.0, "score_seconds": 0.0,
        "peak_memory_bytes": 1, "normalised": False, "ci_low": -0.7, "ci_high": -0.5, "lds": -0.6, "note": "",
        "ceiling": float("nan"), "num_replicates": 1, "num_subsets_replicated": 9,
    }  # fmt: skip
    rows = [{**known, "label": name, "method": name} for name in ("mine", "random")]
    said = show(RunRows(rows=rows, ceilings=[known]), "made up", "scratch")
    assert [line.partition(":")[0] for line in said.splitlines() if "flipped" in line] == ["mine"]
