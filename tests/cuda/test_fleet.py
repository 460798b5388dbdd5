"""Caches and bundles where fleets run: volumes that others can write, links, any user, a full disk, a read-only root.

As root, with the real users and permission bits of a pod; otherwise everything but the users (``strangers.py``).
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polyconv import cli, settings
from polyconv.cuda.errors import MissingKernelError
from polyconv.cuda.jit.bundle import Bundle, BundleError
from polyconv.cuda.jit.bundle_writer import BundleWriter
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.jit.fingerprint import sha256
from polyconv.cuda.jit.store import Store
from polyconv.settings import Settings, SettingsError
from polyconv.tools.doctor import environment
from strangers import (
    IS_ROOT,
    Child,
    give_away,
    make_read_only,
    mount,
    overwrite_as_group_member,
    private_mounts,
    public_folder,
)
from virtual_gpu.example import KERNELS, axpy_spec

SPEC, ARCH = axpy_spec(), "sm_70"
OURS, EVIL = b"machine code", b"planted code"
POD, OTHER_POD = (1_000_660_000, 1_000_670_000) if IS_ROOT else (os.geteuid(), os.geteuid())
"""User ids as OpenShift assigns them: in no list of users, without a home."""

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("new_warnings")]


@pytest.fixture
def volume() -> Iterator[Path]:
    """An emptyDir: root's, and everybody may write it."""
    KernelCache().facts(SPEC, ARCH)  # imports the compiler, which other users might not be able to
    with public_folder() as folder:
        yield folder


def ask(folder: Path | None, code: bytes = OURS, **options: Any) -> tuple[bytes, list[str]]:
    """The binary that a new process gets, and its warnings."""
    with warnings.catch_warnings(record=True) as caught, settings.use(**options):
        warnings.simplefilter("always")
        found = KernelCache(folder, include_dirs=[KERNELS], compiler=lambda *_: code).get(SPEC, ARCH)
    return found, [str(warning.message) for warning in caught]


def in_pod(function: Callable[[], Any], user: int = POD, group: int | None = None) -> Any:
    return Child(function, user, group).result()


def own_folder(volume: Path, user: int = POD) -> Path:
    return volume / f"polyconv-{user}"


# ---- caches in volumes


@pytest.mark.parametrize("mode", [0o777, 0o2777, 0o2775, 0o2770], ids=oct)
def test_a_cache_in_a_volume_is_a_folder_of_its_own(volume: Path, mode: int) -> None:
    """An emptyDir, and volumes that an fsGroup was given (its group is the pod's)."""
    if IS_ROOT:
        os.chown(volume, 0, 2000)
    volume.chmod(mode)
    assert in_pod(lambda: ask(volume), group=2000) == (OURS, [])
    assert in_pod(lambda: ask(volume, EVIL), group=2000) == (OURS, [])  # compiled once
    own = own_folder(volume)
    assert stat.S_IMODE(own.stat().st_mode) & 0o777 == 0o700
    assert own.stat().st_uid == POD
    assert in_pod(lambda: ask(volume, EVIL, jit=False), group=2000) == (OURS, [])
    volume.chmod(0o777)  # so that it can be removed


@pytest.mark.skipif(not IS_ROOT, reason="needs two users")
def test_users_of_one_volume_do_not_meet(volume: Path) -> None:
    assert in_pod(lambda: ask(volume, b"one")) == (b"one", [])
    assert in_pod(lambda: ask(volume, b"other"), OTHER_POD) == (b"other", [])
    assert sorted(path.name for path in volume.iterdir()) == [f"polyconv-{POD}", f"polyconv-{OTHER_POD}"]
    with pytest.raises(PermissionError):
        in_pod(lambda: list(own_folder(volume).iterdir()), OTHER_POD)


def link_to_ours(path: Path) -> None:
    target = path.parent / "home"
    target.mkdir(mode=0o700)
    path.symlink_to(target)


def stranger_s(path: Path) -> None:
    path.mkdir(mode=0o777)


