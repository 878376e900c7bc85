"""A real Slurm on this one machine, with or without accounting: brought up, used and taken down, without systemd.

    python tests/slurm/cluster.py install          install Debian's packages (root)

Everything lives in FOLDER: configuration, sockets, logs, state. munge signs, slurmctld schedules, slurmd runs, and
slurmdbd with MariaDB keeps accounts. The node pretends to have `NUM_CPUS` cores, so that several tasks run at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

PACKAGES = ["slurm-wlm", "munge", "slurmdbd", "mariadb-server"]
NUM_CPUS = 8
DAEMONS = ["slurmd", "slurmctld", "slurmdbd", "mariadbd", "munged"]


def missing() -> str:
    """Why a Slurm cannot be brought up here; empty when it can."""
    if os.geteuid() != 0:
        return "bringing up Slurm needs root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
    absent = [name for name in DAEMONS if not shutil.which(name, path=path)]
    return f"not installed: {', '.join(absent)} (python tests/slurm/cluster.py install)" if absent else ""


def install() -> str:
    """Install the packages with apt; why not, or empty."""
    if not missing():
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return "installing Slurm needs root and apt-get"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    for attempt in (command, ["apt-get", "update", "-qq"], command):
        result = subprocess.run(attempt, env=environment, capture_output=True, text=True, timeout=600)
        if result.returncode == 0 and not missing():
            return ""
    return "apt-get could not install Slurm: " + (result.stderr.strip().splitlines() or ["no reason given"])[-1]


class Cluster:
    """One Slurm in one folder; `environment` is what its clients need."""

    def __init__(self, folder: str | Path, *, accounting: bool = True):
        self.folder = Path(folder).resolve()
        self.accounting = accounting
        self.host = socket.gethostname().split(".")[0]
        self.processes: dict[str, subprocess.Popen] = {}
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin",
        }

    # -- up --

    def up(self) -> Cluster:
        try:
            self._write()
            self._start_munge()
            if self.accounting:
                self._start_accounting()
            self.start_daemon("slurmctld", "-D")
            self.wait_for(["scontrol", "ping"], "is UP", 120)
            self.start_daemon("slurmd", "-D", "-N", self.host)
            self.wait_for(["sinfo", "-h", "-o", "%T"], "idle", 120)
        except BaseException:
            self.down()
            raise
        return self

    def _write(self) -> None:
        for name in ("state", "spool", "log", "munge", "mysql"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)  # munged wants nobody else to write above its socket, and clients to reach it
        socket_path = self.folder / "munge" / "socket"
        ports = {name: _free_port() for name in ("slurmctld", "slurmd", "slurmdbd")}
        text = f"""
            ClusterName=test
            SlurmctldHost={self.host}(127.0.0.1)
            SlurmUser=root
            SlurmdUser=root
            AuthInfo=socket={socket_path},cred_expire=10
            SlurmctldPort={ports["slurmctld"]}
            SlurmdPort={ports["slurmd"]}
            SlurmctldPidFile={self.folder}/slurmctld.pid
            SlurmdPidFile={self.folder}/slurmd.pid
            StateSaveLocation={self.folder}/state
            SlurmdSpoolDir={self.folder}/spool
            SlurmctldLogFile={self.folder}/log/slurmctld.log
            SlurmdLogFile={self.folder}/log/slurmd.log
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            ReturnToService=2
            SelectType=select/cons_tres
            SelectTypeParameters=CR_CPU
            SchedulerParameters=batch_sched_delay=0,sched_interval=2,defer_batch
            SlurmdParameters=config_overrides
            SlurmctldParameters=preempt_send_user_signal
            PreemptType=preempt/partition_prio
            PreemptMode=REQUEUE
            KillWait=5
            SlurmdTimeout=15
            NodeName={self.host} NodeAddr=127.0.0.1 CPUs={NUM_CPUS} RealMemory=1000 State=UNKNOWN
            PartitionName=low Nodes={self.host} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
            PartitionName=high Nodes={self.host} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
            """
        kind = "slurmdbd" if self.accounting else "none"
        text += f"""
            AccountingStorageType=accounting_storage/{kind}
            JobAcctGatherType=jobacct_gather/{"linux" if self.accounting else "none"}
            """
        if self.accounting:
            text += f"""
            AccountingStorageHost=127.0.0.1
            AccountingStoragePort={ports["slurmdbd"]}
            AccountingStoragePass={socket_path}
            """
            accounting = f"""
            AuthType=auth/munge
            AuthInfo=socket={socket_path}
            DbdHost=localhost
            DbdAddr=127.0.0.1
            DbdPort={ports["slurmdbd"]}
            SlurmUser=root
            PidFile={self.folder}/slurmdbd.pid
            LogFile={self.folder}/log/slurmdbd.log
            StorageType=accounting_storage/mysql
            StorageHost=localhost
            StorageUser=root
            StorageLoc=slurm_acct
            """
            (self.folder / "slurmdbd.conf").write_text(dedent(accounting))
            (self.folder / "slurmdbd.conf").chmod(0o600)
        (self.folder / "slurm.conf").write_text(dedent(text))

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        places = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
        self.start_daemon("munged", "--foreground", "--force", f"--socket={folder / 'socket'}", *places)
        self.wait_for(["munge", "-n", "-S", str(folder / "socket")], "MUNGE", 120)

    def _start_accounting(self) -> None:
        data = self.folder / "mysql"
        database_socket = str(data / "socket")
        words = ["--user=root", f"--datadir={data}/data", "--skip-test-db", "--auth-root-authentication-method=normal"]
        subprocess.run(["mariadb-install-db", *words], check=True, capture_output=True, timeout=600)
        words = ["--user=root", f"--datadir={data}/data", "--skip-networking", f"--socket={database_socket}"]
        words += [f"--pid-file={data}/pid", "--innodb-buffer-pool-size=64M"]
        self.start_daemon("mariadbd", "--no-defaults", *words)
        ping = ["mariadb-admin", "--no-defaults", f"--socket={database_socket}", "-u", "root", "ping"]
        self.wait_for(ping, "alive", 300)
        self.environment["MYSQL_UNIX_PORT"] = database_socket
        self.start_daemon("slurmdbd", "-D")
        self.wait_for(["sacctmgr", "-n", "list", "cluster"], None, 300)
        self.run("sacctmgr", "-i", "add", "cluster", "test")

    def start_daemon(self, name: str, *arguments: str) -> None:
        path = shutil.which(name, path=self.environment["PATH"])
        assert path is not None
        with open(self.folder / "log" / f"{name}.out", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [path, *arguments], stdout=log, stderr=log, env=self.environment, start_new_session=True
            )

    def wait_for(self, command: list[str], text: str | None, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while True:
            try:
                result = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=10)
                if result.returncode == 0 and (text is None or text in result.stdout):
                    return
                said = (result.stdout + result.stderr).strip()
            except subprocess.TimeoutExpired:
                said = "no answer in 10 s"
            if time.monotonic() > limit:
                raise RuntimeError(f"{' '.join(command)}: {said}; logs are in {self.folder}/log")
            time.sleep(0.2)

    def run(self, *command: str, check: bool = True) -> str:
        result = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=120)
        if check and result.returncode:
            raise RuntimeError(f"{' '.join(command)}: {(result.stdout + result.stderr).strip()}")
        return result.stdout

    # -- down --

    def down(self) -> None:
        if (self.folder / "slurm.conf").exists() and "slurmctld" in self.processes:
            self.run("scancel", "-u", "root", check=False)
            time.sleep(0.5)
        for name in DAEMONS:
            self.stop_daemon(name)

    def stop_daemon(self, name: str, number: int = signal.SIGTERM) -> None:
        process = self.processes.pop(name, None)
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Cluster:
        return self.up()

    def __exit__(self, *_: object) -> None:
        self.down()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        sys.exit(__doc__)
    if reason := install():
        sys.exit(reason)
    print("Slurm is installed")
