"""Cache of the machine's compiled kernels: each is compiled once, however many processes start together.

The folder (``POLYCONV_CACHE_DIR``) has one entry per kernel (:mod:`~polyconv.cuda.jit.store`). An entry's name covers
everything that can change the binary (:mod:`~polyconv.cuda.jit.fingerprint`), so it is never stale. Processes that need
one kernel wait for a lock, and all but the first find it stored. An entry that is damaged, or that other users could
have written, is a miss with a warning. If this user may not read the entries or write the folder, kernels are compiled
in memory, with one warning for the folder. In a folder that other users can write, this user has a folder to itself.

A bundle (``POLYCONV_KERNELS``) takes precedence. With ``POLYCONV_JIT=off`` the compiler is neither run nor imported nor
asked for its version, and a missing kernel is an error that says how to get it.
"""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ... import settings
from ...runtime.warn_once import warn_once
from ...util.file_trust import UntrustedError
from ..compile_log import Compilations
from ..errors import MissingKernelError
from ..planner.codegen import source
from ..planner.plan import KernelSpec
from .bundle import Bundle, in_force
from .compile import compile_kernel, compiler_id, flags, in_threads, search_path
from .fingerprint import Headers, entry_name, identity
from .store import EntryError, ForbiddenError, Store

Compiler = Callable[[KernelSpec, str], bytes]


