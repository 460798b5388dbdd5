"""Files that polyconv reads and writes: damaged, killed in the middle, without space. Calls that use them go on."""

import contextlib
import ctypes
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

import polyconv
from polyconv import settings
from polyconv.autotune import tuning_file
from polyconv.autotune.tuning_file import Entry, Tuning, TuningError
from polyconv.backend import backend_for, candidate_names
from polyconv.cuda.errors import MissingKernelError
from polyconv.cuda.jit.bundle_writer import BundleWriter
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.planner.plan import KernelSpec

ARCH = "sm_70"
NOBODY = 65534


# ---- intact files


class TuningFile:
    """A tuning file in use. Whatever is in it, convolutions are correct, with at most one warning."""

    warnings = 1

    def __init__(self, folder):
        self.folder = folder
        self.path = folder / "tuning.json"
        self.files = [self.path]
        torch.manual_seed(0)
        self.x, self.w = torch.randn(1, 8, 12, 13), torch.randn(8, 8, 3, 3)
        self.write("0")

    def contents(self, mark):
        backend = backend_for(torch.device("cpu"))
        with choices_seen() as seen, torch.no_grad():
            polyconv.conv2d(self.x, self.w)
        entries = {"another problem": Entry("some candidate", {"some candidate": 0.5}, 1.0)}
        for decision in seen:
            named = candidate_names(backend, decision.problem, inference=decision.inference)[-1]
            entries[decision.key] = Entry(named, {named: 1e-3}, 2e-3, mark)
        return Tuning.of(backend.environment(), entries)

    def write(self, mark):
        tuning_file.update(self.path, self.contents(mark))

    def read_whole(self):
        """Contents that a reader may find: one of the written states."""
        assert len(tuning_file.load(self.path)) == 2

    def use(self):
        exact = F.conv2d(self.x.double(), self.w.double())
        with settings.use(tuning_file=(self.path,), cache_dir=self.path.parent / "none"):
            for _ in range(2):
                with torch.no_grad():
                    y = polyconv.conv2d(self.x, self.w)
                excess = (y - exact).abs().max() / exact.abs().max()
                assert excess < 3e-4, f"a tuning file makes a result stray by {float(excess)}"

    def tell(self):
        with contextlib.suppress(TuningError, OSError):
            self.write("1")
        with contextlib.suppress(TuningError, FileNotFoundError):
            tuning_file.load(self.path)


class Kernels:
    """Shared by cache and bundle: three kernels, and a compiler that cannot fail. At most one warning for each."""

    warnings = 3

    def __init__(self, folder):
        self.folder = folder / "kernels"
        self.specs = [KernelSpec("stem", f"kernel_{i}", f"body<{i}>(params);", "Params", 8, 32) for i in range(3)]
        self.fill()
        self.files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        self.folders = sorted(path for path in self.folder.rglob("*") if path.is_dir())

    def compiler(self, spec, arch):
        return f"the cubin of {spec.symbol} for {arch}".encode() * 20

    def write(self, mark):
        """Recreate it, except hidden files: polyconv must remove those."""
        for path in self.folder.glob("*-sm_*") if self.folder.is_dir() else ():
            take_away(path)
        self.fill()

    def asked(self, cache):
        got = cache.get_many(self.specs, ARCH)
        assert got == [self.compiler(spec, ARCH) for spec in self.specs], "another cubin than was compiled"

    def tell(self):
        """The commands report on any folder without a traceback."""
        for command in ("info", "list", "verify"):
            command_line("cache", command, "--dir", str(self.folder))


class Cache(Kernels):
    """The kernel cache. Whatever is in it, the correct kernels are returned, recompiled if necessary."""

    def fill(self):
        self.asked(KernelCache(self.folder, compiler=self.compiler))

    def use(self):
        for _ in range(2):
            self.asked(KernelCache(self.folder, compiler=self.compiler))
        with contextlib.suppress(MissingKernelError):
            self.asked(KernelCache(self.folder, compiler=self.compiler, jit=False))

    def read_whole(self):
        self.asked(KernelCache(self.folder, compiler=self.compiler))


