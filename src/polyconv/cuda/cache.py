"""The machine's compiled kernels: each is compiled once, however many processes start together.

The cache lies in the folder that the settings name (``POLYCONV_CACHE_DIR``), one entry per kernel
(:mod:`~polyconv.cuda.entries`). An entry's name covers everything that can change the binary
(:mod:`~polyconv.cuda.fingerprint`), so it is never stale: a changed header is another entry. Processes that want the
same kernel queue at a lock, and all but the first find it there. An entry that is damaged, or that others could have
written, counts as absent, and a warning says so. Where this user may not read the entries, or not write the folder, or
others can write it, kernels are compiled in memory, and one warning for the whole folder says so.

A bundle (``POLYCONV_KERNELS``) comes before the cache. With ``POLYCONV_JIT=off`` nothing comes after it: no compiler is
run, imported or asked for its version, and a kernel that is nowhere is an error that says how to get it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import settings, trust
from ..files import Folder
from ..once import warn_once
from ..plan.plan import KernelSpec
from ..trust import UntrustedError
from . import entries
from .bundle import Bundle
from .compile import compile_kernel, compiler_id, flags, in_threads, search_path
from .entries import Entry, EntryError, ForbiddenError
from .errors import MissingKernelError
from .fingerprint import entry_name, fingerprint, identity
from .first_use import Compilations

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
        self._compiler = compiler or self._nvrtc
        self._jit = jit
        self._memory: dict[tuple[KernelSpec, str], bytes] = {}
        self._bundles: dict[Path, Bundle] = {}
        self._busy: dict[tuple[int, KernelSpec, str], threading.Lock] = {}
        self.compilations = Compilations()

    @property
    def folder(self) -> Path | None:
        """The cache's folder; None where none is known."""
        return self._directory

    @property
    def directory(self) -> Path:
        """The cache's folder; an error where none is known."""
        return self._directory if self._directory is not None else settings.cache_folder()

    def get(self, spec: KernelSpec, arch: str) -> bytes:
        """The kernel's cubin, compiled if it is nowhere to be found."""
        return self.get_many([spec], arch)[0]

    def get_many(
        self,
        specs: Sequence[KernelSpec],
        arch: str,
        wanted_for: str | None = None,
        each: Callable[[KernelSpec], None] | None = None,
    ) -> list[bytes]:
        """The same for several kernels; those that are missing are compiled on all cores.

        Args:
            wanted_for: what they are wanted for, in words, for the error where one may not be compiled.
            each: is told of every kernel when it is there.
        """

        def find(spec: KernelSpec) -> bytes | None:
            cubin = self._find(spec, arch)
            if each is not None:
                each(spec)
            return cubin

        if all((spec, arch) in self._memory for spec in specs):
            found = [find(spec) for spec in specs]
        else:
            found = in_threads(find, specs)
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

    def _nvrtc(self, spec: KernelSpec, arch: str) -> bytes:
        return compile_kernel(spec, arch, include_dirs=self._include_dirs)

    def _compile(self, spec: KernelSpec, arch: str) -> bytes:
        with self.compilations.noted(spec.symbol):
            return self._compiler(spec, arch)

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
        cubin: bytes | None = None
        refused: EntryError | None = None
        try:
            cubin = self._from_bundle(kernel)
        except EntryError as error:
            refused = error
        if cubin is None and not jit:
            cubin = self._whoever_compiled_it(kernel)
            if cubin is None and refused is not None:
                folder = settings.current().kernels
                raise MissingKernelError(f"{refused}. Make the bundle anew with polyconv warmup -o {folder}")
        if refused is not None:
            warn_once(f"{refused}; {'polyconv compiles the kernel' if jit else 'the one in the cache runs'} instead")
        return self._compiled(spec, kernel) if cubin is None and jit else cubin

    def _from_bundle(self, kernel: Mapping[str, Any]) -> bytes | None:
        """The kernel from the bundle, if there is one; :class:`EntryError` if it must not be taken from there."""
        folder = settings.current().kernels
        return None if folder is None else self._bundles.setdefault(folder, Bundle(folder)).find(kernel)

    def _whoever_compiled_it(self, kernel: Mapping[str, Any]) -> bytes | None:
        """The kernel from the cache by its identity alone, because the compiler cannot be asked who it is."""
        if self._directory is None:
            return None
        try:
            return entries.find(self._directory, kernel, Entry.cubin)
        except (ForbiddenError, OSError) as error:
            self._warn_not_kept(error)
        except EntryError as error:
            warn_once(_compiled_again(error))
        return None

    def _compiled(self, spec: KernelSpec, kernel: Mapping[str, Any]) -> bytes:
        facts, arch = self._fingerprint(kernel), kernel["arch"]
        if self._directory is None:
            warn_once(f"{settings.NO_CACHE}. Until then every process compiles its kernels again")
            return self._compile(spec, arch)
        name = entry_name(facts)
        with contextlib.ExitStack() as stack:
            try:
                entries.check_folder(self._directory)
                cubin, _ = _stored(self._directory / name, facts)
                if cubin is not None:
                    return cubin
                folder = stack.enter_context(_private(self._directory))
                alone = stack.enter_context(entries.locked(folder, name, trust.owners()))
                # Another process may have stored the kernel while this one waited for the lock.
                cubin, unread = _stored(self._directory / name, facts)
            except OSError as error:
                self._warn_not_kept(error)
                return self._compile(spec, arch)
            if cubin is None:
                cubin = self._compile(spec, arch)
                try:
                    entries.store(folder, name, spec.source(), cubin, facts, alone=alone)
                    if unread:
                        warn_once(unread)
                except OSError as error:
                    self._warn_not_kept(error)
            return cubin

    def _warn_not_kept(self, error: OSError | ForbiddenError) -> None:
        """One text for all kernels, whatever was tried with them: the system's words without the name of a file."""
        advice = "a folder of your own" if isinstance(error, UntrustedError) else "a folder that can be written"
        if isinstance(error, (PermissionError, ForbiddenError)):
            reason = "Permission denied"
        else:
            reason = error.strerror or str(error)
        warn_once(
            f"polyconv cannot keep compiled kernels in {self._directory} ({reason}); every process will compile them "
            f"again, unless POLYCONV_JIT=off. Set POLYCONV_CACHE_DIR to {advice}."
        )

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


def _stored(path: Path, facts: Mapping[str, Any]) -> tuple[bytes | None, str]:
    """The kernel of an entry of the cache, if it is there and may be run, and what is to be said if it is replaced.

    An entry that this user may not read is a damaged one only if this user may write another in its place. If not, the
    whole folder is not for this user, and that is said once.
    """
    try:
        return entries.load(path, facts), ""
    except EntryError as error:
        words = _compiled_again(f"{path} is refused: {error}")
        if isinstance(error, ForbiddenError):
            return None, words
        warn_once(words)
        return None, ""


def _compiled_again(reason: object) -> str:
    return f"{reason}; polyconv compiles the kernel again, unless POLYCONV_JIT=off"


@contextlib.contextmanager
def _private(directory: Path) -> Iterator[Folder]:
    """The cache's folder, made for the owner only if it is not there. ``~/.cache`` gets the usual permissions."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    with Folder(directory) as folder:
        folder.check(trust.owners())
        yield folder
