"""The tests in this folder need a Slurm of their own: `make test-slurm`, or RUN_SLURM_TESTS=1 pytest tests/slurm."""

import os
import shutil
import tempfile

import pytest

from retrain.store import Store
from tests.slurm.cluster import Cluster, missing
from tests.slurm.helpers import wait_for


@pytest.fixture(scope="session")
def slurm_installed():
    if os.environ.get("RUN_SLURM_TESTS") != "1":
        pytest.skip("needs a Slurm of its own: make test-slurm (or RUN_SLURM_TESTS=1)")
    reason = missing()
    if reason:
        pytest.skip(reason)


def brought_up(name, accounting):
    with pytest.MonkeyPatch.context() as patch:
        # Sockets have short names: not below pytest's deep folders.
        folder = tempfile.mkdtemp(prefix=f"tda-{name}-", dir="/tmp")
        with Cluster(folder, accounting=accounting) as cluster:
            patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
            patch.setenv("PATH", cluster.environment["PATH"])
            yield cluster
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(slurm_installed):
    """A Slurm with accounting."""
    yield from brought_up("slurm", True)


@pytest.fixture(scope="module")
def bare_cluster(slurm_installed):
    """A Slurm without accounting: sacct knows nothing."""
    yield from brought_up("bare", False)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "cache")


@pytest.fixture
def log(tmp_path):
    return str(tmp_path / "diary")


@pytest.fixture
def gate(tmp_path):
    """A file that is not there yet: units wait for it."""
    return str(tmp_path / "gate")


@pytest.fixture(autouse=True)
def empty_queue(request):
    """Each test leaves the queue as it found it."""
    yield
    for name in ("cluster", "bare_cluster"):
        if name in request.fixturenames:
            cluster = request.getfixturevalue(name)
            cluster.run("scancel", "-u", "root", check=False)
            wait_for(lambda cluster=cluster: not cluster.run("squeue", "-h").strip())