class ShippedBundle(Kernels):
    """A bundle. If compiling is allowed, damage costs time only; otherwise an error says what to do."""

    def fill(self):
        spare = Path(tempfile.mkdtemp(dir=self.folder.parent))
        writer = BundleWriter(self.folder, KernelCache(spare, compiler=self.compiler))
        for spec in self.specs:
            writer.add(spec, ARCH)
        writer.finish(["a test"])
        shutil.rmtree(spare)

    def use(self):
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as spare, settings.use(kernels=self.folder):
            for _ in range(2):
                self.asked(KernelCache(spare, compiler=self.compiler))
            with contextlib.suppress(MissingKernelError):
                self.asked(KernelCache(Path(spare) / "empty", compiler=self.compiler, jit=False))

    def read_whole(self):
        self.use()


TARGETS = {"tuning": TuningFile, "cache": Cache, "bundle": ShippedBundle}


@contextlib.contextmanager
def choices_seen():
    from polyconv.autotune import preferences

    with preferences.watched() as seen:
        yield seen


def command_line(*arguments):
    """A polyconv command: it may refuse, with a message and a status, never with a traceback."""
    from polyconv.cli import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            status = main(list(arguments))
        except SystemExit as end:
            status = end.code
    assert status in (0, 1, 2, None), f"polyconv {arguments[1]} ended with {status}: {said.getvalue()}"


# ---- damage


def flip(path, chance):
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 8, 100])):
        if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(path, chance):
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data) + 1)])


def insert(path, chance):
    data = path.read_bytes()
    place = chance.randrange(len(data) + 1)
    more = chance.choice(
        [
            chance.randbytes(chance.randrange(1, 50)),
            b"\0" * 5000,
            b"[" * 100_000,
            b'{"a":' * 50_000,
            b" " * 6_000_000,
            b"9" * 10_000,
            b"\xef\xbb\xbf",
            b"\xff\xfe",
            b"NaN",
            b"1e999999",
            b'"\\ud800"',
            data,
        ]
    )
    path.write_bytes(data[:place] + more + data[place:])


def replace(path, chance):
    path.write_bytes(
        chance.choice(
            [
                b"",
                b"null",
                b"[]",
                b"{}",
                b"0",
                b'""',
                b"[" * 200_000,
                b"[" * 200_000 + b"]" * 200_000,
                b'{"a":' * 100_000 + b"0" + b"}" * 100_000,
                b"-" * 1000,
                b"1" * 100_000,
                chance.randbytes(1000),
            ]
        )
    )


ODD = (
    None,
    True,
    False,
    0,
    -1,
    2,
    10**30,
    10**400,
    0.5,
    float("inf"),
    float("nan"),
    "",
    "x",
    "x" * 100_000,
    "\ud800",
    "../../etc/passwd",
    "\0",
    [],
    {},
    [[]],
    {"": {}},
    [None, {}],
    {"choice": {}, "seconds": [], "torch_seconds": {}, "measured": 3},
)


def edit(path, chance):
    """A changed or removed value, a renamed or added key, somewhere in a JSON file."""
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError):
        return flip(path, chance)
    place = document
    while isinstance(place, (dict, list)) and place:
        names = list(place) if isinstance(place, dict) else range(len(place))
        name = chance.choice(list(names))
        inner = place[name]
        if not (isinstance(inner, (dict, list)) and inner) or chance.random() < 0.3:
            break
        place = inner
    else:
        return replace(path, chance)
    way = chance.randrange(5)
    if way == 0:
        del place[name]
    elif way == 1 and isinstance(place, dict):
        place[chance.choice(["unknown", "schema", "", "é", "x" * 1000])] = place.pop(name)
    elif way == 2 and isinstance(place, dict):
        place[chance.choice(["unknown", "schema", "version", "later"])] = chance.choice(ODD)
    elif way == 3:
        nested = chance.choice(ODD)
        for _ in range(chance.choice([3, 50, 900])):
            nested = chance.choice([[nested], {"a": nested}])
        place[name] = nested
    else:
        place[name] = chance.choice(ODD)
    text = json.dumps(document)
    if chance.random() < 0.1:
        text = text.replace("{", '{"schema": 7, "schema": 1, ', 1)  # a duplicate name
    path.write_text(text)
    return None


