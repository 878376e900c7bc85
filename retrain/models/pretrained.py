"""Pretrained language models and tokenizers, from a local folder or the Hugging Face hub; every failure is one line.

    model = load_language_model("EleutherAI/pythia-14m@step45000")
    tokenizer = load_tokenizer("some/folder")         # or a .gguf file, or what `tda-bench fetch` got: "smollm2"

A hub download goes through huggingface_hub, which keeps only whole files: an interrupted one leaves nothing that a
later run could take for a model, and the same command resumes it. Before weights are used, every shard that the index
names must be there and hold every parameter.

Nothing of a model runs: a folder that asks for code of its own (`auto_map`) or for a kernel of the hub
(`_attn_implementation: "owner/kernel"`) is refused before transformers sees it, and every loader is told
`trust_remote_code=False`, because it would otherwise ask whoever is at the keyboard, or a pipe.
"""

import json
import math
import os
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct

from retrain.data.text import plain_text
from retrain.errors import UsageError, error_line
from retrain.models.causal_lm import CausalLM
from retrain.models.fetched import converted_gguf, fetched_folder
from retrain.safe_files import SafeFileError, matching, one_line, read_checked, read_text

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")


class WeightIndex(Struct):
    """*.index.json: which file of the folder holds each parameter."""

    weight_map: Annotated[dict[str, Annotated[str, matching(r"[\w][\w.-]*")]], Meta(min_length=1)]


def split_revision(name: str) -> tuple[str, str | None]:
    """("path or name", "revision" or None) of "PATH_OR_NAME[@revision]"; an existing path is taken as it is."""
    if not name:
        raise UsageError(
            'the model is ""; expected PATH_OR_NAME[@revision], for example EleutherAI/pythia-14m@step45000'
        )
    if os.path.exists(name) or "@" not in name:
        return name, None
    path, _, revision = name.rpartition("@")
    if not path or not revision:
        raise UsageError(f'the model is "{name}"; expected PATH_OR_NAME[@revision]')
    return path, revision


def is_local(name: str) -> bool:
    path, _ = split_revision(name)
    return os.path.exists(path) or path.startswith(("/", "./", "../", "~")) or fetched_folder(name) is not None


def model_folder(name: str, *, weights: bool = True, allow_download: bool = True) -> Path:
    """The local folder of a model, downloaded from the hub if need be; checked to be whole."""
    path, revision = split_revision(name)
    if path.endswith(".gguf") and Path(path).expanduser().is_file():
        return converted_gguf(Path(path).expanduser())
    if is_local(name):
        folder = fetched_folder(name) or Path(path).expanduser()
        if not folder.is_dir() and fetched_folder(name):
            raise UsageError(f'the model "{name}" is not on this machine; get it by tda-bench fetch {name}')
        if not folder.is_dir():
            raise UsageError(f'there is no model folder "{folder}"; expected one with config.json and *.safetensors')
        if revision:
            raise UsageError(f'"{folder}" is a folder, which has no revision "{revision}"; leave out @{revision}')
    else:
        folder = _download(path, revision, weights=weights, allow_download=allow_download)
    if not (folder / "config.json").is_file():
        raise UsageError(f'"{name}" has no config.json; expected a model in the format of transformers')
    _refuse_code(folder, name)
    if weights:
        _check_weights(folder, name)
    return folder


def source_of(name: str) -> str:
    """What a converted model's configuration says of where its weights come from; empty of any other."""
    try:
        content = json.loads(read_text(model_folder(name, weights=False) / "config.json", follow_links=True))
        return one_line(str(content.get("converted_from") or ""), 90)
    except (UsageError, SafeFileError, ValueError, AttributeError):
        return ""


def load_language_model(name: str, dtype: torch.dtype = torch.float32, *, allow_download: bool = True) -> CausalLM:
    """Any causal language model of transformers, in eval mode on the CPU. `name` is "PATH_OR_NAME[@revision]"."""
    folder = model_folder(name, allow_download=allow_download)
    try:
        transformer, report = _from_pretrained(folder, dtype)
    except UsageError:
        raise
    except Exception as error:  # transformers, safetensors and the config's own code raise whatever they like
        raise UsageError(f'cannot load "{name}" as a causal language model: {error_line(error, 200)}') from error
    missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report.get("mismatched_keys", ()))
    if missing:
        raise UsageError(
            f'the weights of "{name}" lack {len(missing)} parameters of its architecture, the first {missing[0]}; '
            "expected all of them, so this folder's config and weights do not belong together"
        )
    _as_linear(transformer)
    model = CausalLM(transformer).to(dtype).eval()
    model.check_head()
    return model