@pytest.mark.parametrize("plant", [link_to_ours, stranger_s, Path.touch])
def test_what_others_put_in_its_place_is_not_used(volume: Path, plant: Callable[[Path], None]) -> None:
    if plant is stranger_s and not IS_ROOT:
        pytest.skip("needs two users")
    in_pod(lambda: plant(own_folder(volume)), POD if plant is link_to_ours else OTHER_POD)
    found, told = in_pod(lambda: ask(volume))
    assert found == OURS
    assert [words.startswith(f"polyconv cannot keep compiled kernels in {volume} (") for words in told] == [True]
    assert not list(own_folder(volume).iterdir()) if plant is not Path.touch else own_folder(volume).is_file()


def test_a_volume_that_the_group_gets_at_every_mount(volume: Path) -> None:
    """Kubernetes does ``chmod -R g+rwX`` by default: what the group could have written is made again, once."""
    ask(volume)
    own = own_folder(volume, os.geteuid())
    (entry,) = Store(own).folders()
    subprocess.run(["chmod", "-R", "g+rwXs", str(volume)], check=True)
    meta = json.loads((entry / "meta.json").read_text())
    planted = json.dumps({**meta, "cubin": sha256(EVIL)}).encode()
    overwrite_as_group_member({entry / "kernel.cubin": EVIL, entry / "meta.json": planted})
    found, told = ask(volume, b"compiled again")
    assert found == b"compiled again"
    (words,) = told
    assert words.startswith(f"{own} could be written by others (mode 2770), so its kernels are compiled again. ")
    assert "OnRootMismatch" in words
    assert ask(volume) == (b"compiled again", [])
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


def test_pods_that_start_at_once_compile_once(volume: Path) -> None:
    log = volume / "compiled"

    def start() -> bytes:
        def compiler(*_: object) -> bytes:
            with open(log, "a") as file:
                file.write("once\n")
            time.sleep(0.3)
            return OURS

        return KernelCache(volume, include_dirs=[KERNELS], compiler=compiler).get(SPEC, ARCH)

    pods = [Child(start, POD) for _ in range(4)]
    assert [pod.result() for pod in pods] == [OURS] * 4
    assert log.read_text() == "once\n"


def test_a_volume_that_is_full_is_one_warning_and_keeps_no_part(volume: Path) -> None:
    def fill() -> tuple[Any, ...]:
        private_mounts()
        mount("tmpfs", volume, "tmpfs", options="size=64k,mode=777")
        large = ask(volume, bytes(2**18))
        left = [path.name for path in own_folder(volume, os.geteuid()).rglob("*") if path.suffix != ".lock"]
        return large, left, ask(volume), ask(volume, EVIL)

    (code, told), left, small, again = Child(fill).result()
    assert code == bytes(2**18)
    assert ["(No space left on device)" in words for words in told] == [True]
    assert left == ["locks"]
    assert small == again == (OURS, [])