def another_version(path, chance):
    """As a later or earlier polyconv might write it."""
    try:
        document = json.loads(path.read_bytes())
        document["schema"] = chance.choice([0, 2, 3, 99, "1", 1.0, True, None, [1]])
        document["added later"] = {"of": ["any", "kind"]}
        path.write_text(json.dumps(document))
    except (ValueError, TypeError, RecursionError, OSError):
        flip(path, chance)


def is_ordinary(path):
    """A file whose contents can be changed: not a pipe, a device or 20 GB, which earlier damage may have made of it."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 2**26


def take_away(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def another_kind(path, chance):
    """Replaced by something that is no file, or another file."""
    data = path.read_bytes() if is_ordinary(path) else b"{}"
    take_away(path)
    way = chance.randrange(10)
    if way == 0:
        path.mkdir()
    elif way == 1:
        path.symlink_to(path)
    elif way == 2:
        path.symlink_to("nowhere")
    elif way == 3:
        path.symlink_to(chance.choice(["/dev/zero", "/dev/null", "/dev/tty", "/proc/self/mem", "/"]))
    elif way == 4:
        os.mkfifo(path)
    elif way == 5:
        with socket.socket(socket.AF_UNIX) as end, contextlib.suppress(OSError):  # the name may be too long for it
            end.bind(str(path))
    elif way == 6:
        other = path.with_name(path.name + ".other")
        other.write_bytes(data)
        path.symlink_to(other)
    elif way == 7:
        path.write_bytes(data)
        os.truncate(path, 20 * 2**30)  # of holes
    elif way == 8:
        path.write_bytes(data)
        path.chmod(chance.choice([0o000, 0o200, 0o777, 0o666, 0o4777]))
    elif hasattr(os, "geteuid") and os.geteuid() == 0:
        path.write_bytes(data)
        os.chown(path, 4321, 4321)


def another_folder(path, chance):
    """Damage to the folder of a file, or to a required folder."""
    folder = path.parent
    way = chance.randrange(6)
    if way == 0:
        folder.chmod(chance.choice([0o777, 0o1777, 0o000, 0o500]))
    elif way == 1 and os.geteuid() == 0:
        os.chown(folder, 4321, 4321)
    elif way == 2:
        moved = folder.with_name(folder.name + ".moved")
        if not moved.exists():
            folder.rename(moved)
            folder.symlink_to(moved)
    elif way == 3:
        shutil.rmtree(folder, ignore_errors=True)
    elif way == 4:
        shutil.rmtree(folder, ignore_errors=True)
        folder.write_bytes(b"a file")
    else:
        for inner in list(folder.iterdir()) if folder.is_dir() else []:
            take_away(inner)


DAMAGE = (flip, truncate, insert, replace, edit, edit, edit, another_version, another_kind, another_folder)


# ---- actions


@contextlib.contextmanager
def few_warnings(most):
    """At most this many, all about files, none of them twice."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    told = [str(warning.message) for warning in seen if issubclass(warning.category, RuntimeWarning)]
    assert len(told) == len(set(told)), f"a warning twice: {told}"
    assert len(told) <= most, f"more warnings than files: {told}"