class KernelCache:
    """Cubins by kernel and architecture: from memory, the bundle, the disk, or else the compiler.

    Safe for threads and processes. Headers are read when a kernel first needs them; later edits are not noticed.

    Args:
        directory: the cache folder; default: that of the settings.
        include_dirs: folders of headers besides polyconv's own.
        compiler: compiles missing kernels; default: NVRTC.
        jit: whether compiling is allowed; default: that of the settings.
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
        self._headers = Headers(search_path(self._include_dirs))
        self._compiler = compiler or self._nvrtc
        self._jit = jit
        self._memory: dict[tuple[KernelSpec, str], bytes] = {}
        self._bundles: dict[str | os.PathLike[str] | None, list[Bundle]] = {}
        self._busy: dict[tuple[int, KernelSpec, str], threading.Lock] = {}
        self.compilations = Compilations()

    @property
    def folder(self) -> Path | None:
        """The cache folder; None if there is none."""
        return self._directory

    @property
    def directory(self) -> Path:
        """The cache folder. Raises if there is none."""
        return self._directory if self._directory is not None else settings.cache_folder()

    def get(self, spec: KernelSpec, arch: str) -> bytes:
        """Cubin of a kernel, compiled if missing."""
        return self.get_many([spec], arch)[0]

    def get_many(
        self,
        specs: Sequence[KernelSpec],
        arch: str,
        wanted_for: str | None = None,
        each: Callable[[KernelSpec], None] | None = None,
    ) -> list[bytes]:
        """Cubins of several kernels. Missing ones are compiled on all cores.

        Args:
            wanted_for: purpose of the kernels, for the error message if one may not be compiled.
            each: called for every kernel once it is available.
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
        """Folder of the kernel's entry, which need not exist."""
        return Store.of_cache(self.directory).path / entry_name(self.facts(spec, arch))

    def facts(self, spec: KernelSpec, arch: str) -> dict[str, Any]:
        """Everything that can change the kernel's binary on this machine: its fingerprint, the key of the cache."""
        return _with_compiler(identity(spec, arch, self._headers))

    def _nvrtc(self, spec: KernelSpec, arch: str) -> bytes:
        return compile_kernel(spec, arch, include_dirs=self._include_dirs)

    def _compile(self, spec: KernelSpec, arch: str) -> bytes:
        with self.compilations.noted(spec.symbol):
            return self._compiler(spec, arch)

    def _find(self, spec: KernelSpec, arch: str) -> bytes | None:
        """Find or compile a kernel. Returns None if it is missing and compiling is forbidden."""
        key = (spec, arch)
        cubin = self._memory.get(key)
        if cubin is None:
            # Keyed by process: a lock that the parent held during a fork is never released here.
            busy = self._busy.setdefault((os.getpid(), *key), threading.Lock())
            with busy:
                cubin = self._memory.get(key)
                if cubin is None:
                    cubin = self._from_disk_or_compiler(spec, arch)
                    if cubin is not None:
                        self._memory[key] = cubin
        return cubin

    def _from_disk_or_compiler(self, spec: KernelSpec, arch: str) -> bytes | None:
        kernel = identity(spec, arch, self._headers)
        jit = settings.current().jit if self._jit is None else self._jit
        cubin, refused = self._from_bundles(kernel)
        instead = "that of another bundle runs" if cubin is not None else "polyconv compiles the kernel"
        if cubin is None and not jit:
            cubin, instead = self._from_any_compiler(kernel), "the one in the cache runs"
            if cubin is None and refused:
                raise MissingKernelError(f"{refused}. Make the bundle anew with polyconv warmup")
        if refused:
            warn_once(f"{refused}; {instead} instead")
        return self._compiled(spec, kernel) if cubin is None and jit else cubin

    def _in_force(self) -> list[Bundle]:
        named = settings.current().kernels
        found = self._bundles.get(named)
        return found if found is not None else self._bundles.setdefault(named, in_force())

    def _from_bundles(self, kernel: Mapping[str, Any]) -> tuple[bytes | None, str]:
        """Kernel from the first bundle that has it, None if there is none, and why one refused it, if so."""
        refused = ""
        for bundle in self._in_force():
            try:
                cubin = bundle.store.find(kernel)
            except ForbiddenError:
                refused = f"{bundle.folder} has kernels that this user may not read"  # one text for all of them
            except (EntryError, OSError) as error:
                refused = str(error)
            else:
                if cubin is not None:
                    return cubin, refused
        return None, refused

    def _from_any_compiler(self, kernel: Mapping[str, Any]) -> bytes | None:
        """Kernel from the cache by its identity alone: the compiler's version is unknown."""
        try:
            return self._store(self._directory).find(kernel) if self._directory is not None else None
        except (ForbiddenError, OSError) as error:
            self._warn_not_kept(error)
        except EntryError as error:
            warn_once(_compiled_again(error))
        return None

    def _store(self, directory: Path) -> Store:
        store = Store.of_cache(directory)
        if store.passed_over:
            warn_once(f"polyconv does not run the kernels in {directory} ({store.passed_over}); it uses {store.path}")
        if mode := store.reclaim():
            warn_once(
                f"{store.path} could be written by others (mode {mode:04o}), so its kernels are compiled again. For a "
                "Kubernetes volume with an fsGroup, set fsGroupChangePolicy: OnRootMismatch"
            )
        return store

    def _compiled(self, spec: KernelSpec, kernel: Mapping[str, Any]) -> bytes:
        """Kernel from the cache, compiled and stored if missing."""
        compile_once = cache(lambda: self._compile(spec, kernel["arch"]))
        if self._directory is None:
            warn_once(f"{settings.NO_CACHE}. Until then every process compiles its kernels again")
            return compile_once()
        store, facts = self._store(self._directory), _with_compiler(kernel)
        refused: EntryError | None = None
        cubin: bytes | None = None
        try:
            try:
                cubin = store.find(facts)
            except EntryError as error:
                refused = error
            if cubin is None:
                cubin = store.add(facts, source(spec), compile_once)
        except OSError as error:
            self._warn_not_kept(error)
            cubin = compile_once()
            if isinstance(refused, ForbiddenError):
                refused = None  # not a damaged entry: the whole folder is another user's, and that was said
        if refused is not None:
            warn_once(_compiled_again(refused))
        return cubin

    def _warn_not_kept(self, error: OSError | ForbiddenError) -> None:
        """Warn once per folder: the text must not depend on the kernel, so it contains no file name."""
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
        """Error message: missing kernels, folders searched, and the command that builds them."""
        bundles = [bundle.folder for bundle in self._in_force()]
        folder = bundles[0] if bundles else None
        looked = f"the cache {self._directory or ''}".rstrip() + "".join(f" nor in the bundle {one}" for one in bundles)
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


def _with_compiler(kernel: Mapping[str, Any]) -> dict[str, Any]:
    return {**kernel, "compiler": compiler_id(), "flags": list(flags(kernel["arch"]))}


def _compiled_again(reason: object) -> str:
    return f"{reason}; polyconv compiles the kernel again, unless POLYCONV_JIT=off"