def test_a_read_only_root_with_a_volume(volume: Path, tmp_path: Path) -> None:
    """The default folder cannot be written: one warning. A volume keeps kernels, and serves them when read-only."""

    def serve() -> list[tuple[bytes, list[str]]]:
        private_mounts()
        make_read_only(tmp_path)
        default = Settings.from_environment({"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / ".cache")})
        results = [ask(default.cache_dir), ask(volume)]
        make_read_only(volume)
        return [*results, ask(volume, EVIL), ask(volume, EVIL, jit=False)]

    (code, told), *kept = Child(serve).result()
    assert code == OURS
    assert ["(Read-only file system)" in words for words in told] == [True]
    assert kept == [(OURS, [])] * 3


def test_a_user_without_a_home(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    found = in_pod(lambda: Settings.from_environment({"POLYCONV_CACHE_DIR": str(volume)}).cache_dir)
    assert in_pod(lambda: ask(found)) == (OURS, [])
    assert in_pod(lambda: ask(found, EVIL)) == (OURS, [])
    if IS_ROOT:  # otherwise the user has an entry in the list of users
        assert in_pod(lambda: Settings.from_environment({}).cache_dir) is None


def test_the_commands_show_the_folder_in_the_volume(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask(volume)
    own = own_folder(volume, os.geteuid())
    with settings.use(cache_dir=volume):
        for arguments, words in (
            ([], f"{own}: 1 kernels"),
            (["path"], f"{own}\n"),
            (["list"], "axpy_128"),
            (["verify"], "0 of them damaged"),
        ):
            assert cli.main(["cache", *arguments]) == 0
            assert words in capsys.readouterr().out
        (found,) = (finding for finding in environment.findings() if finding.name == "cache")
        assert (found.state, str(own) in found.text) == ("ok", True)
        assert cli.main(["cache", "clear"]) == 0
    assert [path.name for path in own.iterdir()] == ["locks"]


# ---- bundles with a digest


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with one kernel."""
    folder = tmp_path / "kernels"
    machine = KernelCache(tmp_path / "machine", include_dirs=[KERNELS], compiler=lambda *_: OURS)
    writer = BundleWriter(folder, machine)
    writer.add(SPEC, ARCH)
    writer.finish(["a test"])
    return folder


@pytest.fixture
def digest(bundle: Path) -> str:
    """The bundle's digest, noted when it was made."""
    return Bundle(bundle).digest


def served(named: str | Path, tmp_path: Path) -> bytes:
    """The kernel on a machine that must not compile."""
    with settings.use(kernels=named, jit=False):
        return KernelCache(tmp_path / "empty", include_dirs=[KERNELS]).get(SPEC, ARCH)


def all_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def as_snapshot(bundle: Path) -> Path:
    """As ``huggingface_hub`` stores it: every file is a link to a blob."""
    blobs, snapshot = bundle.parent / "blobs", bundle.parent / "snapshots" / "0123abcd"
    blobs.mkdir()
    for path in all_files(bundle):
        blob, link = blobs / sha256(path.read_bytes()), snapshot / path.relative_to(bundle)
        path.rename(blob)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def as_config_map(bundle: Path) -> Path:
    """As the kubelet writes a ConfigMap: entries are links into a dated folder, which is a link itself."""
    mounted = bundle.parent / "mounted"
    mounted.mkdir()
    mounted.chmod(0o777)
    bundle.rename(mounted / "..2026_11_18_11_00_00.123")
    (mounted / "..data").symlink_to("..2026_11_18_11_00_00.123")
    for path in (mounted / "..data").iterdir():
        (mounted / path.name).symlink_to(f"..data/{path.name}")
    return mounted


def as_volume(bundle: Path) -> Path:
    subprocess.run(["chmod", "-R", "a+rwX", str(bundle)], check=True)
    return bundle


@pytest.mark.parametrize("ship", [as_snapshot, as_config_map, as_volume])
def test_a_digest_is_trusted_whatever_the_permissions_and_links(
    bundle: Path, digest: str, tmp_path: Path, ship: Callable[[Path], Path]
) -> None:
    there = ship(bundle)
    with pytest.raises(MissingKernelError, match=r"is a link, which is not followed|can be written by others"):
        served(there, tmp_path)
    assert served(f"{there}#{digest}", tmp_path) == OURS
    assert served(Settings.from_environment({"POLYCONV_KERNELS": f"{there}/#{digest.upper()}"}).kernels, tmp_path)
    assert Bundle(there, digest).check() == {}
    assert cli.main(["cache", "verify", "--directory", f"{there}#{digest}"]) == 0
    with settings.use(kernels=Path(f"{there}#{digest}")):
        (found,) = (finding for finding in environment.findings() if finding.name == "bundle")
    assert (found.state, digest in found.text) == ("ok", True)


def test_a_digest_is_trusted_whoever_owns_the_files(
    bundle: Path, digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = (path for path in bundle.iterdir() if path.is_dir())
    give_away(entry, monkeypatch)
    with pytest.raises(MissingKernelError, match="belongs to another user"):
        served(bundle, tmp_path)
    assert served(f"{bundle}#{digest}", tmp_path) == OURS


@pytest.mark.parametrize("name", ["kernel.cubin", "meta.json", "kernel.cu", "manifest.json"])
def test_contents_are_checked_against_the_digest(bundle: Path, digest: str, tmp_path: Path, name: str) -> None:
    """Of the source only ``verify`` reads anything."""
    (entry,) = (path for path in bundle.iterdir() if path.is_dir())
    path = bundle / name if name == "manifest.json" else entry / name
    path.write_bytes(path.read_bytes().replace(b"m", b"M") + b"\n")
    if name != "kernel.cu":
        with pytest.raises(MissingKernelError, match=r"checksum|SHA-256"):
            served(f"{bundle}#{digest}", tmp_path)
    if name == "manifest.json":
        with pytest.raises(BundleError, match=f"and {digest} was expected"):
            Bundle(bundle, digest).check()
    else:
        assert list(Bundle(bundle, digest).check()) == [entry.name]


def test_what_is_planted_with_checksums_of_its_own_is_refused(bundle: Path, digest: str, tmp_path: Path) -> None:
    (entry,) = (path for path in bundle.iterdir() if path.is_dir())
    meta = {**json.loads((entry / "meta.json").read_text()), "cubin": sha256(EVIL)}
    (entry / "kernel.cubin").write_bytes(EVIL)
    (entry / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(MissingKernelError, match=r"the checksum of meta\.json is not the one in manifest\.json"):
        served(f"{bundle}#{digest}", tmp_path)


@pytest.mark.parametrize("target", ["pipe", "/dev/zero", "kernel.cubin", "."])
@pytest.mark.parametrize("name", ["kernel.cubin", "meta.json"])
def test_links_lead_to_files(bundle: Path, digest: str, tmp_path: Path, name: str, target: str) -> None:
    """A pipe, a device, a link to itself, a folder: an error, not an endless wait."""
    (entry,) = (path for path in bundle.iterdir() if path.is_dir())
    os.mkfifo(entry / "pipe")
    (entry / name).unlink()
    (entry / name).symlink_to(target)
    with pytest.raises(MissingKernelError, match="is refused"):
        served(f"{bundle}#{digest}", tmp_path)


def test_a_manifest_of_an_older_version_has_no_digest(bundle: Path, tmp_path: Path) -> None:
    """It has no checksum of each file: it is used under the rule of owners, as before."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    for kernel in manifest["kernels"].values():
        del kernel["meta"], kernel["source"]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    assert served(bundle, tmp_path) == OURS
    with pytest.raises(MissingKernelError, match="checksums of all files: make the bundle anew"):
        served(f"{bundle}#{Bundle(bundle).digest}", tmp_path)


def test_the_manifest_has_a_checksum_of_every_file(bundle: Path) -> None:
    (kernel,) = Bundle(bundle).manifest["kernels"].values()
    files = {sha256(path.read_bytes()) for path in all_files(bundle) if path.name != "manifest.json"}
    assert files == {kernel["cubin"], kernel["meta"], kernel["source"]}


def test_a_digest_of_the_wrong_form(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="64 hexadecimal digits after #"):
        Settings.from_environment({"POLYCONV_KERNELS": "/kernels#12ab"})
    (tmp_path / "c#").mkdir()
    assert Settings.from_environment({"POLYCONV_KERNELS": f"{tmp_path}/c#"}).kernels == tmp_path / "c#"


def test_a_bundle_that_was_made_again_has_another_digest(bundle: Path, digest: str, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "same")
    assert Bundle(tmp_path / "same").digest == digest
    writer = BundleWriter(bundle, KernelCache(tmp_path / "machine", include_dirs=[KERNELS], compiler=lambda *_: OURS))
    writer.add(axpy_spec(64), ARCH)
    writer.finish(["more"])
    with pytest.raises(MissingKernelError, match="is not the manifest that was named"):
        served(f"{bundle}#{digest}", tmp_path)
