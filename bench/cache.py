"""The cache: list what it holds, verify every checksum, and prune what is not wanted.

    python -m bench.cache                                  entries and bytes, by kind
    python -m bench.cache list --kind retrain              every entry, with its configuration
    python -m bench.cache verify                           read everything; damaged entries are quarantined, exit code 1
    python -m bench.cache prune --kind scores --older-than 30       delete (asks first; --yes does not)
    python -m bench.cache prune --quarantine               delete what was quarantined
    python -m bench.cache list --work                      what unfinished units have saved, to go on from
    python -m bench.cache prune --work                     delete it, where nobody is at it

Entries are found by what they are, so pruning costs time but never correctness: whatever a command needs again is
computed again. Caches are merged by copying one folder over another.
"""

import argparse
import fnmatch
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.arguments import Parser
from bench.tables import bytes_text
from retrain.jobs.slurm import private_path
from retrain.jobs.unit import JOBS, JobBatch
from retrain.leases import Leases
from retrain.resume import UnfinishedUnit, unfinished_units
from retrain.safe_files import SafeFileError, folder_bytes, one_line, read_json
from retrain.store import (
    ENTRY_FILE,
    QUARANTINE,
    DamagedEntryError,
    EntryInfo,
    PassingStoreError,
    Store,
    StoreError,
    canonical_json,
    default_cache,
)


def config_of(info: EntryInfo) -> dict[str, Any]:
    """An entry's configuration, unverified: for display and for --match."""
    try:
        content = read_json(info.path / ENTRY_FILE)
    except SafeFileError:
        return {}
    config = content.get("config") if isinstance(content, dict) else None
    return config if isinstance(config, dict) else {}


def chosen(store: Store, arguments: argparse.Namespace) -> Iterator[EntryInfo]:
    """The entries that --kind, --older-than and --match describe."""
    now = time.time()
    for info in store.entries(arguments.kind):
        if arguments.older_than is not None and now - info.modified() < arguments.older_than * 86400:
            continue
        if arguments.match and not fnmatch.fnmatch(canonical_json(config_of(info)), f"*{arguments.match}*"):
            continue
        yield info


def chosen_work(store: Store, arguments: argparse.Namespace) -> Iterator[UnfinishedUnit]:
    """The unfinished work that --kind and --older-than describe."""
    now = time.time()
    for work in unfinished_units(store):
        old = arguments.older_than is None or now - work.modified() >= arguments.older_than * 86400
        if old and arguments.kind in (None, work.kind):
            yield work


def summary(store: Store) -> int:
    kinds: dict[str, list[int]] = {}
    for info in store.entries():
        counts = kinds.setdefault(info.kind, [0, 0])
        counts[0] += 1
        counts[1] += info.num_bytes()
    print(store.root)
    for kind, (count, num_bytes) in kinds.items():
        print(f"  {kind:20} {count:8,} entries  {bytes_text(num_bytes):>10}")
    if not kinds:
        print("  empty")
    quarantined = list((store.root / QUARANTINE).glob("*"))
    if quarantined:
        num_bytes = folder_bytes(store.root / QUARANTINE)
        print(f"  {QUARANTINE:20} {len(quarantined):8,} entries  {bytes_text(num_bytes):>10}")
    work = unfinished_units(store)
    if work:
        num_bytes = sum(one.num_bytes() for one in work)
        print(f"  {'unfinished work':20} {len(work):8,} folders  {bytes_text(num_bytes):>10}")
    batches = JobBatch.all(store)
    if batches:
        print(f"  {'batch logs':20} {len(batches):8,} folders  {bytes_text(folder_bytes(store.root / JOBS)):>10}")
    return 0


def show_list(store: Store, arguments: argparse.Namespace) -> int:
    if arguments.work:
        held = Leases(store.root).held()
        for work in chosen_work(store, arguments):
            holder = held.get((work.kind, work.key))
            print(f"{line_of(work)}  {one_line(f'held by {holder}') if holder else 'nobody is at it'}")
        return 0
    for info in chosen(store, arguments):
        print(f"{line_of(info)}  {one_line(canonical_json(config_of(info)), arguments.width)}")
    return 0


def line_of(item: EntryInfo | UnfinishedUnit) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(item.modified()))
    return f"{item.kind}  {item.key}  {when}  {bytes_text(item.num_bytes()):>9}"


