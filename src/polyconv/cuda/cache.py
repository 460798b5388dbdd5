"""The machine's compiled kernels: each is compiled once, however many processes start together.

The cache lies in the folder that the settings name (``POLYCONV_CACHE_DIR``), one entry per kernel
(:mod:`~polyconv.cuda.entries`). An entry's name covers everything that can change the binary
(:mod:`~polyconv.cuda.fingerprint`), so it is never stale: a changed header is another entry. Processes that want the
same kernel queue at a lock, and all but the first find it there. A damaged entry, or one that belongs to another user,
counts as absent. Where the folder cannot be written the kernels are compiled in memory, and a warning says so once.

A bundle (``POLYCONV_KERNELS``) comes before the cache. With ``POLYCONV_JIT=off`` nothing comes after it: no compiler is
run, imported or asked for its version, and a kernel that is nowhere is an error that says how to get it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import settings
from ..files import locked
from ..plan.plan import KernelSpec
from . import entries
from .bundle import Bundle
from .compile import compile_kernel, compiler_id, flags, in_threads, search_path
from .entries import EntryError
from .errors import MissingKernelError
from .fingerprint import entry_name, fingerprint, identity

Compiler = Callable[[KernelSpec, str], bytes]


class KernelCache:
    """Cubins by kernel and architecture: from memory, from the bundle, from disk, else from the compiler.

    Safe to use from several threads and several processes. Headers are read when a kernel is first asked for; a process
    does not notice that one is edited afterwards.

    Args:
        directory: the cache's folder; the one in the settings if absent.
        include_dirs: where headers are, beside polyconv's own.
        compiler: compiles what is missing; NVRTC if absent.
        jit: whether it may; what the settings say if absent.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        include_dirs: Iterable[str | os.PathLike[str]] = (),
        compiler: Compiler | None = None,
        jit: bool | None = None,
    ) -> None:
        self._directory = Path(directory) if directory is not None else settings.current().cache_dir
        self._include_dirs = tuple(include_dirs)
        self._compiler = compiler or self._compile
        self._jit = jit
        self._memory: dict[tuple[KernelSpec, str], bytes] = {}
        self._bundles: dict[Path, Bundle] = {}
        self._busy: dict[tuple[int, KernelSpec, str], threading.Lock] = {}

    @property
    def directory(self) -> Path:
        """The cache's folder; an error where none is known."""
        return self._directory if self._directory is not None else settings.cache_folder()

    def get(self, spec: KernelSpec, arch: str) -> bytes:
        """The kernel's cubin, compiled if it is nowhere to be found."""
        return self.get_many([spec], arch)[0]

    def get_many(self, specs: Sequence[KernelSpec], arch: str, wanted_for: str | None = None) -> list[bytes]:
        """The same for several kernels; those that are missing are compiled on all cores.

        Args:
            wanted_for: the problem that they are wanted for, in words, for the error where one may not be compiled.
        """
        found = in_threads(lambda spec: self._find(spec, arch), specs)
        missing = [spec.symbol for spec, cubin in zip(specs, found, strict=True) if cubin is None]
        if missing:
            raise MissingKernelError(self._advice(missing, arch, wanted_for))
        return [cubin for cubin in found if cubin is not None]

    def entry(self, spec: KernelSpec, arch: str) -> Path:
        """The folder that holds, or would hold, the kernel."""
        return self.directory / entry_name(self.facts(spec, arch))

    def facts(self, spec: KernelSpec, arch: str) -> dict[str, Any]:
        """Everything that can change the kernel's binary on this machine."""
        return self._fingerprint(identity(spec, arch, search_path(self._include_dirs)))

    @staticmethod
    def _fingerprint(kernel: Mapping[str, Any]) -> dict[str, Any]:
        return fingerprint(kernel, compiler_id(), flags(kernel["arch"]))

    def _compile(self, spec: KernelSpec, arch: str) -> bytes:
        return compile_kernel(spec, arch, include_dirs=self._include_dirs)

    def _find(self, spec: KernelSpec, arch: str) -> bytes | None:
        """The kernel from wherever it is; None if it would have to be compiled and must not be."""
        key = (spec, arch)
        cubin = self._memory.get(key)
        if cubin is None:
            # Of this process: what its parent was compiling, nobody compiles here.
            busy = self._busy.setdefault((os.getpid(), *key), threading.Lock())
            with busy:
                cubin = self._memory.get(key)
                if cubin is None:
                    cubin = self._from_disk_or_compiler(spec, arch)
                    if cubin is not None:
                        self._memory[key] = cubin
        return cubin

    def _from_disk_or_compiler(self, spec: KernelSpec, arch: str) -> bytes | None:
        kernel = identity(spec, arch, search_path(self._include_dirs))
        jit = settings.current().jit if self._jit is None else self._jit
        cubin = self._from_bundle(kernel, jit)
        if cubin is None:
            cubin = self._compiled(spec, kernel) if jit else self._whoever_compiled_it(kernel)
        return cubin

    def _from_bundle(self, kernel: Mapping[str, Any], jit: bool) -> bytes | None:
        folder = settings.current().kernels
        if folder is None:
            return None
        bundle = self._bundles.setdefault(folder, Bundle(folder))
        try:
            return bundle.find(kernel)
        except EntryError as error:
            if not jit:
                raise MissingKernelError(f"{error}. Make the bundle anew with polyconv warmup -o {folder}") from error
            _warn_once(f"{error}; polyconv compiles the kernel instead")
            return None

    def _whoever_compiled_it(self, kernel: Mapping[str, Any]) -> bytes | None:
        """The kernel from the cache by its identity alone, because the compiler cannot be asked who it is."""
        for entry in entries.of_kernel(self._directory, kernel) if self._directory is not None else ():
            with contextlib.suppress(EntryError):
                return entry.cubin()
        return None

    def _compiled(self, spec: KernelSpec, kernel: Mapping[str, Any]) -> bytes:
        facts, arch = self._fingerprint(kernel), kernel["arch"]
        if self._directory is None:
            _warn_once(f"{settings.NO_CACHE}. Until then every process compiles its kernels again")
            return self._compiler(spec, arch)
        name = entry_name(facts)
        cubin = entries.load(self._directory / name)
        if cubin is not None:
            return cubin
        with contextlib.ExitStack() as stack:
            try:
                _make_private(self._directory)
                stack.enter_context(locked(self._directory / "locks" / f"{name}.lock"))
            except OSError as error:
                _warn_unwritable(self._directory, error)
                return self._compiler(spec, arch)
            # Another process may have stored the kernel while this one waited for the lock.
            cubin = entries.load(self._directory / name)
            if cubin is not None:
                return cubin
            cubin = self._compiler(spec, arch)
            try:
                entries.store(self._directory / name, spec.source(), cubin, facts)
            except OSError as error:
                _warn_unwritable(self._directory, error)
            return cubin

    def _advice(self, missing: Sequence[str], arch: str, wanted_for: str | None) -> str:
        """What is missing, where it was looked for, and the command that makes it."""
        folder = settings.current().kernels
        looked = f"the cache {self._directory or ''}".rstrip() + (f" nor in the bundle {folder}" if folder else "")
        command = (
            f"polyconv warmup --kernels {','.join(missing)} --arch {arch} -o {shlex.quote(str(folder or 'kernels'))}"
        )
        return (
            f"{', '.join(missing)} for {arch}{f', wanted for {wanted_for},' if wanted_for else ''} "
            f"{'is' if len(missing) == 1 else 'are'} not in {looked}, and POLYCONV_JIT=off forbids to compile. "
            f"On a machine with polyconv[cu12] or [cu13] (no GPU is needed) run\n\n    {command}\n\n"
            + ("" if folder else "and set POLYCONV_KERNELS to that folder here. ")
            + "All that a model needs: polyconv warmup MODULE:MODEL --input-shape N,C,H,W --arch "
            + f"{arch} -o {shlex.quote(str(folder or 'kernels'))}"
        )


def _make_private(directory: Path) -> None:
    """Make the cache's folders, for the owner only; parents such as ``~/.cache`` get the usual permissions."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / "locks").mkdir(mode=0o700, exist_ok=True)


_warned: set[str] = set()


def _warn_unwritable(directory: Path, error: OSError) -> None:
    _warn_once(
        f"polyconv cannot keep compiled kernels in {directory} ({error}); every process will compile them again. "
        f"Set POLYCONV_CACHE_DIR to a folder that can be written."
    )


def _warn_once(message: str) -> None:
    """A warning per process and text: a model has many kernels, and one line says it."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
