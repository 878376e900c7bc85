"""Read files that may be damaged or hostile (JSON, safetensors, .npy, .npz), and write files whole or not at all.

Used by the cache (`retrain/store.py`), by imported ground truth and by result files. Every reader opens the file once,
refuses what is not a plain file, checks every declared size against the size on disk before anything is allocated, and
raises `SafeFileError` with one line that names the file, what is wrong and what was expected. Nothing is ever executed.

    arrays = read_arrays("losses.npz")          # {name: array}; also .npy and .safetensors
    record = read_json("run.json")
    write_whole("run.json", text)               # a reader sees the old file or the new one
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

MAX_JSON_BYTES = 16 * 2**20
MAX_JSON_DEPTH = 64
MAX_HEADER_BYTES = 16 * 2**20
MAX_ARRAY_BYTES = 8 * 2**30
MAX_ARRAYS = 100_000
MAX_DIMENSIONS = 32
# numpy writes .npy headers far below this; numpy's own reader has the same limit.
MAX_NPY_HEADER_BYTES = 10_000
# Deflate reaches about 1,000:1 on zeros; losses, scores and masks stay below 50:1.
MAX_COMPRESSION_RATIO = 200
ALWAYS_ALLOWED_BYTES = 16 * 2**20

SAFETENSORS_DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}

# The one form numpy.save writes. A pattern instead of literal_eval: nothing of the header is evaluated.
NPY_HEADER = re.compile(
    r"\{'descr': '(?P<descr>[^'\\]{1,16})', 'fortran_order': (?P<fortran>True|False), "
    r"'shape': \((?P<shape>[0-9, ]{0,700})\), \}[ ]*\n"
)
NPY_DESCR = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248])")


class SafeFileError(ValueError):
    """A file that is not what it should be; the message is one line that names it."""

    def __init__(self, path: str | os.PathLike[str], reason: str):
        self.path = Path(path)
        self.reason = one_line(reason)
        super().__init__(f"{one_line(str(path))}: {self.reason}")


def one_line(text: str, limit: int = 400) -> str:
    """`text` with control characters escaped and cut to `limit`, so a hostile name cannot forge lines of a log."""
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: limit + 1])
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def quoted(text: str, limit: int = 80) -> str:
    return f"'{one_line(text, limit)}'"


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write that takes its name when it is complete: a reader sees the old one or the new one, whole."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(draft, "xb") as file:
            yield file
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    with whole_file(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def open_plain(path: str | os.PathLike[str], max_bytes: int, *, follow_links: bool = False):
    """Open a regular file for reading and yield (file, its size); refuse folders, pipes, devices and symbolic links.

    The checks are made on the open file, not on its name, so it cannot be swapped between the check and the reading.
    O_NONBLOCK keeps a pipe without a writer from hanging the open.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if not follow_links and os.path.islink(path):
            raise SafeFileError(path, "is a symbolic link; a plain file was expected") from None
        if isinstance(error, FileNotFoundError):
            raise SafeFileError(path, "does not exist") from None
        raise SafeFileError(path, f"cannot be opened ({error.strerror})") from None
    except ValueError:
        raise SafeFileError(path, "is not a valid file name") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        raise SafeFileError(path, f"is {kind}; a plain file was expected")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > max_bytes:
            raise SafeFileError(path, f"has {status.st_size:,} bytes; at most {max_bytes:,} are read")
        try:
            yield file, status.st_size
        except OSError as error:
            raise SafeFileError(path, f"cannot be read ({error.strerror or error})") from None
        except MemoryError:
            raise SafeFileError(path, f"does not fit in memory ({status.st_size:,} bytes on disk)") from None


def read_exactly(file: IO[bytes], num_bytes: int, path: str | os.PathLike[str]) -> bytes:
    data = file.read(num_bytes)
    if len(data) != num_bytes:
        raise SafeFileError(path, f"ends after {len(data):,} of {num_bytes:,} expected bytes (truncated?)")
    return data


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES, *, follow_links: bool = False) -> str:
    """A UTF-8 text file of at most `max_bytes`."""
    with open_plain(path, max_bytes, follow_links=follow_links) as (file, size):
        data = read_exactly(file, size, path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SafeFileError(path, f"is not UTF-8 text (byte {error.start:,})") from None


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES, *, follow_links: bool = False) -> Any:
    """A JSON file, parsed strictly: see `parse_json`."""
    return parse_json(read_text(path, max_bytes, follow_links=follow_links), path)


