"""The Pythia-14M task, its model, its finetuning and its errors, on a model of five thousand weights."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import errors
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from bench import cli as lds
from retrain.examples import Examples
from retrain.models import lm_training, pretrained
from retrain.models.causal_lm import CausalLM
from retrain.models.lm_training import Finetuner, Finetuning, batches
from retrain.models.pretrained import load_language_model, load_tokenizer
from retrain.tasks import load_task
from retrain.tasks.language import Pythia14M
from retrain.units import task_from, task_specification
from tests.helpers.made_up import language_folder
from tests.helpers.problems import CPU, refused
from tests.helpers.tiny_language import save_model, save_tokenizer, write_text
from tests.retrain.test_tasks import weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """model/ with a tokenizer, train.jsonl and eval.jsonl."""
    return language_folder(tmp_path_factory.mktemp("language"))


def make(folder: Path, **options) -> Pythia14M:
    files = {"model": str(folder / "tiny-stand-in"), "text": str(folder / "train.jsonl")}
    sizes = {"length": 16, "num_train": 20, "num_queries": 8, "batch_size": 8}
    return load_task("pythia14m", **files | sizes | options)


@pytest.fixture(scope="module")
def task(folder) -> Pythia14M:
    return make(folder, eval_text=str(folder / "eval.jsonl"), learning_rate=1e-2)


# ---- the model ----
@pytest.mark.parametrize("parallel", [True, False])
def test_the_direct_pass_token_losses_and_gradients_are_those_of_transformers_own_logits(tmp_path, parallel) -> None:
    model = load_language_model(str(save_model(tmp_path / "model", use_parallel_residual=parallel)))
    inputs, targets = torch.randint(64, (2, 3, 17))
    losses = model.token_losses(inputs, targets)
    logits = model.transformer(input_ids=inputs, use_cache=False).logits
    torch.testing.assert_close(model(inputs), logits, rtol=1e-5, atol=1e-5)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(3, 17)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(losses.mean(), list(model.parameters()))
    wanted = torch.autograd.grad(expected.mean(), list(model.parameters()))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    rounded = model.token_losses(inputs, targets, torch.bfloat16)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, losses, rtol=0.05, atol=0.05)
    narrow = torch.autograd.grad(rounded.mean(), list(model.parameters()))
    for one, other in zip(narrow, found, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() <= 0.1 * other.norm() + 1e-4


def test_half_the_precision_is_for_weights_not_for_rotary_frequencies(tmp_path) -> None:
    """Rounded frequencies would turn the later positions by whole radians."""
    model = load_language_model(str(save_model(tmp_path, max_position_embeddings=2048)), torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    exact = load_language_model(str(tmp_path))
    frequencies = exact.transformer.gpt_neox.rotary_emb.inv_freq
    for other in (model, copy.deepcopy(exact).bfloat16(), copy.deepcopy(exact).to(torch.float16)):
        assert torch.equal(other.transformer.gpt_neox.rotary_emb.inv_freq, frequencies)


def test_other_architectures_and_capped_logits_run_as_transformers_has_them(tmp_path) -> None:
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "head_dim": 8, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    configuration = Gemma2Config(**sizes, **heads, final_logit_softcapping=0.05, pad_token_id=0)
    Gemma2ForCausalLM(configuration).save_pretrained(tmp_path)
    model = load_language_model(str(tmp_path))
    assert not model.has_plain_head
    inputs, targets = torch.randint(30, (2, 2, 5))
    expected = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none").view(2, 5)
    torch.testing.assert_close(model.token_losses(inputs, targets), expected)


# ---- finetuning ----
def plain_finetune(model: CausalLM, data: Examples, steps: list[torch.Tensor], recipe: Finetuning) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    for number, chosen in enumerate(steps):
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * (1 - number / len(steps))
        logits = model.transformer(input_ids=data.inputs[chosen], use_cache=False).logits
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), data.targets[chosen].flatten()).backward()
        optimizer.step()
    return weights(model)


def test_finetuning_is_adamw_with_a_linear_decay_whatever_the_micro_batch(task) -> None:
    recipe = Finetuning(batch_size=8, learning_rate=1e-2, weight_decay=0.01, epochs=2)
    chosen = np.array([3, 1, 4, 15, 9, 2, 6, 5, 8, 7, 11])
    steps = list(batches(chosen, recipe, order_seed=5))
    assert [len(step) for step in steps] == [8, 3, 8, 3]
    assert sorted(torch.cat(steps[:2]).tolist()) == sorted(chosen)
    expected = plain_finetune(task.build_model(0), task.train_data, steps, recipe)
    for micro_batch in (256, 3):
        engine = Finetuner(task.build_model(0), task.train_data, replace(recipe, micro_batch=micro_batch), CPU)
        start = {name: value.clone() for name, value in engine.model.state_dict().items()}
        for _ in range(2):  # the second run starts from the same place
            engine.load(start)
            engine.run(batches(chosen, recipe, order_seed=5), recipe.num_steps(len(chosen)))
            trained = engine.model_copy()
            # Adam divides gradients by their own size, so the smallest of them turn rounding into steps.
            assert (weights(trained) - expected).norm() < 1e-3 * (expected - weights(task.build_model(0))).norm()
            assert not trained.training
    assert not torch.allclose(expected, weights(task.build_model(0)), atol=1e-3)


def test_a_narrow_copy_computes_and_the_weights_stay_wide(task, monkeypatch) -> None:
    """As on a GPU: bf16 passes, float32 weights and optimizer."""
    recipe = Finetuning(batch_size=8, learning_rate=1e-3, epochs=4)

    def run() -> torch.Tensor:
        engine = Finetuner(task.build_model(0), task.train_data, recipe, CPU)
        engine.load(task.build_model(0).state_dict())
        engine.run(batches(np.arange(16), recipe, order_seed=1), recipe.num_steps(16))
        return weights(engine.model_copy())

    start, wide = weights(task.build_model(0)), run()
    monkeypatch.setattr(lm_training, "language_dtype", lambda *_: torch.bfloat16)
    narrow = run()
    assert narrow.dtype == torch.float32
    assert 0 < (narrow - wide).norm() < 0.2 * (wide - start).norm()


@pytest.mark.cuda
def test_captured_steps_are_the_same_steps(task) -> None:
    device = torch.device("cuda")
    recipe = Finetuning(batch_size=8, learning_rate=1e-3, epochs=8)
    results = []
    for capture in (True, False):
        engine = Finetuner(task.build_model(0), task.train_data, recipe, device, capture=capture)
        start = {name: value.clone() for name, value in engine.model.state_dict().items()}
        for _ in range(2):
            engine.load(start)
            engine.run(batches(np.arange(19), recipe, order_seed=1), recipe.num_steps(19))
            results.append(weights(engine.model_copy()))
        assert sorted(engine.graphs) == ([3, 8] if capture else [])
    moved = (results[0] - weights(task.build_model(0)).to(device)).norm()
    for result in results[1:]:
        assert (result - results[0]).norm() < 0.1 * moved


def test_a_capture_that_fails_leaves_training_as_it_was(task, monkeypatch, capsys) -> None:
    """On a CPU nothing can be captured: the engine says so and goes on with the same steps."""
    recipe = Finetuning(batch_size=4, learning_rate=1e-2, epochs=3)

    def run(capturing: bool) -> torch.Tensor:
        engine = Finetuner(task.build_model(0), task.train_data, recipe, CPU)
        engine.capturing = capturing
        engine.run(batches(np.arange(12), recipe, order_seed=1), recipe.num_steps(12))
        return weights(engine.model)

    for name in ("CUDAGraph", "current_stream", "set_stream", "empty_cache"):
        monkeypatch.setattr(lm_training.torch.cuda, name, lambda *_: None)
    refuse = Mock(side_effect=RuntimeError("no graphs here\nat all"))
    monkeypatch.setattr(lm_training.torch.cuda, "graph", refuse)
    assert torch.equal(run(capturing=True), run(capturing=False))
    assert capsys.readouterr().err.count("CUDA graphs are off, training goes on without: no graphs here\n") == 1


def test_a_model_with_dropout_is_finetuned_without(task) -> None:
    """Its noise comes from the global generator, so that the same seed would give another model each time."""
    torch.manual_seed(0)
    model = CausalLM(GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)))
    tokens = torch.randint(32, (12, 8))
    tuner = Finetuner(model, Examples(tokens, tokens), Finetuning(batch_size=4, learning_rate=1e-2), CPU)
    start = copy.deepcopy(model.state_dict())
    found = []
    for _ in range(2):
        tuner.load(start)
        tuner.run(batches(range(12), tuner.recipe, 7), 4)
        found.append(weights(tuner.model_copy()))
    assert torch.equal(*found)


# ---- the task ----
def test_sequences_are_wrapped_and_measured(task) -> None:
    assert task.train_data.inputs.shape == task.train_data.targets.shape == (20, 15)
    assert len(task.query_data) == 8
    assert torch.equal(task.train_data.inputs[:, 1:], task.train_data.targets[:, :-1])
    model = task.train_base(init_seed=1, order_seed=2, device=CPU)
    batch = task.query_data.inputs, task.query_data.targets
    assert task.loss(model, batch).shape == (8, 15)
    torch.testing.assert_close(task.losses(model, task.query_data, CPU), task.loss(model, batch).mean(1))
    untrained = task.losses(task.build_model(0), task.train_data, CPU).mean()
    assert task.losses(model, task.train_data, CPU).mean() < untrained
    with pytest.raises(ValueError, match="from 0 to 19"):
        task.train([20], init_seed=1, order_seed=1, device=CPU)


def test_no_document_is_in_both_parts(folder, tmp_path) -> None:
    def contains(examples: Examples, document: list[int]) -> bool:
        stream = torch.cat([torch.cat([examples.inputs, examples.targets[:, -1:]], 1).flatten()]).tolist()
        return any(stream[i : i + len(document)] == document for i in range(len(stream)))

    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    repeated = tmp_path / "repeated.jsonl"
    repeated.write_text("".join(lines[:16] + lines))  # the first documents come again where the queries begin
    one = make(folder, text=str(repeated))
    assert torch.equal(one.train_data.inputs, make(folder).train_data.inputs)
    two = make(folder, eval_text=str(repeated))
    tokenizer = load_tokenizer(str(folder / "tiny-stand-in"))
    documents = tokenizer([json.loads(line)["text"] for line in lines], add_special_tokens=False)["input_ids"]
    trained_on = [document for document in documents if contains(one.train_data, document)]
    assert len(trained_on) >= 14
    for task in (one, two):
        assert not any(contains(task.query_data, document) for document in trained_on)
        assert sum(contains(task.query_data, document) for document in documents) >= 5


def test_the_key_has_the_weights_and_the_tokens_and_no_path(folder, task, tmp_path) -> None:
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    same = make(moved, eval_text=str(moved / "eval.jsonl"), learning_rate=1e-2)
    assert same.config == task.config
    assert "moved" not in json.dumps(same.config)
    assert task_from(task_specification(same)).config == same.config
    save_model(moved / "other-stand-in", seed=1)
    save_tokenizer(moved / "other-stand-in")
    other = make(moved, model=str(moved / "other-stand-in"), eval_text=str(moved / "eval.jsonl"), learning_rate=1e-2)
    differing = {name for name in same.config if same.config[name] != other.config[name]}
    assert differing == {"weights"}


def test_a_stand_in_is_called_one(folder, tmp_path) -> None:
    assert "stand-in" in make(folder).description
    shutil.copytree(folder / "tiny-stand-in", tmp_path / "my-model")
    assert make(folder, model=str(tmp_path / "my-model")).description.endswith("stand-in model my-model")
    papers = load_task("pythia14m")
    assert papers.description.endswith("EleutherAI/pythia-14m at step45000")
    sizes = (papers.num_train, papers.num_queries, papers.length, papers.batch_size, papers.epochs)
    assert (*sizes, papers.learning_rate, papers.weight_decay) == (4096, 256, 1024, 256, 1, 3e-5, 0.01)
    config = tmp_path / "my-model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "_name_or_path": "EleutherAI/pythia-14m"}))
    assert "stand-in" not in make(folder, model=str(tmp_path / "my-model")).description


def test_the_lds_command_takes_model_and_texts(folder, tmp_path, capsys) -> None:
    named = f"--model {folder}/tiny-stand-in --text {folder}/train.jsonl --eval-text {folder}/eval.jsonl"
    sizes = "--set pythia14m.num_train=20 --set pythia14m.length=16 --set pythia14m.num_queries=10"
    where = f"--device cpu --cluster inline --cache {tmp_path}/cache --out {tmp_path}/runs"
    command = f"--task pythia14m --alpha 0.5 --subsets 3 {named} {sizes} --methods gradsim random {where}".split()
    assert lds.lds_main(command) == 0
    (record,) = (tmp_path / "runs").glob("*/run.json")
    content = json.loads(record.read_text())
    assert "stand-in" in content["description"]
    assert len(content["config"]["task"]["weights"]) == 20
    assert lds.lds_main([*command, "--set", "pythia14m.length=64"]) == 2
    assert "takes at most 33 tokens" in capsys.readouterr().err


# ---- bad input: each one line ----
def test_texts_and_tokenizers_that_do_not_do(folder, tmp_path) -> None:
    save_model(tmp_path)
    save_tokenizer(tmp_path, extra=20)
    refused(lambda: make(folder, model=str(tmp_path)).train_data, "71 tokens", "only 64", "was trained with")
    (tmp_path / "empty.jsonl").write_text("")
    refused(lambda: make(folder, text=str(tmp_path / "empty.jsonl")).train_data, "has no documents")
    write_text(tmp_path / "short.jsonl", 1, words=5)
    refused(lambda: make(folder, text=str(tmp_path / "short.jsonl")).train_data, "0 sequences of 16, and 20 are wanted")
    refused(lambda: make(folder, num_train=500).train_data, "the training text has", "52 sequences of 16, and 500")
    refused(lambda: make(folder, num_queries=500).train_data, "left for queries has", "500 are wanted")
    refused(lambda: make(folder, eval_text=str(tmp_path / "no.jsonl")).train_data, "there is no text file")
    refused(lambda: make(folder, text="", eval_text=str(folder / "eval.jsonl")).train_data, "pass --text")
    refused(lambda: make(folder, length=40).train_data, "length is 40", "at most 33")
    refused(lambda: make(folder, precision="int8"), "available: bfloat16, tf32, float32")


def test_no_network_names_what_to_download_or_pass(folder) -> None:
    papers = load_task("pythia14m", text=str(folder / "train.jsonl"))
    refused(lambda: papers.train_data, "hf download EleutherAI/pythia-14m --revision step45000", "--model FOLDER")
    refused(lambda: make(folder, text="").train_data, "monology/pile-uncopyrighted", "--text FILE.jsonl")


def test_a_text_of_a_hub_dataset(folder, tmp_path, monkeypatch) -> None:
    download = Mock(return_value=str(folder))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    here = make(folder, text="hf://datasets/some/articles/train.jsonl@v2")
    assert torch.equal(here.train_data.inputs, make(folder).train_data.inputs)
    ((repository,), options) = download.call_args
    asked = (repository, options["repo_type"], options["revision"], options["allow_patterns"])
    assert asked == ("some/articles", "dataset", "v2", ["train.jsonl"])
    refused(lambda: make(folder, text="hf://datasets/some/articles/no.jsonl").train_data, 'has no file "no.jsonl"')
    refused(lambda: make(folder, text="hf://datasets/some").train_data, "expected hf://datasets/OWNER/NAME/FILE")


def test_what_the_hub_refuses(monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    expected = {
        errors.RevisionNotFoundError: ('has no revision "step7"', "tree/main"),
        errors.RepositoryNotFoundError: ('no model on the hub named "some/model"',),
        errors.GatedRepoError: ("asks for an agreement",),
        errors.LocalEntryNotFoundError: ("the hub cannot be reached", "--model FOLDER"),
        ConnectionResetError: ("the download of", "stopped", "resumes"),
        TimeoutError: ("the download of", "stopped", "resumes"),
    }
    for kind, parts in expected.items():
        monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=kind.__new__(kind)))
        refused(lambda: load_language_model("some/model@step7"), *parts)
    monkeypatch.undo()
    refused(lambda: load_language_model("no such: name"), "neither a folder nor a name on the hub")


def test_an_interrupted_download_or_copy_is_not_a_model(folder, tmp_path, monkeypatch) -> None:
    whole = folder / "tiny-stand-in"
    part = Path(shutil.copytree(whole, tmp_path / "part"))
    (weights_file,) = part.glob("*.safetensors")
    content = weights_file.read_bytes()
    weights_file.write_bytes(content[: len(content) // 2])
    refused(lambda: load_language_model(str(part)), "damaged or cut short", "again")
    weights_file.unlink()
    refused(lambda: load_language_model(str(part)), "has no weights")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (part / "model.safetensors.index.json").write_text(json.dumps(index))
    (part / "model-00001-of-00002.safetensors").write_bytes(content)
    refused(lambda: load_language_model(str(part)), "lacks 1 of its 2 weight files", "interrupted")
    # The hub's own folder after an interruption: huggingface_hub gives what is whole, and it is checked all the same.
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *arguments, **options: str(part))
    refused(lambda: load_language_model("some/model"), "lacks 1 of its 2 weight files")
    (part / "model.safetensors.index.json").write_text("{")
    refused(lambda: load_language_model(str(part)), "model.safetensors.index.json")


def test_folders_that_are_no_models(folder, tmp_path) -> None:
    refused(lambda: load_language_model(str(tmp_path / "none")), "there is no model folder")
    refused(lambda: load_language_model(str(tmp_path)), "has no config.json")
    refused(lambda: load_language_model(f"{folder / 'tiny-stand-in'}@step3"), 'has no revision "step3"')
    refused(lambda: load_language_model(""), "expected PATH_OR_NAME")
    refused(lambda: load_language_model("name@"), "expected PATH_OR_NAME")
    save_model(tmp_path / "bare")
    refused(lambda: load_tokenizer(str(tmp_path / "bare")), "has no tokenizer.json")
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    (tmp_path / "bare" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    refused(lambda: load_language_model(str(tmp_path / "bare")), "lack 12 parameters", "do not belong together")
    (tmp_path / "bare" / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    refused(lambda: load_language_model(str(tmp_path / "bare")), "cannot load", "causal language model")
    assert pretrained.split_revision("a/b@c") == ("a/b", "c")