def place_for(as_nobody):
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    folder = Path(tempfile.mkdtemp(prefix="damage-"))
    if as_nobody and os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    os.environ["HOME"] = str(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    return folder


def become_nobody_later():
    """After all imports: an unprivileged user may not be able to read this installation."""
    for target in TARGETS.values():
        with tempfile.TemporaryDirectory(prefix="damage-") as spare:
            target(Path(spare)).use()
    become_nobody()


def become_nobody():
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@contextlib.contextmanager
def cleared(folder):
    try:
        yield
    finally:
        subprocess.run(["chmod", "-R", "u+rwX", str(folder)], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def corrupted(target, seed, count, as_nobody=False):
    """Damages some of a target's files, then uses it."""
    chance, folder = random.Random(seed), place_for(as_nobody)
    with cleared(folder):
        if as_nobody:
            become_nobody_later()
        made = TARGETS[target](folder)
        for _ in range(count):
            with contextlib.suppress(OSError):  # from earlier damage
                damage, path = chance.choice(DAMAGE), chance.choice(made.files)
                if damage in (another_kind, another_folder) or is_ordinary(path):
                    damage(path, chance)
        # One manifest is read for all kernels of a bundle. Without the folder the profile cannot be read either.
        most = made.warnings if target == "bundle" else min(count, made.warnings) + (not folder.is_dir())
        with few_warnings(most):
            made.use()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.tell()


def killed(target, seed, rounds, longest):
    """Kills a process that writes repeatedly; a reader then finds the old or the new contents, and nothing else."""
    chance, folder = random.Random(seed), place_for(False)
    with cleared(folder):
        made = TARGETS[target](folder)
        for _ in range(rounds):
            pid = os.fork()
            if pid == 0:
                while True:
                    made.write(str(chance.random()))
            time.sleep(chance.random() * longest)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            with few_warnings(len(made.files)):
                made.read_whole()
        made.write("the last")
        left = [path.name for path in made.folder.rglob(".*")]
        assert not left, f"what killed writers leave behind is never taken away: {left}"


def without_room(target, seed, room):
    """Files are limited to this many bytes, as on a full disk; afterwards there is space again."""
    folder = place_for(False)
    with cleared(folder):
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        made = TARGETS[target](folder)
        before = {path: path.read_bytes() for path in made.files if path.name not in ("kernel.cubin",)}
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limit[1]))
        try:
            with few_warnings(1):
                made.use()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with contextlib.suppress(OSError):
                    made.write("no room")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        if target == "tuning":
            assert made.path.read_bytes() == before[made.path] or tuning_file.load(made.path)
        left = [path.name for path in made.folder.glob(".*")]
        assert not left, f"a failed write leaves files behind: {left}"
        made.write("room again")
        with few_warnings(0):
            made.use()


def full_disk(target, seed, room):
    """Likewise on a full file system; if this process cannot mount one, with a limit on file sizes."""
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = tempfile.mkdtemp(prefix="damage-")
    new_namespace, private, recursive = 0x20000, 1 << 18, 0x4000
    able = (
        os.geteuid() == 0
        and libc.unshare(new_namespace) == 0
        and libc.mount(b"none", b"/", None, recursive | private, None) == 0
        and libc.mount(b"tmpfs", mounted.encode(), b"tmpfs", 0, f"size={room}".encode()) == 0
    )
    if not able:
        os.rmdir(mounted)
        return without_room(target, seed, room % 4096)
    folder = Path(mounted) / "inner"
    folder.mkdir()
    os.environ["HOME"] = str(folder)
    made = None
    with few_warnings(1), contextlib.suppress(OSError):  # too small for the target itself
        made = TARGETS[target](folder)
    if made is not None:
        with few_warnings(0), contextlib.suppress(OSError), open(folder.parent / "filler", "wb") as filler:
            while True:
                filler.write(b"\0" * 4096)
                filler.flush()
        with few_warnings(1):
            made.use()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(OSError):
                made.write("no room")
        left = [path.name for path in made.folder.glob(".*")]
        assert not left, f"a failed write leaves files behind: {left}"
        (folder.parent / "filler").unlink()
        with contextlib.suppress(OSError):
            made.write("room again")
            with few_warnings(0):
                made.use()
    return None


def read_only(target, seed):
    """A read-only folder made by another user."""
    folder = place_for(False)
    with cleared(folder):
        made = TARGETS[target](folder)
        if random.Random(seed).random() < 0.5 and target == "cache":
            shutil.rmtree(made.folder)
            made.folder.mkdir()
        folder.chmod(0o755)
        for path in folder.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        made.use()  # imports what it needs: an unprivileged user may not be able to read this installation
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                become_nobody()
                spare = tempfile.mkdtemp()
                os.environ["XDG_CACHE_HOME"] = spare
                if target == "bundle":
                    with settings.use(kernels=made.folder), few_warnings(0):
                        made.asked(KernelCache(spare, compiler=made.compiler))
                else:
                    with few_warnings(1):
                        made.use()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    made.tell()
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0, "fails where a folder may only be read"