def parse_json(text: str, path: str | os.PathLike[str]) -> Any:
    """JSON without NaN or infinities, without duplicate keys, and nested at most `MAX_JSON_DEPTH` deep."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise SafeFileError(path, f"has the JSON key {quoted(twice, 60)} twice")
        return table

    def no_constant(name: str) -> Any:
        raise SafeFileError(path, f"holds {name}, which is not JSON")

    def finite(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise SafeFileError(path, f"holds the number {one_line(digits, 40)}, which is not finite")
        return value

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant, parse_float=finite)
    except SafeFileError:
        raise
    except RecursionError:
        raise SafeFileError(path, f"is nested more than {MAX_JSON_DEPTH} levels deep") from None
    except ValueError as error:  # JSONDecodeError, and integers with thousands of digits
        raise SafeFileError(path, f"is not valid JSON ({error})") from None
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return value
    raise SafeFileError(path, f"is nested more than {MAX_JSON_DEPTH} levels deep")


def _checked_shape(shape: Any, what: str, path: str | os.PathLike[str]) -> tuple[int, ...]:
    if not isinstance(shape, (list, tuple)) or len(shape) > MAX_DIMENSIONS:
        raise SafeFileError(path, f"{what} has no valid shape (a list of at most {MAX_DIMENSIONS} sizes was expected)")
    if not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise SafeFileError(path, f"{what} has the shape {list(shape)[:8]}; sizes must be integers of at least 0")
    return tuple(shape)


def _check_booleans(array: np.ndarray, what: str, path: str | os.PathLike[str]) -> None:
    # numpy's behaviour is undefined for booleans whose byte is neither 0 nor 1.
    if array.dtype == np.bool_ and array.size and array.reshape(-1, order="A").view(np.uint8).max() > 1:
        raise SafeFileError(path, f"{what} holds booleans that are neither 0 nor 1")


def read_safetensors(
    path: str | os.PathLike[str],
    max_bytes: int = MAX_ARRAY_BYTES,
    *,
    digest: Any = None,
    follow_links: bool = False,
) -> dict[str, np.ndarray]:
    """All arrays of a .safetensors file; the file is read once, and hashed on the way when `digest` is given.

    The header's length is checked against the file's size before it is read, each array's offsets against its dtype
    and shape, and together they must tile the data without gap or overlap, as the format demands.
    """
    with open_plain(path, max_bytes, follow_links=follow_links) as (file, size):
        if size < 8:
            raise SafeFileError(path, f"has {size} bytes; a safetensors file has at least 8 (truncated?)")
        prefix = read_exactly(file, 8, path)
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise SafeFileError(
                path, f"declares a header of {header_bytes:,} bytes; at most {MAX_HEADER_BYTES:,} are read"
            )
        if 8 + header_bytes > size:
            raise SafeFileError(path, f"declares a header of {header_bytes:,} bytes but has only {size:,} (truncated?)")
        header = read_exactly(file, header_bytes, path)
        try:
            table = parse_json(header.decode("utf-8"), path)
        except UnicodeDecodeError:
            raise SafeFileError(path, "has a header that is not UTF-8 text") from None
        layout = _safetensors_layout(table, size - 8 - header_bytes, path)
        data = bytearray(size - 8 - header_bytes)
        view = memoryview(data)
        filled = 0
        if digest is not None:
            digest.update(prefix)
            digest.update(header)
        while filled < len(data):
            count = file.readinto(view[filled : filled + 2**22])  # type: ignore[attr-defined]
            if not count:
                raise SafeFileError(path, f"ends after {filled:,} of {len(data):,} bytes of data (truncated?)")
            if digest is not None:
                digest.update(view[filled : filled + count])
            filled += count
    arrays = {}
    for name, (dtype, shape, begin) in layout.items():
        array = np.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=begin).reshape(shape)
        _check_booleans(array, f"array {quoted(name, 60)}", path)
        arrays[name] = array if array.flags.aligned else array.copy()
    return arrays


def _safetensors_layout(
    table: Any, data_bytes: int, path: str | os.PathLike[str]
) -> dict[str, tuple[np.dtype, tuple[int, ...], int]]:
    if not isinstance(table, dict):
        raise SafeFileError(path, "has a header that is not a JSON object")
    if len(table) > MAX_ARRAYS:
        raise SafeFileError(path, f"declares {len(table):,} arrays; at most {MAX_ARRAYS:,} are read")
    layout: dict[str, tuple[np.dtype, tuple[int, ...], int]] = {}
    spans = []
    for name, fields in table.items():
        if name == "__metadata__":
            if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
                raise SafeFileError(path, "has __metadata__ that is not a table of strings")
            continue
        what = f"array {quoted(name, 60)}"
        if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
            raise SafeFileError(path, f"{what} needs exactly the fields dtype, shape and data_offsets")
        dtype = SAFETENSORS_DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
        if dtype is None:
            choices = ", ".join(SAFETENSORS_DTYPES)
            raise SafeFileError(path, f"{what} has dtype {one_line(repr(fields['dtype']), 60)}; supported: {choices}")
        shape = _checked_shape(fields["shape"], what, path)
        offsets = fields["data_offsets"]
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
            raise SafeFileError(path, f"{what} has data_offsets that are not two integers")
        begin, end = offsets
        expected = math.prod(shape) * dtype.itemsize
        if not 0 <= begin <= end <= data_bytes:
            raise SafeFileError(path, f"{what} lies at {begin}..{end}, outside the file's {data_bytes:,} bytes of data")
        if end - begin != expected:
            raise SafeFileError(
                path, f"{what} of shape {list(shape)[:8]} needs {expected:,} bytes but has {end - begin:,}"
            )
        layout[name] = (dtype, shape, begin)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            problem = "overlaps another" if begin < position else "leaves a gap before it"
            raise SafeFileError(path, f"array {quoted(name, 60)} {problem} (begins at {begin}, not {position})")
        position = end
    if position != data_bytes:
        raise SafeFileError(path, f"has {data_bytes:,} bytes of data but its arrays take {position:,}")
    return layout


def write_safetensors(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> str:
    """Write `arrays` to an open file in the safetensors format and return the sha256 of what was written.

    Deterministic: larger items first (which keeps every array aligned), then by name. Object, string, complex and
    structured dtypes are refused with a TypeError, as they have no place in the format.
    """
    prepared: list[tuple[str, str, np.ndarray]] = []
    for name, array in arrays.items():
        if not isinstance(name, str) or not name or name == "__metadata__":
            raise TypeError(f"an array's name must be a non-empty string other than __metadata__, not {name!r}")
        if not isinstance(array, (np.ndarray, np.generic)):
            raise TypeError(f"array {name!r} is a {type(array).__name__}; a numpy array was expected")
        little = np.dtype(array.dtype).newbyteorder("<")
        if little not in SAFETENSORS_NAMES:
            raise TypeError(f"array {name!r} has dtype {array.dtype}; supported: {', '.join(SAFETENSORS_DTYPES)}")
        # asarray, not ascontiguousarray: the latter turns a scalar into a vector.
        prepared.append((name, SAFETENSORS_NAMES[little], np.asarray(array, dtype=little, order="C")))
    prepared.sort(key=lambda item: (-item[2].itemsize, item[0]))
    header: dict[str, Any] = {}
    position = 0
    for name, dtype_name, array in prepared:
        offsets = [position, position + array.nbytes]
        header[name] = {"dtype": dtype_name, "shape": list(array.shape), "data_offsets": offsets}
        position += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    chunks = [memoryview(len(text).to_bytes(8, "little")), memoryview(text)]
    chunks += [array.reshape(-1).view(np.uint8).data for *_, array in prepared]
    for data in chunks:
        digest.update(data)
        for begin in range(0, len(data), 2**24):
            file.write(data[begin : begin + 2**24])
    return digest.hexdigest()


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
    shape = _checked_shape([int(part) for part in sizes], what, path)
    dtype = np.dtype(descr)
    expected = math.prod(shape) * dtype.itemsize
    available = size - len(magic) - length_bytes - header_bytes
    if expected != available:
        raise SafeFileError(
            path, f"{what} of shape {list(shape)[:8]} and dtype {descr} needs {expected:,} bytes but has {available:,}"
        )
    data = bytearray(read_exactly(file, expected, path))
    array = np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if match["fortran"] == "True" else "C")
    _check_booleans(array, what, path)
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
        except SafeFileError:
            raise
        except Exception as error:  # BadZipFile, zlib.error, struct.error, and whatever else zipfile meets in damage
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


def folder_bytes(folder: str | os.PathLike[str]) -> int:
    """Of all files below it; links are not followed, and what goes meanwhile counts as nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
