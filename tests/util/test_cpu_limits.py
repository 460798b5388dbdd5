"""Limits on a process's cores, from a fake file system of control groups, and the sentence if threads exceed them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import polyconv
from polyconv.tools.doctor import environment
from polyconv.tools.doctor.check import Verdict
from polyconv.tools.optimize import optimizer
from polyconv.util import cpuinfo
from polyconv.util.cpuinfo import CpuLimit, cpu_limit, usable_cores

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {inside} /sys/fs/cgroup/cpu,cpuacct rw,relatime master:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:31 {inside} /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
)


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with 64 cores, all of them in the affinity."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)


def system(root: Path, groups: str, mounts: str, files: dict[str, str]) -> CpuLimit:
    for name, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cpu_limit(root)


@pytest.mark.parametrize(
    ("groups", "files", "cores", "source"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2, "quota"),  # a container with a namespace of control groups
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5, "quota"),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64, "machine"),
        ("0::/\n", {"cpu.max": "max 100000\n", "cpuset.cpus.effective": "0-3,8\n"}, 5, "cpuset"),
        ("0::/\n", {"cpu.max": "300000 100000\n", "cpuset.cpus.effective": "7\n"}, 1, "cpuset"),
        ("0::/pods/one\n", {"pods/one/cpu.max": "max 100000\n", "pods/cpu.max": "400000 100000\n"}, 4, "quota"),
        ("0::/pods/one\n", {"pods/one/cpu.max": "100000 50000\n", "pods/cpu.max": "400000 100000\n"}, 2, "quota"),
        ("0::/../../elsewhere\n", {"cpu.max": "250000 100000\n"}, 2.5, "quota"),
        ("0::/\n", {"cpu.max": "nonsense\n", "cpuset.cpus.effective": "\n"}, 64, "machine"),
        ("0::/\n", {"cpuset.cpus.effective": "0-x\n"}, 64, "machine"),
        ("nonsense\n", {}, 64, "machine"),
        ("0::/\n", {}, 64, "machine"),
        ("", {}, 64, "machine"),
    ],
)
def test_version_2(tmp_path: Path, groups: str, files: dict[str, str], cores: float, source: str) -> None:
    found = system(tmp_path, groups, V2, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert found.cores == cores
    assert source in found.source


@pytest.mark.parametrize("inside", ["/", "/docker/12ab"], ids=["namespace", "no namespace"])
@pytest.mark.parametrize(
    ("files", "cores", "source"),
    [
        ({"cpu,cpuacct/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 1.5, "quota"),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 64, "machine"),
        ({"cpuset/cpuset.cpus": "0-63\n", "cpuset/cpuset.effective_cpus": "0-1,4-5\n"}, 4, "cpuset"),
        ({"cpuset/cpuset.cpus": "2\n", "cpu,cpuacct/cpu.cfs_quota_us": "400000\n"}, 1, "cpuset"),
    ],
)
def test_version_1(tmp_path: Path, inside: str, files: dict[str, str], cores: float, source: str) -> None:
    """Without a namespace the process sees the node's path of its group, and the mount begins there."""
    groups = f"9:name=systemd:{inside}\n4:cpu,cpuacct:{inside}\n3:cpuset:{inside}\n0::/\n"
    there = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    found = system(tmp_path, groups, V1.format(inside=inside), there)
    assert found.cores == cores
    assert source in found.source


def test_both_versions_at_once(tmp_path: Path) -> None:
    """The hybrid of systemd: controllers in version 1, and an empty tree of version 2."""
    mounts = V1.format(inside="/") + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
    files = {"sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "300000", "sys/fs/cgroup/unified/a/cgroup.procs": ""}
    files["sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us"] = "100000"
    assert system(tmp_path, "4:cpu,cpuacct:/a\n0::/a\n", mounts, files).cores == 3


def test_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5}, raising=False)
    found = system(tmp_path, "0::/\n", V2, {"sys/fs/cgroup/cpu.max": "400000 100000\n"})
    assert found == CpuLimit(2, "the affinity of this process")


def test_a_system_without_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cpu_limit(tmp_path) == CpuLimit(64, "the machine")


@pytest.mark.parametrize(
    ("cores", "threads", "said"), [(2.0, 2, 0), (2.0, 3, 2), (1.5, 2, 1), (0.5, 1, 0), (0.5, 2, 1)]
)
def test_the_sentence(cores: float, threads: int, said: int) -> None:
    """Its advice is a number of threads that the quota never holds back."""
    words = CpuLimit(cores, "the quota").too_many(threads)
    assert bool(words) == bool(said)
    if said:
        assert f"runs {threads} threads, but the quota allows {cores:g} cores" in words
        assert words.endswith(f"set OMP_NUM_THREADS={said}, or call torch.set_num_threads({said})")


# ---- who says so


@pytest.fixture
def half_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = CpuLimit(0.5, "the CPU quota of its control group")
    for module in (cpuinfo, environment, optimizer):
        monkeypatch.setattr(module, "cpu_limit", lambda: limit)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.mark.usefixtures("half_a_core")
def test_doctor_says_it() -> None:
    found = {finding.name: finding for finding in environment.findings()}
    assert "2 threads, 0.5 of 64 cores by the CPU quota" in found["CPU"].text
    assert found["threads"].state is Verdict.WARNING
    assert "OMP_NUM_THREADS=1" in found["threads"].text
    assert usable_cores() == 1  # compilers that run at the same time


@pytest.mark.usefixtures("half_a_core")
def test_optimize_says_it() -> None:
    _, report = polyconv.optimize(torch.nn.Conv2d(2, 2, 3).eval(), torch.randn(1, 2, 8, 8), seconds=0.1, quiet=True)
    assert "PyTorch runs 2 threads, but the CPU quota of its control group allows 0.5 cores" in str(report)
    assert report.as_json()["too_many_threads"] == report.too_many_threads


def test_nothing_is_said_where_threads_fit(tmp_path: Path) -> None:
    found = {finding.name for finding in environment.findings()}
    assert "threads" not in found  # the tests run one thread
