"""Arrays from files that others made: .npy, .npz and .safetensors, as carefully as `retrain/safe_files.py` reads.

    arrays = read_arrays("losses.npz")          # {name: array}

Declared sizes are compared with what is there before anything is unpacked, and pickled objects are never loaded.
"""

from __future__ import annotations

import errno
import math
import os
import re
import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from retrain.safe_files import (
    MAX_ARRAY_BYTES,
    MAX_ARRAYS,
    SafeFileError,
    check_booleans,
    checked_shape,
    open_plain,
    quoted,
    read_exactly,
    read_safetensors,
)

# numpy writes .npy headers far below this; numpy's own reader has the same limit.
MAX_NPY_HEADER_BYTES = 10_000
# Deflate reaches about 1,000:1 on zeros; losses, scores and masks stay below 50:1.
MAX_COMPRESSION_RATIO = 200
ALWAYS_ALLOWED_BYTES = 16 * 2**20

# The one form numpy.save writes. A pattern instead of literal_eval: nothing of the header is evaluated.
NPY_HEADER = re.compile(
    r"\{'descr': '(?P<descr>[^'\\]{1,16})', 'fortran_order': (?P<fortran>True|False), "
    r"'shape': \((?P<shape>[0-9, ]{0,700})\), \}[ ]*\n"
)
NPY_DESCR = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248])")


def _parse_npy(file: IO[bytes], size: int, path: str | os.PathLike[str], what: str = "the file") -> np.ndarray:
    """The array of a .npy stream of `size` bytes."""
    magic = read_exactly(file, min(size, 8), path)
    if magic[:6] != b"\x93NUMPY" or len(magic) < 8:
        raise SafeFileError(path, f"{what} does not begin like a .npy file")
    if magic[6:] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise SafeFileError(path, f"{what} has .npy version {magic[6]}.{magic[7]}; 1.0, 2.0 and 3.0 are read")
    length_bytes = 2 if magic[6] == 1 else 4
    header_bytes = int.from_bytes(read_exactly(file, length_bytes, path), "little")
    if header_bytes > MAX_NPY_HEADER_BYTES:
        raise SafeFileError(
            path, f"{what} declares a header of {header_bytes:,} bytes; at most {MAX_NPY_HEADER_BYTES:,} are read"
        )
    header = read_exactly(file, header_bytes, path).decode("latin-1")
    match = NPY_HEADER.fullmatch(header)
    if match is None:
        raise SafeFileError(path, f"{what} has a .npy header that numpy.save does not write: {quoted(header, 80)}")
    descr = match["descr"]
    if not NPY_DESCR.fullmatch(descr):
        hint = "; it holds pickled objects, which are never loaded" if "O" in descr else ""
        raise SafeFileError(path, f"{what} has dtype {descr!r}; booleans, integers and floats are read{hint}")
    sizes = [part.strip() for part in match["shape"].split(",")]
    if sizes[-1] == "":
        sizes.pop()
    if not all(re.fullmatch(r"[0-9]{1,19}", part) for part in sizes):
        raise SafeFileError(path, f"{what} has the shape ({match['shape']}); sizes must be integers of at least 0")
    shape = checked_shape([int(part) for part in sizes], what, path)
    dtype = np.dtype(descr)
    expected = math.prod(shape) * dtype.itemsize
    available = size - len(magic) - length_bytes - header_bytes
    if expected != available:
        raise SafeFileError(
            path, f"{what} of shape {list(shape)[:8]} and dtype {descr} needs {expected:,} bytes but has {available:,}"
        )
    data = bytearray(read_exactly(file, expected, path))
    array = np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if match["fortran"] == "True" else "C")
    check_booleans(array, what, path)
    return array


def read_npy(
    path: str | os.PathLike[str], max_bytes: int = MAX_ARRAY_BYTES, *, follow_links: bool = False
) -> np.ndarray:
    """The array of a .npy file: booleans, integers and floats only; objects (pickle) are refused by their dtype."""
    with open_plain(path, max_bytes, follow_links=follow_links) as (file, size):
        return _parse_npy(file, size, path)


def read_npz(
    path: str | os.PathLike[str], max_bytes: int = MAX_ARRAY_BYTES, *, follow_links: bool = False
) -> dict[str, np.ndarray]:
    """The arrays of a .npz file, whose declared sizes are checked before any member is decompressed."""
    with open_plain(path, max_bytes, follow_links=follow_links) as (file, size):
        if file.read(4) not in (b"PK\x03\x04", b"PK\x05\x06"):
            raise SafeFileError(path, "does not begin like a .npz (zip) file")
        file.seek(0)
        try:
            return _parse_npz(file, size, max_bytes, path)
        except (SafeFileError, MemoryError):
            raise
        except Exception as error:  # BadZipFile, zlib.error, struct.error, and whatever else zipfile meets in damage
            # A damaged directory makes zipfile seek to nowhere; any other error of the system is the system's own.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise
            raise SafeFileError(path, f"is a damaged .npz file ({type(error).__name__}: {error})") from None


def _parse_npz(file: IO[bytes], size: int, max_bytes: int, path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    arrays = {}
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if len(members) > MAX_ARRAYS:
            raise SafeFileError(path, f"has {len(members):,} members; at most {MAX_ARRAYS:,} are read")
        names = set()
        for member in members:
            name = member.filename
            what = f"member {quoted(name, 80)}"
            parts = re.split(r"[/\\]", name)
            if name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or not name.isprintable():
                raise SafeFileError(path, f"{what} has a path that leads out of the archive")
            if not name.endswith(".npy"):
                raise SafeFileError(path, f"{what} is not a .npy array")
            if name in names:
                raise SafeFileError(path, f"{what} is there twice")
            names.add(name)
            if member.flag_bits & 0x1:
                raise SafeFileError(path, f"{what} is encrypted")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise SafeFileError(path, f"{what} uses compression {member.compress_type}; stored or deflated is read")
        declared = sum(member.file_size for member in members)
        if declared > max_bytes:
            raise SafeFileError(path, f"unpacks to {declared:,} bytes; at most {max_bytes:,} are read (a zip bomb?)")
        if declared > ALWAYS_ALLOWED_BYTES and declared > MAX_COMPRESSION_RATIO * size:
            raise SafeFileError(
                path,
                f"unpacks from {size:,} to {declared:,} bytes, more than {MAX_COMPRESSION_RATIO}:1 (a zip bomb?); "
                "if it is yours, save it with numpy.savez, uncompressed",
            )
        for member in members:
            with archive.open(member) as stream:
                name = member.filename.removesuffix(".npy")
                arrays[name] = _parse_npy(stream, member.file_size, path, f"member {quoted(name, 80)}")
                # Reading to the end makes zipfile compare the member's checksum.
                if stream.read(1):
                    raise SafeFileError(path, f"member {quoted(name, 80)} is longer than it declares")
    return arrays


def read_arrays(
    path: str | os.PathLike[str], max_bytes: int = MAX_ARRAY_BYTES, *, follow_links: bool = False
) -> dict[str, np.ndarray]:
    """The arrays of a .safetensors, .npz or .npy file (the last under the name "array")."""
    suffix = Path(path).suffix.lower()
    if suffix == ".safetensors":
        return read_safetensors(path, max_bytes, follow_links=follow_links)
    if suffix == ".npz":
        return read_npz(path, max_bytes, follow_links=follow_links)
    if suffix == ".npy":
        return {"array": read_npy(path, max_bytes, follow_links=follow_links)}
    raise SafeFileError(path, "has an unknown ending; .safetensors, .npz and .npy are read")
