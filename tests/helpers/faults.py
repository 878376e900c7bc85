"""A file layer that fails: the N-th system call on files below a folder ends with an error of one's choice.

    with Faults(folder) as calls: ...                            # counts only: calls.count
    with Faults(folder, fail_at=17, number=errno.EIO): ...       # the 17th raises OSError(EIO)
    with Faults(folder, fail_at=17, number=errno.EIO, for_ever=True): ...    # and every later one
    with Faults(folder, number=errno.EROFS, read_only=True): ...             # every call that would change something

It stands in for the functions that Python's own libraries call, so what pathlib, shutil and io do is counted, too.
"""

import builtins
import io
import os

READING = ("close", "fsync", "fstat", "stat", "lstat", "listdir", "scandir")
# How many of a function's first arguments name a file, by its path or its descriptor.
CALLS = dict.fromkeys((*READING, "open", "write", "mkdir", "rmdir", "unlink", "utime"), 1)
CALLS |= dict.fromkeys(("rename", "replace", "link"), 2)


class Faults:
    def __init__(self, folder, fail_at=0, number=0, for_ever=False, read_only=False):
        self.folder, self.fail_at, self.number, self.for_ever = os.fspath(folder), fail_at, number, for_ever
        self.read_only = read_only
        self.count = 0
        self.failed = []  # names of the calls that were failed
        self._descriptors = set()
        self._real = {}

    def __enter__(self):
        self._real = {name: getattr(os, name) for name in (*CALLS, "fdopen")}
        self._real_open = builtins.open
        for name in CALLS:
            setattr(os, name, self._stand_in(name))
        os.fdopen = self._opener(self._real["fdopen"])
        builtins.open = io.open = self._opener(self._real_open)
        return self

    def __exit__(self, *_):
        for name, function in self._real.items():
            setattr(os, name, function)
        builtins.open = io.open = self._real_open

    def ours(self, place):
        if isinstance(place, int):
            return place in self._descriptors
        return isinstance(place, (str, os.PathLike)) and os.fspath(place).startswith(self.folder)

    def step(self, name, changes=False):
        """Count a call on our files; its turn to fail may have come."""
        self.count += 1
        turn = self.fail_at and (self.count == self.fail_at or (self.for_ever and self.count > self.fail_at))
        if turn or (self.read_only and changes):
            self.failed.append(name)
            raise OSError(self.number, os.strerror(self.number))

    def _stand_in(self, name):
        real = self._real[name]

        def call(*arguments, **options):
            named = arguments[: CALLS[name]]
            if not any(map(self.ours, [*named, options.get("dir_fd")])):
                return real(*arguments, **options)
            if name == "close":  # Linux closes even where it says that it could not
                self._descriptors.discard(arguments[0])
                real(*arguments)
            changes = name not in READING
            if name == "open":
                changes = bool(arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            self.step(name, changes)
            if name in ("close", "fsync"):  # a disk that is really asked to keep it would take minutes
                return None
            result = real(*arguments, **options)
            if name == "open":
                self._descriptors.add(result)
            return result

        return call

    def _opener(self, real):
        def call(file, *arguments, **options):
            if not self.ours(file):
                return real(file, *arguments, **options)
            if not isinstance(file, int):
                mode = arguments[0] if arguments else options.get("mode", "r")
                self.step("open", bool(set(mode) & set("wax+")))
            opened = real(file, *arguments, **options)
            self._descriptors.add(opened.fileno())
            return _File(opened, self)

        return call


class _File:
    """An open file whose reading, writing and closing is counted."""

    def __init__(self, file, faults):
        self._file, self._faults = file, faults

    def __getattr__(self, name):
        value = getattr(self._file, name)
        if name not in ("read", "readinto", "readline", "write", "flush"):
            return value

        def call(*arguments):
            self._faults.step(name)
            return value(*arguments)

        return call

    def close(self):
        self._faults._descriptors.discard(self._file.fileno())
        self._file.close()
        self._faults.step("close")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __iter__(self):
        return iter(self._file)
