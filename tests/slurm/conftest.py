"""The tests in this folder need a Slurm of their own: `make test-slurm`, or RUN_SLURM_TESTS=1 pytest tests/slurm."""

import os
import shutil
import tempfile

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.helpers import wait_for


@pytest.fixture(scope="session")
def slurm_installed():
    if os.environ.get("RUN_SLURM_TESTS") != "1":
        pytest.skip("needs a Slurm of its own: make test-slurm (or RUN_SLURM_TESTS=1)")
    if reason := missing():
        pytest.skip(reason)


def brought_up(name, accounting):
    # Sockets have short names: not below pytest's deep folders.
    folder = tempfile.mkdtemp(prefix=f"tda-{name}-", dir="/tmp")
    with Cluster(folder, accounting=accounting) as cluster:
        yield cluster
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def accounting_cluster(slurm_installed):
    yield from brought_up("slurm", True)


@pytest.fixture(scope="session")
def plain_cluster(slurm_installed):
    yield from brought_up("bare", False)


def used(cluster, monkeypatch):
    """The cluster as the one that this test's commands talk to; its queue is left as it was found."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    yield cluster
    cluster.run("scancel", "-u", "root", check=False)
    wait_for(lambda: not cluster.run("squeue", "-h").strip())


@pytest.fixture
def cluster(accounting_cluster, monkeypatch):
    """A Slurm with accounting."""
    yield from used(accounting_cluster, monkeypatch)


@pytest.fixture
def bare_cluster(plain_cluster, monkeypatch):
    """A Slurm without accounting: sacct knows nothing."""
    yield from used(plain_cluster, monkeypatch)


@pytest.fixture
def gate(tmp_path):
    """A file that is not there yet: units wait for it."""
    return str(tmp_path / "gate")
