"""Read files that may be damaged or hostile (text, JSON, arrays), and write files whole or not at all.

Used by the cache (`retrain/store.py`), by imported ground truth and by result files. Every reader opens the file once,
refuses what is not a plain file, checks every declared size against the size on disk before anything is allocated, and
raises `SafeFileError` with one line that names the file, what is wrong and what was expected. Nothing is ever executed.
A `PassingFileError` says that the system could not read the file now (too many open files, a server that is away): it
tells nothing about the file, which may be sound.

    record = read_json("run.json")
    record = read_checked("run.json", RunRecord)  # of the shape that a msgspec Struct describes
    arrays = read_arrays("losses.npz")          # {name: array}; also .npy and .safetensors
    write_whole("run.json", text)               # a reader sees the old file or the new one
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, get_args, get_origin

import msgspec
import numpy as np
import safetensors.numpy

MAX_JSON_BYTES = 16 * 2**20
MAX_JSON_DEPTH = 64
MAX_INTEGER_DIGITS = 100  # whatever JSON writes it: such a number is still a float, an OverflowError is none
MAX_HEADER_BYTES = 16 * 2**20
MAX_ARRAY_BYTES = 8 * 2**30
MAX_ARRAYS = 100_000
MAX_DIMENSIONS = 32

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

# What these answers to open() say, they say about the file; any other is about the system's day.
ABOUT_THE_FILE = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENXIO,
    errno.ENODEV,
    errno.ENAMETOOLONG,
}
SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class SafeFileError(ValueError):
    """A file that is not what it should be; the message is one line that names it."""

    def __init__(self, path: str | os.PathLike[str], reason: str):
        self.path = Path(path)
        self.reason = one_line(reason)
        super().__init__(f"{one_line(str(path))}: {self.reason}")


class PassingFileError(SafeFileError):
    """A file that could not be read this time; nothing is known about what it holds."""


def one_line(text: str, limit: int = 400) -> str:
    """`text` with control characters escaped and cut to `limit`, so a hostile name cannot forge lines of a log."""
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: limit + 1])
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def quoted(text: str) -> str:
    return f"'{one_line(text, 80)}'"


def is_text(value: str) -> bool:
    """Whether a string is characters only: JSON can also hold half of a surrogate pair, which no file takes."""
    if value.isascii():
        return True
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def make_folder(path: str | os.PathLike[str]) -> Path:
    """A folder that is there afterwards and is no link: what is written into it stays below its parent."""
    with suppress(FileExistsError):
        os.mkdir(path)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "Not a folder but a link or a file", os.fspath(path))
    return Path(path)


@contextmanager
def whole_file(path: str | os.PathLike[str], *, sync: bool = True) -> Iterator[IO[bytes]]:
    """A file to write that takes its name when it is complete: a reader sees the old one or the new one, whole.

    `sync` flushes the file before it takes its name, and the folder after, so that a crash of the machine leaves no
    empty file under that name.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(draft, "xb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
        if sync:
            sync_folder(path.parent)
    finally:
        with suppress(OSError):
            draft.unlink()


def sync_folder(path: str | os.PathLike[str]) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def write_whole(path: str | os.PathLike[str], content: str | bytes, *, sync: bool = True) -> None:
    with whole_file(path, sync=sync) as file:
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
        error_type = SafeFileError if error.errno in ABOUT_THE_FILE else PassingFileError
        raise error_type(path, f"cannot be opened ({error.strerror})") from None
    except ValueError:
        raise SafeFileError(path, "is not a valid file name") from None
    try:
        status = os.fstat(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise PassingFileError(path, f"cannot be read ({error.strerror})") from None
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
            raise PassingFileError(path, f"cannot be read ({error.strerror or error})") from None
        except MemoryError:
            raise PassingFileError(path, f"does not fit in memory ({status.st_size:,} bytes on disk)") from None


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
    """JSON without NaN, infinities, endless integers, halves of characters or duplicate keys, and not nested deeply."""
    try:
        value = _STRICT.decode(text)
        if SURROGATE_ESCAPE.search(text) and not is_text(json.dumps(value, ensure_ascii=False)):
            raise _Refused("holds half of a surrogate pair, which is no character")
    except _Refused as refused:
        raise SafeFileError(path, str(refused)) from None
    except RecursionError:
        raise SafeFileError(path, f"is nested more than {MAX_JSON_DEPTH} levels deep") from None
    except ValueError as error:
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


class _Refused(ValueError):
    """What is valid JSON to Python, and not to us."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise _Refused(f"has the JSON key {quoted(twice)} twice")
    return table


def _no_constant(name: str) -> Any:
    raise _Refused(f"holds {name}, which is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _Refused(f"holds the number {one_line(digits, 40)}, which is not finite")
    return value


def _bounded(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:
        raise _Refused(f"holds a number of {len(digits):,} digits, more than {MAX_INTEGER_DIGITS}")
    return int(digits)


_STRICT = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, parse_int=_bounded
)


# ---- shapes of JSON files ----

_WORDS: dict[str, str] = {}  # a pattern as msgspec's errors show it -> the words that say the same


def matching(pattern: str, max_length: int | None = None, *, words: str = "") -> msgspec.Meta:
    """For a field `Annotated[str, matching(...)]`: the whole text matches. `words` replace the pattern in an error."""
    whole = rf"\A(?:{pattern})\Z"
    _WORDS[f"`str` matching regex {whole!r}"] = words or f"text like {pattern}"
    return msgspec.Meta(pattern=whole, max_length=max_length)


def validate(value: Any, kind: Any, path: str | os.PathLike[str], where: str = "") -> Any:
    """`value` itself, when it has the shape of `kind`: a msgspec Struct, or any type that msgspec knows.

    Nothing is converted or dropped: fields that the Struct does not name stay, unless it forbids them. Otherwise
    `SafeFileError` names the file, the place in it, what came and what was expected.
    """
    if get_origin(kind) is dict and isinstance(value, dict):  # msgspec does not name the key that is at fault
        for name, item in value.items():
            validate(item, get_args(kind)[1], path, f"{where}.{name}" if where else name)
        return value
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        for pattern, words in _WORDS.items():
            what = what.replace(pattern, words)
        found = _at(value, place.rstrip("`"))
        here = f"{where}{place.rstrip('`')}".removeprefix(".") or "its content"
        what = what.replace("`", "")
        raise SafeFileError(path, f"{here}{found}; {what[:1].lower()}{what[1:]}") from None
    return value


def conforms(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def read_checked(
    path: str | os.PathLike[str], kind: Any, max_bytes: int = MAX_JSON_BYTES, *, follow_links: bool = False
) -> Any:
    """A JSON file as plain data, when it has the shape of `kind`."""
    return validate(read_json(path, max_bytes, follow_links=follow_links), kind, path)


def _at(value: Any, place: str) -> str:
    """ " is VALUE" for what lies at a place like .rows[3].lds; nothing where that cannot be said."""
    for name, index in re.findall(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]", place):
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            return ""
    if value is None:
        return " is null"
    if isinstance(value, (dict, list)):
        return f" is a {'table' if isinstance(value, dict) else 'list'} of {len(value):,}"
    if type(value) is int and abs(value) >= 10**20:  # the repr of an endless one is refused by Python itself
        return " is a number of more than 20 digits"
    return f" is {one_line(str(value).lower() if isinstance(value, bool) else repr(value)[:200], 60)}"


# ---- arrays ----


def check_booleans(array: np.ndarray, what: str, path: str | os.PathLike[str]) -> None:
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
    """All arrays of a .safetensors file; the file is read once, and hashed when `digest` is given.

    The library compares every declared size with the bytes that are there: arrays tile the data without gap or overlap.
    """
    with open_plain(path, max_bytes, follow_links=follow_links) as (file, size):
        header_bytes = int.from_bytes(read_exactly(file, min(size, 8), path), "little")
        if size < 8 or header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise SafeFileError(path, f"declares a header of {header_bytes:,} bytes but has {size:,} (truncated?)")
        file.seek(0)
        data = read_exactly(file, size, path)
        if digest is not None:
            digest.update(data)
        try:
            tensors = safetensors.deserialize(data)
        except safetensors.SafetensorError as error:
            raise SafeFileError(path, f"is no sound safetensors file ({error})") from None
        del data
        arrays = {}
        for name, tensor in tensors:
            what = f"array {quoted(name)}"
            dtype = SAFETENSORS_DTYPES.get(tensor["dtype"])
            if dtype is None:
                choices = ", ".join(SAFETENSORS_DTYPES)
                raise SafeFileError(path, f"{what} has dtype {one_line(tensor['dtype'], 60)}; supported: {choices}")
            shape = checked_shape(tensor["shape"], what, path)
            arrays[name] = np.frombuffer(tensor["data"], dtype=dtype).reshape(shape)
            check_booleans(arrays[name], what, path)
        return arrays


def checked_shape(shape: Sequence[int], what: str, path: str | os.PathLike[str]) -> tuple[int, ...]:
    """A size of 0 hides the others from every comparison with the bytes there are, but not from numpy."""
    if len(shape) > MAX_DIMENSIONS or math.prod(size for size in shape if size) >= 2**59:
        raise SafeFileError(path, f"{what} has the shape {list(shape)[:8]}, larger than any array")
    return tuple(shape)


def write_safetensors(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> str:
    """Write `arrays` to an open file in the safetensors format and return the sha256 of what was written.

    Object, string, complex and structured dtypes are refused with a TypeError, as they have no place in the format.
    """
    tensors = {}
    for name, array in arrays.items():
        if not isinstance(name, str) or not name or not is_text(name) or name == "__metadata__":
            raise TypeError(f"an array's name must be a non-empty text other than __metadata__, not {name!r}")
        if not isinstance(array, (np.ndarray, np.generic)):
            raise TypeError(f"array {name!r} is a {type(array).__name__}; a numpy array was expected")
        little = np.dtype(array.dtype).newbyteorder("<")
        if little not in SAFETENSORS_NAMES:
            raise TypeError(f"array {name!r} has dtype {array.dtype}; supported: {', '.join(SAFETENSORS_DTYPES)}")
        # asarray, not ascontiguousarray: the latter turns a scalar into a vector.
        tensors[name] = np.asarray(array, dtype=little, order="C")
    data = safetensors.numpy.save(tensors)
    if int.from_bytes(data[:8], "little") > MAX_HEADER_BYTES or len(tensors) > MAX_ARRAYS:
        raise TypeError(f"{len(tensors):,} arrays are more than can be read back")
    with ThreadPoolExecutor(1) as pool:  # the digest is taken while the disk writes: neither waits for the other
        digest = pool.submit(hashlib.sha256, data)
        file.write(data)
        file.flush()
        return digest.result().hexdigest()


# ---- .npy and .npz, which others make ----

# Deflate reaches about 1,000:1 on zeros; losses, scores and masks stay below 50:1.
MAX_COMPRESSION_RATIO = 200
ALWAYS_ALLOWED_BYTES = 16 * 2**20
MEMBER = re.compile(r"\w[\w .-]*(/\w[\w .-]*)*\.npy")  # leads nowhere else, wherever somebody unpacks it


def _load_npy(file: IO[bytes], size: int, path: str | os.PathLike[str], what: str) -> np.ndarray:
    """By numpy, after the header's claims were compared with the `size` that is there; objects (pickle) are refused."""
    try:
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, _, dtype = readers[np.lib.format.read_magic(file)](file)
    except OSError:
        raise
    except Exception as error:  # numpy reads the header as a Python literal: damage ends in whatever the parser raises
        raise SafeFileError(path, f"{what} does not begin like a .npy file ({error})") from None
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        hint = "; it holds pickled objects, which are never loaded" if dtype.hasobject else ""
        raise SafeFileError(path, f"{what} has dtype {dtype}; booleans, integers and floats are read{hint}")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise SafeFileError(path, f"{what} has the shape {shape}; sizes must be integers of at least 0")
    expected = math.prod(checked_shape(shape, what, path)) * dtype.itemsize
    if expected != size - file.tell():
        needs = f"needs {expected:,} bytes but has {size - file.tell():,}"
        raise SafeFileError(path, f"{what} of shape {list(shape)[:8]} and dtype {dtype} {needs}")
    file.seek(0)
    array = np.load(file, allow_pickle=False)
    check_booleans(array, what, path)
    return array


def read_npz(
    path: str | os.PathLike[str], max_bytes: int = MAX_ARRAY_BYTES, *, follow_links: bool = False
) -> dict[str, np.ndarray]:
    """The arrays of a .npz file, whose declared sizes are checked before any member is decompressed."""
    with open_plain(path, max_bytes, follow_links=follow_links) as (file, size):
        if file.read(4) not in (b"PK\x03\x04", b"PK\x05\x06"):  # zipfile would take an error of the disk for damage
            raise SafeFileError(path, "does not begin like a .npz (zip) file")
        try:
            with zipfile.ZipFile(file) as archive:
                return {name: _member(archive, name, path) for name in _names(archive, size, max_bytes, path)}
        except (SafeFileError, MemoryError):
            raise
        except Exception as error:  # BadZipFile, zlib.error, struct.error, and whatever else zipfile meets in damage
            # A damaged directory makes zipfile seek to nowhere; any other error of the system is the system's own.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise
            raise SafeFileError(path, f"is a damaged .npz file ({type(error).__name__}: {error})") from None


def _names(archive: zipfile.ZipFile, size: int, max_bytes: int, path: str | os.PathLike[str]) -> list[str]:
    """Of the arrays in an archive of `size` bytes."""
    members, methods = archive.infolist(), (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    for member in members:
        if not MEMBER.fullmatch(member.filename) or member.compress_type not in methods:
            raise SafeFileError(path, f"member {quoted(member.filename)} is no .npy array, stored or deflated")
    names = [member.filename.removesuffix(".npy") for member in members]
    if not len(set(names)) == len(names) <= MAX_ARRAYS:
        raise SafeFileError(path, f"has {len(names):,} members; expected at most {MAX_ARRAYS:,} of different names")
    declared = sum(member.file_size for member in members)
    if declared > max_bytes:
        raise SafeFileError(path, f"unpacks to {declared:,} bytes; at most {max_bytes:,} are read (a zip bomb?)")
    if declared > ALWAYS_ALLOWED_BYTES and declared > MAX_COMPRESSION_RATIO * size:
        raise SafeFileError(
            path,
            f"unpacks from {size:,} to {declared:,} bytes, more than {MAX_COMPRESSION_RATIO}:1 (a zip bomb?); "
            "if it is yours, save it with numpy.savez, uncompressed",
        )
    return names


def _member(archive: zipfile.ZipFile, name: str, path: str | os.PathLike[str]) -> np.ndarray:
    what, member = f"member {quoted(name)}", archive.getinfo(f"{name}.npy")
    with archive.open(member) as stream:
        array = _load_npy(stream, member.file_size, path, what)
        if stream.read(1):  # reading to the end makes zipfile compare the member's checksum
            raise SafeFileError(path, f"{what} is longer than it declares")
    return array


def read_arrays(path: str | os.PathLike[str], *, follow_links: bool = False) -> dict[str, np.ndarray]:
    """The arrays of a .safetensors, .npz or .npy file (the last under the name "array")."""
    suffix = Path(path).suffix.lower()
    if suffix == ".safetensors":
        return read_safetensors(path, follow_links=follow_links)
    if suffix == ".npz":
        return read_npz(path, follow_links=follow_links)
    if suffix == ".npy":
        with open_plain(path, MAX_ARRAY_BYTES, follow_links=follow_links) as (file, size):
            return {"array": _load_npy(file, size, path, "the file")}
    raise SafeFileError(path, "has an unknown ending; .safetensors, .npz and .npy are read")


# ---- folders ----


def remove_folder(folder: str | os.PathLike[str]) -> None:
    """As much of it as goes; what cannot be removed is not worth an error."""
    with suppress(OSError):  # rmtree itself ignores most of them, not all
        shutil.rmtree(folder, ignore_errors=True)


def folder_bytes(folder: str | os.PathLike[str]) -> int:
    """Of all files below it; links are not followed, and what goes meanwhile counts as nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
