"""Which records do not say what code made them."""

import os
from pathlib import Path

from retrain.safe_files import SafeFileError, read_json

_NAMES = ("run", "tune", "speed", "retrain_speed", "sweep", "budget", "answers")
RECORD_FILES = tuple(f"{name}.json" for name in _NAMES)


def incomplete_records(folder: Path) -> list[str]:
    """A line for each record under a folder without a commit, or without a fingerprint of the code."""
    found = []
    paths = sorted(Path(place) / name for place, _, names in os.walk(folder) for name in names if name in RECORD_FILES)
    for path in paths:
        try:
            record = read_json(path)
        except SafeFileError as error:
            found.append(str(error))
            continue
        fields = record if isinstance(record, dict) else {}
        missing = [
            words
            for name, words in (("commit", "no commit"), ("code", "no fingerprint of the code (code)"))
            if not (isinstance(fields.get(name), str) and fields[name])
        ]
        if missing:
            found.append(f"{path.relative_to(folder).as_posix()}: {' and '.join(missing)}")
    return found
