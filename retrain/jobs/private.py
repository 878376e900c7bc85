"""A folder that only this user can write: what submitit pickles is run again on the nodes, so nobody else may touch it.

It lies outside the cache, which may be shared, by the campaign's id and the cache's path: below `TDA_BENCH_STATE`, else
`XDG_STATE_HOME`, else `~/.local/state`. The nodes of the cluster must see it, as they see a home folder.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from retrain.jobs.book import JobError
from retrain.jobs.campaign import Campaign

HINT = "name a folder of your own that the nodes see, too: export TDA_BENCH_STATE=/path"


def private_path(campaign: Campaign) -> Path | None:
    """Where a campaign's private folder is, whether or not it exists; None where nobody knows a home folder."""
    state = _state_folder()
    if state is None:
        return None
    digest = hashlib.sha256(os.path.realpath(campaign.store.root).encode("utf-8", "surrogateescape")).hexdigest()
    return state / "slurm" / f"{campaign.id}-{digest[:12]}"


def private_folder(campaign: Campaign) -> Path:
    """The folder itself, made where it is missing; one that others could write or that is not ours is refused."""
    path = private_path(campaign)
    if path is None:
        raise JobError(f"there is no home folder for what Slurm's tasks need (HOME is not set); {HINT}")
    state = path.parent.parent
    try:
        state.parent.mkdir(parents=True, exist_ok=True)
        for folder in (state, path.parent, path):
            if not os.path.lexists(folder):
                os.mkdir(folder, 0o700)
            _check_private(folder)
    except OSError as error:
        raise JobError(f"the private folder {path} cannot be made ({error.strerror}); {HINT}") from None
    return path


def _state_folder() -> Path | None:
    given = os.environ.get("TDA_BENCH_STATE")
    if given:
        return Path(os.path.abspath(os.path.expanduser(given)))
    try:
        parent = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    except RuntimeError:
        return None
    return Path(os.path.abspath(parent)) / "tda-bench"


def _check_private(folder: Path) -> None:
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        problem = "is not a folder"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, not to {os.geteuid()}"
    elif status.st_mode & 0o077:
        problem = f"has mode {stat.S_IMODE(status.st_mode):o}; expected 700 (chmod 700 {folder})"
    else:
        return
    raise JobError(f"{folder} {problem}: nobody else may write what Slurm's tasks run; {HINT}")
