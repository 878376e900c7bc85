"""Damaged and hostile files: every one is refused with one line, none is executed."""

import contextlib
import io
import json
import math
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import safetensors.numpy
from msgspec import Meta, Struct

from retrain import safe_files
from retrain.safe_files import SafeFileError, matching, read_arrays, read_json, validate

ARRAYS = {
    "loss": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
    "mask": np.array([[True, False], [False, True]]),
    "index": np.arange(5),
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 3), np.float16),
    "bytes": np.arange(3, dtype=np.uint8),
}


def tensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def npy(descr="'<f4'", shape="(2,)", data=b"\0" * 8, version=b"\x01\x00", length=None, magic=b"\x93NUMPY"):
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    size = struct.pack("<H" if version[0] == 1 else "<I", len(text) if length is None else length)
    return magic + version + size + text + data


def npz(members, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for member in members:
            archive.writestr(*member)
    return buffer.getvalue()


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch executed",))


def pickled_npy():
    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb()], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def lying_npz():
    """A member that declares 8 bytes of array and inflates to far more: the central directory lies."""
    bomb = npz([("a.npy", npy() + b"\0" * 10_000_000)], zipfile.ZIP_DEFLATED)
    return bomb.replace(struct.pack("<I", len(npy()) + 10_000_000), struct.pack("<I", len(npy())))


def encrypted_npz():
    data = bytearray(npz([("a.npy", npy())]))
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


GOOD_TENSORS = tensors({"a": tensor()}, b"\0" * 8)
GOOD_NPZ = npz([("a.npy", npy())])
HOSTILE = {
    "empty.safetensors": b"",
    "header_10GB.safetensors": tensors({}, length=10 * 2**30),
    "truncated.safetensors": GOOD_TENSORS[:-3],
    "trailing.safetensors": GOOD_TENSORS + b"x",
    "not_json.safetensors": tensors(b"{not json"),
    "duplicate.safetensors": tensors(b'{"a": 1, "a": 2}'),
    "nested.safetensors": tensors(b"[" * 100_000),
    "overlap.safetensors": tensors({"a": tensor(), "b": tensor()}, b"\0" * 8),
    "negative.safetensors": tensors({"a": tensor(shape=(-2, -1))}, b"\0" * 8),
    "overflow.safetensors": tensors({"a": tensor(shape=(2**32, 2**32, 2**32))}, b"\0" * 8),
    "hidden_size.safetensors": tensors({"a": tensor(shape=(2**62, 0), offsets=(0, 0))}),
    "object_dtype.safetensors": tensors({"a": tensor(dtype="O")}, b"\0" * 8),
    "booleans.safetensors": tensors({"a": tensor("BOOL", (8,))}, b"\7" * 8),
    "newline_name.safetensors": tensors({"a\nroot logged in": tensor(dtype="X")}, b"\0" * 8),
    "pickle.npy": pickled_npy(),
    "raw_pickle.npy": pickle.dumps(Bomb()),
    "header_4GB.npy": npy(version=b"\x02\x00", length=2**32 - 1),
    "truncated.npy": npy(data=b"\0" * 5),
    "trailing.npy": npy(data=b"\0" * 9),
    "huge_shape.npy": npy(shape="(9223372036854775807, 4)"),
    "overflow.npy": npy(shape="(99999999999999999999,)"),
    "code.npy": npy(shape="(__import__('os').system('touch executed'),)"),
    "structured.npy": npy(descr="[('a', '<f4')]"),
    "bomb.npz": npz([("a.npy", npy(shape="(25000000,)", data=b"\0" * 10**8))], zipfile.ZIP_DEFLATED),
    "lying.npz": lying_npz(),
    "many.npz": npz([(f"{i}.npy", npy(data=b"\0" * (2**22 - 62))) for i in range(8)], zipfile.ZIP_DEFLATED),
    "climbs.npz": npz([("../../evil.npy", npy())]),
    "stranger.npz": npz([("a.py", b"import os")]),
    "pickle.npz": npz([("a.npy", pickled_npy())]),
    "encrypted.npz": encrypted_npz(),
    "truncated.npz": GOOD_NPZ[:-10],
    "edited.npz": GOOD_NPZ.replace(b"\0" * 8 + b"PK\x01", b"\1" + b"\0" * 7 + b"PK\x01"),
    "unknown.pkl": pickle.dumps(Bomb()),
    "nan.json": b'{"a": NaN}',
    "huge_float.json": b'{"a": 1e999}',
    "400_digits.json": b'{"a": -' + b"9" * 400 + b"}",
    "half_a_character.json": rb'{"a": ["\ud800x"]}',
    "deep.json": b"[" * 200_000 + b"]" * 200_000,
    "truncated.json": b'{"a": [1, 2',
    "binary.json": b"\x80\x04\x95",
    "large.json": b" " * (16 * 2**20 + 1),
}


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("executed").exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_or_damaged_file_is_refused_in_one_line(name):
    Path(name).write_bytes(HOSTILE[name])
    with pytest.raises(SafeFileError) as caught:
        read_json(name) if name.endswith(".json") else read_arrays(name)
    message = str(caught.value)
    assert message.startswith(name)
    assert message.isprintable()


