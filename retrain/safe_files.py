"""Read files that may be damaged or hostile (text, JSON, arrays), and write files whole or not at all.

Used by the cache (`retrain/store.py`), by imported ground truth and by result files. Every reader opens the file once,
refuses what is not a plain file or is too large, and raises `SafeFileError` with one line that names the file, what is
wrong and what was expected. Nothing is ever executed. A `PassingFileError` says that the system could not read the file
now (too many open files, a server that is away): it tells nothing about the file, which may be sound.

    record = read_json("run.json")
    record = read_checked("run.json", RunRecord)  # of the shape that a msgspec Struct describes
    arrays = read_arrays("losses.npz")          # {name: array}; also .npy and .safetensors
    write_whole("run.json", text)               # a reader sees the old file or the new one
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import zipfile
from collections.abc import Iterator, Mapping
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

_CODES = {"BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4"}
_CODES |= {"U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8"}
SAFETENSORS_NAMES = {np.dtype(code): name for name, code in _CODES.items()}

# What these answers to open() say, they say about the file; any other is about the system's day.
ABOUT_THE_FILE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG)
}
LONG_NUMBER = re.compile(rf"[\s:\[,]-?[0-9]{{{MAX_INTEGER_DIGITS + 1}}}")


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


def append(path: str | os.PathLike[str], text: str) -> None:
    """To a file that may not be there yet, by one call: what several processes append stays apart."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        os.write(descriptor, text.encode("utf-8", "backslashreplace"))
    finally:
        os.close(descriptor)


@contextmanager
def open_plain(path: str | os.PathLike[str], max_bytes: int, *, follow_links: bool = False):
    """Open a regular file for reading and yield (file, its size); refuse folders, pipes, devices and symbolic links.

    The checks are made on the open file, not on its name, so it cannot be swapped between the check and the reading.
    O_NONBLOCK keeps a pipe without a writer from hanging the open.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        file = open(path, "rb", opener=lambda name, _: os.open(name, flags))  # noqa: SIM115
    except IsADirectoryError:
        raise SafeFileError(path, "is a folder; a plain file was expected") from None
    except FileNotFoundError:
        raise SafeFileError(path, "does not exist") from None
    except OSError as error:
        if not follow_links and os.path.islink(path):
            raise SafeFileError(path, "is a symbolic link; a plain file was expected") from None
        error_type = SafeFileError if error.errno in ABOUT_THE_FILE else PassingFileError
        raise error_type(path, f"cannot be opened ({error.strerror})") from None
    except ValueError:
        raise SafeFileError(path, "is not a valid file name") from None
    with file:
        try:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SafeFileError(path, "is a pipe, socket or device; a plain file was expected")
            if status.st_size > max_bytes:
                raise SafeFileError(path, f"has {status.st_size:,} bytes; at most {max_bytes:,} are read")
            yield file, status.st_size
        except OSError as error:
            raise PassingFileError(path, f"cannot be read ({error.strerror or error})") from None
        except MemoryError:
            raise PassingFileError(path, "does not fit in memory") from None


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
    """JSON as msgspec reads it (without NaN, infinities or halves of characters), with no endless integer, not deep."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise SafeFileError(path, f"is nested more than {MAX_JSON_DEPTH} levels deep") from None
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise SafeFileError(path, f"is not valid JSON ({error})") from None
    if LONG_NUMBER.search(text):
        raise SafeFileError(path, f"holds a number of more than {MAX_INTEGER_DIGITS} digits")
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_JSON_DEPTH):
        tables = [item.values() if isinstance(item, dict) else item for item in level]
        level = [child for table in tables for child in table if isinstance(child, (dict, list))]
        if not level:
            return value
    raise SafeFileError(path, f"is nested more than {MAX_JSON_DEPTH} levels deep")


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


def _checked(array: np.ndarray, what: str, path: str | os.PathLike[str]) -> np.ndarray:
    dtype = getattr(array, "dtype", None)
    if dtype is None or dtype.newbyteorder("<") not in SAFETENSORS_NAMES:
        raise SafeFileError(path, f"{what} has dtype {dtype}; booleans, integers and floats are read")
    # numpy's behaviour is undefined for booleans whose byte is neither 0 nor 1.
    if array.dtype == np.bool_ and array.size and array.reshape(-1, order="A").view(np.uint8).max() > 1:
        raise SafeFileError(path, f"{what} holds booleans that are neither 0 nor 1")
    return array


def read_safetensors(
    path: str | os.PathLike[str], max_bytes: int = MAX_ARRAY_BYTES, *, digest: Any = None, follow_links: bool = False
) -> dict[str, np.ndarray]:
    """All arrays of a .safetensors file; the file is read once, and hashed when `digest` is given.

    The library compares every declared size with the bytes that are there: arrays tile the data without gap or overlap.
    """
    with open_plain(path, max_bytes, follow_links=follow_links) as (file, size):
        data = read_exactly(file, size, path)
        if digest is not None:
            digest.update(data)
        if int.from_bytes(data[:8], "little") > MAX_HEADER_BYTES:
            raise SafeFileError(path, f"declares a header of more than {MAX_HEADER_BYTES:,} bytes")
        try:
            arrays = safetensors.numpy.load(data)
        except KeyError as error:
            raise SafeFileError(path, f"holds dtype {error}; supported: {', '.join(_CODES)}") from None
        except (safetensors.SafetensorError, ValueError) as error:  # of the header, or of a shape
            raise SafeFileError(path, f"is no sound safetensors file ({error})") from None
        return {name: _checked(array, f"array {quoted(name)}", path) for name, array in arrays.items()}


