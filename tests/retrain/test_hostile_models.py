"""A model folder is data: whatever it asks for, none of it runs, and each is refused in one line."""

import contextlib
import io
import json
import pickle
import sys
from pathlib import Path

import pytest

from retrain.errors import UsageError
from retrain.models import pretrained
from retrain.models.pretrained import load_language_model, load_tokenizer
from tests.helpers.problems import refused
from tests.helpers.tiny_language import save_both

CLASSES = {
    "AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Tokenizer", None],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound model with a tokenizer, and Python beside it that leaves a mark if it ever runs."""
    folder = save_both(tmp_path / "model")
    (folder / "evil.py").write_text(
        f"open({str(tmp_path / 'marker')!r}, 'w').write('ran')\n"
        "from transformers import GPTNeoXConfig as Config, GPTNeoXForCausalLM as Model\n"
        "from transformers import PreTrainedTokenizerFast as Tokenizer\n"
    )
    return folder


def edit(file: Path, **content: object) -> None:
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **content}))


OWN: dict[str, object] = {"auto_map": CLASSES}
HOSTILE: dict[str, tuple[str, dict]] = {
    "model": ("config.json", {**OWN, "model_type": "evil"}),
    "known model": ("config.json", OWN),
    "part": ("config.json", {"text_config": {"parts": [OWN]}}),
    "tokenizer": ("tokenizer_config.json", OWN),
    "generation": ("generation_config.json", OWN),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_python_of_its_own_is_refused(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, content = HOSTILE[kind]
    edit(folder / file, **content)
    for load in (load_language_model, load_tokenizer):
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
        refused(lambda load=load: load(str(folder)), "auto_map", file, "expected a model that transformers itself")
    assert not (folder.parent / "marker").exists()


def test_a_kernel_of_the_hub_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "_from_pretrained", None)  # never reached
    parts = {"text_config": {"_experts_implementation": "owner/kernel"}}
    for fields in ({"_attn_implementation": "owner/kernel"}, parts):
        edit(folder / "config.json", **fields)
        refused(lambda: load_language_model(str(folder)), "implementation", "config.json")
        edit(folder / "config.json", **dict.fromkeys(fields))
        pretrained.model_folder(str(folder))


@pytest.mark.parametrize("kind", ["model", "tokenizer"])
def test_the_loaders_themselves_are_told_not_to(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the folder gets past our own look: transformers would ask on the terminal, or read a pipe."""
    file, content = HOSTILE[kind]
    edit(folder / file, **content)
    monkeypatch.setattr(pretrained, "_refuse_code", lambda *_: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    load = load_language_model if kind == "model" else load_tokenizer
    with contextlib.suppress(UsageError):
        load(str(folder))
    assert not (folder.parent / "marker").exists()


class Opens:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_pickled_weights_do_not_run(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Opens(folder.parent / "marker")))
    refused(lambda: load_language_model(str(folder)), "cannot load")
    assert not (folder.parent / "marker").exists()