def test_sparse_giants_and_what_is_not_a_plain_file_or_folder_are_refused_unread():
    for name in ("giant.json", "giant.npy", "giant.npz", "giant.safetensors"):
        Path(name).touch()
        os.truncate(name, 2**40)
        with pytest.raises(SafeFileError, match="bytes"):
            read_json(name) if name.endswith(".json") else read_arrays(name)

    os.mkfifo("pipe.npy")
    Path("folder.npy").mkdir()
    Path("real.npy").write_bytes(npy())
    Path("link.npy").symlink_to("real.npy")
    Path("device.npy").symlink_to("/dev/zero")
    for name, reason in {
        "pipe.npy": "pipe",
        "folder.npy": "folder",
        "link.npy": "symbolic link",
        "device.npy": "symbolic link",
        "absent.npy": "does not exist",
        "nul\0.npy": "not a valid file name",
    }.items():
        with pytest.raises(SafeFileError, match=reason):
            read_arrays(name)
    with pytest.raises(SafeFileError, match="device"):
        read_arrays("device.npy", follow_links=True)
    assert read_arrays("link.npy", follow_links=True)["array"].shape == (2,)
    Path("real").mkdir()
    Path("link").symlink_to("real")
    Path("file").write_text("")
    assert safe_files.make_folder("real") == safe_files.make_folder(Path("real")) == Path("real")
    assert safe_files.make_folder("new").is_dir()
    for name in ("link", "file"):
        with pytest.raises(NotADirectoryError, match=name):
            safe_files.make_folder(name)


def test_every_truncation_and_bit_flip_of_sound_files_is_refused_or_sound():
    """No damage ends in anything but a SafeFileError or arrays: flips in the data itself are for checksums to find."""
    rng = np.random.default_rng(0)
    np.savez_compressed("a.npz", **ARRAYS)
    np.save("a.npy", ARRAYS["loss"])
    with open("a.safetensors", "wb") as file:
        safe_files.write_safetensors(file, ARRAYS)
    for name in ("a.npz", "a.npy", "a.safetensors"):
        data = Path(name).read_bytes()
        with open(name, "r+b", buffering=0) as file:
            for position in rng.integers(len(data), size=300):
                os.pwrite(file.fileno(), bytes([data[position] ^ 1 << int(rng.integers(8))]), position)
                with contextlib.suppress(SafeFileError):
                    read_arrays(name)
                os.pwrite(file.fileno(), data[position : position + 1], position)
        for cut in reversed(range(0, len(data), 7)):
            os.truncate(name, cut)
            with pytest.raises(SafeFileError):
                read_arrays(name)


def test_sound_files_come_back_exactly():
    np.savez("plain.npz", **ARRAYS)
    np.savez_compressed("packed.npz", **ARRAYS)
    safetensors.numpy.save_file(ARRAYS, "library.safetensors")
    with open("own.safetensors", "wb") as file:
        safe_files.write_safetensors(file, ARRAYS)
    library = safetensors.numpy.load_file("own.safetensors")
    for loaded in [library, *map(read_arrays, ("plain.npz", "packed.npz", "library.safetensors", "own.safetensors"))]:
        assert loaded.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert loaded[name].dtype == array.dtype
            np.testing.assert_array_equal(loaded[name], array)
            assert loaded[name].shape == array.shape
    for array in (np.asfortranarray(ARRAYS["loss"]), ARRAYS["loss"].astype(">f8"), np.array(True), np.zeros((0, 2))):
        np.save("one.npy", array)
        np.testing.assert_array_equal(read_arrays("one.npy")["array"], array)
    with open("big_endian.safetensors", "wb") as file:
        safe_files.write_safetensors(file, {"a": np.arange(3, dtype=">i4"), "t": ARRAYS["loss"].T})
    loaded = read_arrays("big_endian.safetensors")
    np.testing.assert_array_equal(loaded["a"], [0, 1, 2])
    np.testing.assert_array_equal(loaded["t"], ARRAYS["loss"].T)
    # A legitimate, highly compressible array of moderate size is read.
    np.savez_compressed("zeros.npz", a=np.zeros(10**6, np.float32))
    assert read_arrays("zeros.npz")["a"].sum() == 0
    for array in (np.array([object()]), np.array(["a"]), np.array([1j]), [1.0]):
        with pytest.raises(TypeError, match="array 'a'"):
            safe_files.write_safetensors(io.BytesIO(), {"a": array})


# ---- shapes of JSON files: what passes, and the line that says where something is wrong ----
class Event(Struct):
    event: Annotated[str, matching("done|failed")]
    time: Annotated[float, Meta(ge=0)]
    key: Annotated[str, matching("[0-9a-f]{4}", words="a key")] = ""


class Run(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(max_length=10)]
    events: list[Event]
    seed: Annotated[int, Meta(ge=0)]
    options: dict[str, Any]
    best: float | None = None


GOOD = {"name": "größe", "events": [{"event": "done", "time": 1}], "seed": 10**30, "options": {"a": [1]}, "best": None}


def test_what_is_right_comes_back_unchanged() -> None:
    assert validate(GOOD, Run, "run.json") is GOOD
    assert validate({"event": "done", "time": 1, "more": 2}, Event, "x")["more"] == 2
    assert safe_files.conforms([], list[Event])
    assert not safe_files.conforms({}, list[Event])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"name": "x" * 11}, "name is 'xxxxxxxxxxx'; expected str of length <= 10"),
        ({"seed": -1}, "seed is -1; expected int >= 0"),
        ({"seed": True}, "seed is true; expected int"),
        ({"seed": "\n\x1b[2J"}, "seed is '"),
        ({"events": [{"event": "exploded", "time": 1}]}, r"events\[0\].event is 'exploded'; expected text like done"),
        ({"events": [{"event": "done", "time": math.nan}]}, r"events\[0\].time is nan"),
        ({"events": [{"event": "done", "time": 1, "key": "abcd\n"}]}, r"events\[0\].key is 'abcd.*; expected a key"),
        ({"colour": 1}, "its content is a table of 6; object contains unknown field colour"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(change: dict[str, Any], line: str) -> None:
    with pytest.raises(SafeFileError, match=line) as caught:
        validate({**GOOD, **change}, Run, "run.json")
    assert str(caught.value).startswith("run.json: ")
    assert str(caught.value).isprintable()