def safetensors_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """A .safetensors file of these arrays.

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
            raise TypeError(
                f"array {name!r} has dtype {array.dtype}; supported: {', '.join(SAFETENSORS_NAMES.values())}"
            )
        # asarray, not ascontiguousarray: the latter turns a scalar into a vector.
        tensors[name] = np.asarray(array, dtype=little, order="C")
    data = safetensors.numpy.save(tensors)
    if int.from_bytes(data[:8], "little") > MAX_HEADER_BYTES or len(tensors) > MAX_ARRAYS:
        raise TypeError(f"{len(tensors):,} arrays are more than can be read back")
    return data


def write_safetensors(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> str:
    """Write `arrays` to an open file in the safetensors format and return the sha256 of what was written."""
    data = safetensors_bytes(arrays)
    file.write(data)
    return hashlib.sha256(data).hexdigest()


# ---- .npy and .npz, which others make ----

# Deflate reaches about 1,000:1 on zeros; losses, scores and masks stay below 50:1.
MAX_COMPRESSION_RATIO = 200
ALWAYS_ALLOWED_BYTES = 16 * 2**20
MEMBER = re.compile(r"\w[\w .-]*(/\w[\w .-]*)*\.npy")


def _load_npy(file: IO[bytes], what: str, path: str | os.PathLike[str]) -> np.ndarray:
    """The array that is all of an open file, by numpy; objects (pickle) are refused."""
    try:
        array = np.load(file, allow_pickle=False)
        trailing = file.read(1)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # the header is read as a Python literal: damage ends in whatever the parser raises
        raise SafeFileError(path, f"{what} is no sound .npy array ({error})") from None
    if trailing:
        raise SafeFileError(path, f"{what} is longer than its array")
    return _checked(array, what, path)


def read_npz(
    path: str | os.PathLike[str], max_bytes: int = MAX_ARRAY_BYTES, *, follow_links: bool = False
) -> dict[str, np.ndarray]:
    """The arrays of a .npz file, whose declared sizes are checked before any member is decompressed."""
    arrays = {}
    with open_plain(path, max_bytes, follow_links=follow_links) as (file, size):
        try:
            with zipfile.ZipFile(file) as archive:
                declared = sum(member.file_size for member in archive.infolist())
                bomb = f"unpacks from {size:,} to {declared:,} bytes (a zip bomb?); at most"
                if declared > max_bytes:
                    raise SafeFileError(path, f"{bomb} {max_bytes:,} are read")
                if declared > max(ALWAYS_ALLOWED_BYTES, MAX_COMPRESSION_RATIO * size):
                    hint = "if it is yours, save it with numpy.savez, uncompressed"
                    raise SafeFileError(path, f"{bomb} {MAX_COMPRESSION_RATIO}:1 is read; {hint}")
                for name in archive.namelist():
                    if not MEMBER.fullmatch(name):
                        raise SafeFileError(path, f"member {quoted(name)} is no .npy array")
                    with archive.open(name) as stream:  # read to its end, where zipfile compares the checksum
                        arrays[name.removesuffix(".npy")] = _load_npy(stream, f"member {quoted(name)}", path)
        except (SafeFileError, OSError, MemoryError):
            raise
        except Exception as error:  # BadZipFile, zlib.error, struct.error, and whatever else zipfile meets in damage
            raise SafeFileError(path, f"is a damaged .npz file ({type(error).__name__}: {error})") from None
    return arrays


def read_arrays(path: str | os.PathLike[str], *, follow_links: bool = False) -> dict[str, np.ndarray]:
    """The arrays of a .safetensors, .npz or .npy file (the last under the name "array")."""
    suffix = Path(path).suffix.lower()
    if suffix == ".safetensors":
        return read_safetensors(path, follow_links=follow_links)
    if suffix == ".npz":
        return read_npz(path, follow_links=follow_links)
    if suffix == ".npy":
        with open_plain(path, MAX_ARRAY_BYTES, follow_links=follow_links) as (file, _):
            return {"array": _load_npy(file, "the file", path)}
    raise SafeFileError(path, "has an unknown ending; .safetensors, .npz and .npy are read")


# ---- removing and weighing ----


def remove(path: str | os.PathLike[str]) -> None:
    """A file, a link, or as much of a folder as goes; what cannot be removed is not worth an error."""
    with suppress(OSError):  # rmtree itself ignores most of them, not all
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def folder_bytes(folder: str | os.PathLike[str]) -> int:
    """Of all files below it; links are not followed, and what goes meanwhile counts as nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
