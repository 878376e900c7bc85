"""What somebody may do to a file of the cache: other bytes, edited JSON, a link, a pipe, a folder in its place."""

import json
import os
from pathlib import Path


def replace(path: Path, content: str | bytes) -> None:
    path.unlink()
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def edit(path: Path, **values: object) -> None:
    """These fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def to_link(path: Path, target: str = "/etc/passwd") -> None:
    path.unlink()
    path.symlink_to(target)


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_folder(path: Path) -> None:
    path.unlink()
    (path / "deep" / "down").mkdir(parents=True)