def load_tokenizer(name: str, *, allow_download: bool = True) -> Any:
    """The tokenizer that came with a model; it must be able to end a text."""
    from transformers import AutoTokenizer

    folder = model_folder(name, weights=False, allow_download=allow_download)
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        raise UsageError(f'"{name}" has no tokenizer.json; expected the tokenizer beside the model')
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UsageError(f'cannot load the tokenizer of "{name}": {error_line(error, 200)}') from error
    if tokenizer.eos_token_id is None:
        raise UsageError(f'the tokenizer of "{name}" has no end-of-text token (eos_token), which joins documents')
    return tokenizer


def check_vocabulary(tokenizer: Any, model: CausalLM, name: str) -> None:
    """Refuses a tokenizer that can give tokens the model has no embedding for."""
    if len(tokenizer) > model.vocabulary:
        raise UsageError(
            f'the tokenizer has {len(tokenizer):,} tokens and the model "{name}" only {model.vocabulary:,}; '
            "expected the tokenizer that the model was trained with"
        )


@torch.no_grad()
def loss_on_text(name: str, file: str, num_tokens: int, length: int = 512) -> str:
    """In words: nats a token and bits a byte, on sequences spread evenly over the text."""
    model, tokenizer = load_language_model(name), load_tokenizer(name)
    ids = torch.tensor(tokenizer(plain_text(file), add_special_tokens=False, verbose=False)["input_ids"])
    length = min(length, getattr(model.transformer.config, "max_position_embeddings", length))
    sequences = ids[: len(ids) // length * length].view(-1, length)
    if not len(sequences):
        raise UsageError(f'"{file}" has {len(ids)} tokens; expected at least {length}')
    chosen = sequences[:: -(-len(sequences) * length // num_tokens)]
    nats = float(torch.cat([model.token_losses(row[None, :-1], row[None, 1:]) for row in chosen]).mean())
    bits = nats * chosen.numel() / math.log(2) / sum(len(tokenizer.decode(row).encode()) for row in chosen)
    return f"{nats:.3f} nats a token, {bits:.3f} bits a byte: {len(chosen)} sequences of {length} tokens of {file}"


# ---- loading ----


def _as_linear(transformer: Any) -> None:
    """GPT-2's own Conv1D is a linear layer with its weight transposed, which no method would know."""
    from transformers.pytorch_utils import Conv1D

    for parent in list(transformer.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, Conv1D):
                linear = torch.nn.Linear(*layer.weight.shape, device="meta")  # type: ignore[misc]
                linear.weight = torch.nn.Parameter(layer.weight.data.T.contiguous())
                linear.bias = layer.bias
                setattr(parent, name, linear)


def _from_pretrained(folder: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    import transformers

    settings: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "output_loading_info": True}
    settings |= {"trust_remote_code": False, "weights_only": True}
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # its progress and reports; what matters is checked here
    transformers.logging.disable_progress_bar()
    try:
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        try:
            return load(str(folder), attn_implementation="sdpa", **settings)
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            return load(str(folder), attn_implementation="eager", **settings)
    finally:
        transformers.logging.set_verbosity(verbosity)


def _refuse_code(folder: Path, name: str) -> None:
    """A configuration of the model, its tokenizer or its generation that names Python to run."""
    for file in sorted(folder.glob("*config*.json")):
        try:
            content = json.loads(read_text(file, follow_links=True))  # the hub's cache is links
        except (SafeFileError, ValueError, RecursionError) as error:
            raise UsageError(
                f'"{file}" cannot be read ({error_line(error, 200)}); copy or download the model again'
            ) from None
        if field := _names_code(content):
            raise UsageError(
                f'"{name}" wants code that is not part of transformers to run ("{field}" in {file.name}), which is '
                "never done here; expected a model that transformers itself knows"
            )


def _names_code(content: Any) -> str:
    """The field that names code, at any depth: Python beside the model, or a kernel of the hub (owner/kernel)."""
    if isinstance(content, list):
        return next(filter(None, map(_names_code, content)), "")
    if not isinstance(content, dict):
        return ""
    for field, value in content.items():
        values = value.values() if isinstance(value, dict) else [value]  # one for all parts, or one a part
        kernel = "implementation" in field and any(isinstance(one, str) and "/" in one for one in values)
        if field == "auto_map" or kernel:
            return field
    return _names_code(list(content.values()))


def _check_weights(folder: Path, name: str) -> None:
    """Every shard that the index names is there; otherwise the download or the copy was cut short."""
    for index in sorted(folder.glob("*.index.json")):
        try:
            shards = sorted(set(read_checked(index, WeightIndex, follow_links=True)["weight_map"].values()))
        except SafeFileError as error:
            raise UsageError(f"{error}; copy or download the model again") from None
        if lacking := [shard for shard in shards if not (folder / shard).is_file()]:
            raise UsageError(
                f'"{name}" lacks {len(lacking)} of its {len(shards)} weight files, the first {lacking[0]}: '
                "the download or copy was interrupted; run it again"
            )
    files = [path for pattern in WEIGHTS for path in sorted(folder.glob(pattern))]
    if not files:
        raise UsageError(f'"{name}" has no weights; expected *.safetensors beside its config.json')
    from safetensors import SafetensorError, safe_open

    for file in files:
        if file.suffix == ".safetensors":
            try:
                with safe_open(str(file), framework="pt"):
                    pass
            except (SafetensorError, OSError) as error:
                raise UsageError(
                    f'"{file}" is damaged or cut short ({error_line(error, 200)}); copy or download the model again'
                ) from None


def _download(repository: str, revision: str | None, *, weights: bool, allow_download: bool) -> Path:
    patterns = [*SMALL_FILES, *(WEIGHTS[:1] if weights else ())]
    folder = Path(hub_snapshot(repository, revision, patterns, "model", allow_download))
    if weights and not any(folder.glob(WEIGHTS[0])):  # an old repository has only torch's own format
        folder = Path(hub_snapshot(repository, revision, [*SMALL_FILES, WEIGHTS[1]], "model", allow_download))
    return folder


def hub_snapshot(repository: str, revision: str | None, patterns: list[str], kind: str, allow_download: bool) -> str:
    """The folder of a hub repository's files; each failure in one line that says what to do. `kind`: model, dataset."""
    from huggingface_hub import constants, errors, snapshot_download

    full = f"{repository}@{revision}" if revision else repository
    option = "--model FOLDER" if kind == "model" else "--text FILE.jsonl"
    offline = not allow_download or constants.HF_HUB_OFFLINE
    try:
        return snapshot_download(
            repository, revision=revision, repo_type=kind, allow_patterns=patterns, local_files_only=offline
        )
    except Exception as error:
        page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{repository}/tree/main"
        command = f"hf download {repository}{f' --revision {revision}' if revision else ''}"
        command += " --repo-type dataset" if kind == "dataset" else ""
        said: dict[type[Exception], str] = {  # the first that fits; some of these are kinds of one another
            errors.RevisionNotFoundError: f'the hub\'s {kind} "{repository}" has no revision "{revision}"; see {page}',
            errors.GatedRepoError: f'the hub\'s {kind} "{repository}" asks for an agreement; accept it and log in',
            errors.RepositoryNotFoundError: f'there is no folder and no {kind} on the hub named "{repository}"',
            errors.HFValidationError: f'"{repository}" is neither a folder nor a name on the hub',
            errors.LocalEntryNotFoundError: f'the {kind} "{full}" is not on this machine and '
            f"{'downloads are off here' if offline else 'the hub cannot be reached'}; get it elsewhere by {command}",
            # Time-outs, broken connections, full disks: whole files stay, nothing half does.
            Exception: f'the download of "{full}" stopped ({error_line(error, 200)}); the same command resumes it',
        }
        words = next(words for kind_of, words in said.items() if isinstance(error, kind_of))
        raise UsageError(f"{words}, or pass {option}") from error