def verify(store: Store, arguments: argparse.Namespace) -> int:
    num_entries = num_damaged = num_unread = num_bytes = 0
    for info in chosen(store, arguments):
        num_entries += 1
        num_bytes += info.num_bytes()
        try:
            store.verified(info.kind, info.key)
        except DamagedEntryError as error:
            if store.arriving(info):
                num_unread += 1
                print(f"changed just now, perhaps still being copied: {error}", file=sys.stderr)
                continue
            num_damaged += 1
            print(f"damaged: {error}", file=sys.stderr)
            if not arguments.keep:
                store.quarantine(info, str(error))
        except PassingStoreError as error:
            num_unread += 1
            print(f"not read: {error}", file=sys.stderr)
    unread = f", {num_unread:,} not to be judged now" if num_unread else ""
    print(f"{num_entries:,} entries ({bytes_text(num_bytes)}) read, {num_damaged:,} damaged{unread}")
    return 1 if num_damaged or num_unread else 0


def prune(store: Store, arguments: argparse.Namespace) -> int:
    if arguments.quarantine:
        folders = list((store.root / QUARANTINE).glob("*"))
        return delete_folders(folders, "quarantined entries", arguments)
    if arguments.logs:
        busy = {holder.batch for holder in Leases(store.root).held().values()}
        idle = [batch for batch in JobBatch.all(store) if batch.id not in busy]
        folders = [batch.folder for batch in idle]
        folders += [path for batch in idle if (path := private_path(batch)) is not None and path.is_dir()]
        return delete_folders(folders, "folders of batch logs", arguments)
    if arguments.work:
        held = Leases(store.root).held()
        folders = [work.path for work in chosen_work(store, arguments) if (work.kind, work.key) not in held]
        return delete_folders(folders, "folders of unfinished work", arguments)
    if arguments.kind is None and arguments.older_than is None and not arguments.match and not arguments.all:
        raise StoreError("say what to delete: --kind, --older-than, --match, --quarantine, --logs, --work or --all")
    infos = list(chosen(store, arguments))
    what = f"{len(infos):,} entries ({bytes_text(sum(info.num_bytes() for info in infos))})"
    if not infos:
        print("nothing to delete")
    elif agreed(what, arguments):
        for info in infos:
            store.remove(info)
        print(f"deleted {what}")
    return 0


def delete_folders(folders: list[Path], kind: str, arguments: argparse.Namespace) -> int:
    what = f"{len(folders):,} {kind} ({bytes_text(sum(map(folder_bytes, folders)))})"
    if not folders:
        print("nothing to delete")
    elif agreed(what, arguments):
        for folder in folders:
            shutil.rmtree(folder) if folder.is_dir() and not folder.is_symlink() else folder.unlink()
        print(f"deleted {what}")
    return 0


def agreed(what: str, arguments: argparse.Namespace) -> bool:
    if arguments.dry_run:
        print(f"would delete {what}")
        return False
    if arguments.yes:
        return True
    if not sys.stdin.isatty():
        raise StoreError(f"would delete {what}: add --yes (or --dry-run)")
    return input(f"delete {what}? [y/N] ").strip().lower() in ("y", "yes")


def days(text: str) -> float:
    """A number that a typing error cannot make mean "everything"."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f'"{text}" is no number of days; expected 0 or more, for example 30')
    return value


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.cache", description=str(__doc__).split("\n")[0], allow_abbrev=False)
    common = Parser(add_help=False)
    common.add_argument("--cache", default=default_cache(), help="where finished work is kept (default: %(default)s)")
    which = Parser(add_help=False)
    which.add_argument("--kind", help="only entries of this kind, e.g. retrain, model, scores")
    which.add_argument("--older-than", type=days, metavar="DAYS", help="only entries written before so many days")
    which.add_argument("--match", help="only entries whose configuration contains this, e.g. '\"alpha\":0.1'")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("summary", parents=[common], help="entries and bytes by kind (the default)")
    listing = commands.add_parser("list", parents=[common, which], help="every entry")
    listing.add_argument("--work", action="store_true", help="what unfinished units have saved instead")
    listing.add_argument("--width", type=int, default=120, help="characters of the configuration shown")
    checking = commands.add_parser("verify", parents=[common, which], help="check every checksum")
    checking.add_argument("--keep", action="store_true", help="only report damaged entries, leave them where they are")
    pruning = commands.add_parser("prune", parents=[common, which], help="delete entries")
    pruning.add_argument("--all", action="store_true", help="every entry")
    pruning.add_argument("--quarantine", action="store_true", help="what was quarantined")
    pruning.add_argument("--logs", action="store_true", help="logs of batches that nobody works on")
    pruning.add_argument("--work", action="store_true", help="what unfinished units have saved, where nobody is at it")
    pruning.add_argument("--dry-run", action="store_true", help="only say what would go")
    pruning.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("--cache"):
        words.insert(0, "summary")
    arguments = parser.parse_args(words)
    try:
        store = Store(arguments.cache, create=False)
        if arguments.command == "list":
            return show_list(store, arguments)
        if arguments.command == "verify":
            return verify(store, arguments)
        if arguments.command == "prune":
            return prune(store, arguments)
        return summary(store)
    except StoreError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # ... | head
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
