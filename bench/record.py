"""What every record says of how it was made: versions, commit, the fingerprint of the code, device and command."""

import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from retrain.safe_files import SafeFileError, read_json, write_whole
from retrain.source import code_fingerprint

RUN_AGAIN = "run-again"  # beside a record: when the same run was made the last time
DISTRIBUTIONS = ("torch", "numpy", "scipy", "kronfluence", "traker", "transformers")  # what numbers depend on


def versions() -> dict[str, str]:
    return dict(_versions())


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("tda-bench", *DISTRIBUTIONS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def code_commit() -> str | None:
    """The commit of this code, with + if it was changed since; None outside a checkout.

    Where the code runs as a copy without a checkout, $TDA_BENCH_COMMIT hands the commit in, and the fingerprint of the
    files, recorded beside it, proves it.
    """
    return os.environ.get("TDA_BENCH_COMMIT") or _checked_out()


@lru_cache(maxsize=1)  # as `code_fingerprint`: what is committed while this runs is not what runs
def _checked_out() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        run_git: Callable[..., str] = lambda *words: subprocess.run(  # noqa: E731
            ["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        run_git("ls-files", "--error-unmatch", Path(__file__).name)  # installed into somebody else's checkout: not its
        return run_git("rev-parse", "--short=12", "HEAD") + ("+" if run_git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def command_line(program: str, argv: Sequence[str]) -> str:
    """The command as one would type it; `program` is the module's name."""
    return shlex.join(["python", "-m", program, *argv])


ELSEWHERE = "elsewhere"  # the device of a record that scores files against a stored truth


def provenance(device: str | None = None) -> dict[str, Any]:
    """Of a record: which code on which machine, and when."""
    return {
        "versions": versions(),
        "commit": code_commit(),
        "code": code_fingerprint(),
        **({} if device is None else {"device": device}),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "node": platform.node()},
        "finished": timestamp(),
    }


def timestamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def without_nan(value: Any) -> Any:
    """JSON has no NaN; a missing number is null."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def write_json(path: Path, record: Any, indent: int | None = 1) -> None:
    write_whole(path, json.dumps(without_nan(record), indent=indent) + "\n")


def another_runs(path: Path, run_id: str) -> dict[str, Any] | None:
    """The record at `path` where it is another run's; None where there is none, or nothing that has a run's id."""
    try:
        record = read_json(path, follow_links=True)
        name = record["run_id"]
    except (OSError, SafeFileError, KeyError, TypeError):
        return None
    return record if name != run_id and re.fullmatch("[0-9a-f]{12}", str(name)) else None


def keep_earlier(path: Path, run_id: str) -> None:
    """Another run's record is put aside under its own id; `bench.figures` and the ledger read the newest alone."""
    if earlier := another_runs(path, run_id):
        kept = path.with_name(f"{path.stem}.{earlier['run_id']}.json")
        path.replace(kept)
        print(f"another run's record was there and is kept as {kept}", file=sys.stderr)


def why_unwritten(write: Callable[[], Any], where: Path | str) -> str:
    """Empty when it was written; a full disk must not take with it what a run has found, which is printed all the
    same."""
    try:
        write()
    except OSError as error:
        return f"{where} cannot be written: {error.strerror or error}"
    return ""
