"""Every command on somebody else's cache that can only be read: what is there is used, what is missing is one line."""

import builtins
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bench.cache
import bench.cli
import bench.publish.__main__
import bench.speed
import bench.truth.__main__

PLANTED = "tests.helpers.planted:Planted"


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Called, it makes the cache one that the system lets nobody change; all other folders stay as they are."""
    root = str(tmp_path / "cache")

    def inside(place: Any, folder: int | None = None) -> bool:
        if isinstance(place, int):
            return os.readlink(f"/proc/self/fd/{place}").startswith(root)
        text = os.fsdecode(place)
        if folder is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
        return os.path.abspath(text).startswith(root)

    def refuse(place: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(place))

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **options: Any) -> Any:
            folder = options.get("dir_fd", options.get("src_dir_fd"))
            places = arguments[:2] if function.__name__ in ("rename", "replace", "link") else arguments[:1]
            for place in places:
                if inside(place, folder):
                    refuse(place)
            return function(*arguments, **options)

        return changed

    def close() -> Path:
        opened, low = builtins.open, os.open

        def open_(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not isinstance(file, int) and set(mode) & set("wax+") and inside(file):
                refuse(file)
            return opened(file, mode, *arguments, **options)

        def open_low(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and inside(path, options.get("dir_fd")):
                refuse(path)
            return low(path, flags, *arguments, **options)

        for name in ("mkdir", "rename", "replace", "link", "unlink", "remove", "rmdir", "utime", "chmod", "truncate"):
            monkeypatch.setattr(os, name, guarded(getattr(os, name)))
        monkeypatch.setattr(builtins, "open", open_)
        monkeypatch.setattr(os, "open", open_low)
        return Path(root)

    return close


def test_every_command_reads_it(closed: Callable[[], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache, runs = ["--cache", str(tmp_path / "cache")], str(tmp_path / "runs")
    task = ["--task", PLANTED, "--device", "cpu", *cache]
    plan = [*task, "--alpha", "0.5", "--subsets", "12", "--replicates", "1"]
    words = [*plan, "--methods", "gradsim", "random", "--out", runs]
    assert bench.cli.lds_main([*words, "--cluster", "inline"]) == 0
    root = closed()
    with pytest.raises(OSError, match="Read-only"):
        (root / "mine").mkdir()
    before = sorted(path for path in root.rglob("*"))
    capsys.readouterr()
    for cluster in ("inline", "local"):
        assert bench.cli.lds_main([*words, "--cluster", cluster]) == 0
    assert bench.cli.lds_main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.count(": cached") == 2
    assert bench.cache.main(["list", *cache]) == 0
    assert bench.cache.main(["verify", *cache]) == 0
    assert bench.cache.main(["status", *cache]) == 0
    assert bench.truth.__main__.main(["export", *plan, "--out", str(tmp_path / "truth")]) == 0
    assert bench.truth.__main__.main(["check", str(tmp_path / "truth")]) == 0
    assert bench.speed.main([*task, "--methods", "gradsim", "--repeats", "1", "--out", str(tmp_path / "speed")]) == 0
    assert bench.publish.__main__.main(["figures", "--results", runs, "--out", str(tmp_path / "figures")]) == 0
    assert bench.publish.__main__.main(["report", "--results", runs, "--out", str(tmp_path / "report")]) == 0
    capsys.readouterr()
    # What is missing is one line, and nothing was left in it.
    for more in (["--methods", "kfac"], ["--subsets", "13"], ["--methods", "gradsim", "--rescore"]):
        assert bench.cli.lds_main([*words, *more, "--cluster", "inline"]) == 2
        said = capsys.readouterr().err.splitlines()
        assert re.search(r"can only be read|cannot be removed \(Read-only", said[-1]), said
        assert not any("Traceback" in line for line in said)
    assert sorted(path for path in root.rglob("*")) == before
