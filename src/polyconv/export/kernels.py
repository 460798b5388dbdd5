"""The CUDA source of an exported file: the device headers in include order, the kernels' instances, the launcher."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..plan.assertions import size_assertion
from ..plan.plan import KernelSpec

_KERNELS = Path(__file__).resolve().parents[1] / "kernels"
_INCLUDE = re.compile(r'^#include "(.+)\.cuh"\n', re.MULTILINE)

_HOST = """\
#ifndef __CUDACC_RTC__
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <string>
#include <vector>

namespace {
struct Kernel {
  const void* entry;
  size_t params_bytes;
};

const std::map<std::string, Kernel> kernels = {
%s
};
}  // namespace

// Enqueues a kernel on the current stream of a device. Waits for nothing; a launch that is refused raises.
void launch(const std::string& name, int64_t device, const std::vector<int64_t>& grid,
            const std::vector<int64_t>& block, int64_t shared_bytes, const std::string& params) {
  const auto found = kernels.find(name);
  TORCH_CHECK(found != kernels.end(), "there is no kernel ", name);
  const Kernel& kernel = found->second;
  TORCH_CHECK(params.size() == kernel.params_bytes, name, " takes ", kernel.params_bytes, " bytes of parameters, not ",
              params.size());
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  void* arguments[] = {const_cast<char*>(params.data())};
  cudaError_t status = cudaSuccess;
  if (shared_bytes > 48 * 1024)
    status = cudaFuncSetAttribute(kernel.entry, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
  if (status == cudaSuccess)
    status = cudaLaunchKernel(kernel.entry, dim3(grid.at(0), grid.at(1), grid.at(2)),
                              dim3(block.at(0), block.at(1), block.at(2)), arguments, shared_bytes, stream);
  if (status != cudaSuccess) cudaGetLastError();  // told here: the next call must not find it again
  TORCH_CHECK(status == cudaSuccess, "could not launch ", name, " with grid ", grid, ", block ", block, " and ",
              shared_bytes, " bytes of shared memory: ", cudaGetErrorString(status));
}
#endif
"""


def cuda_source(specs: Iterable[KernelSpec]) -> str:
    """One translation unit with these kernels. NVRTC compiles it too, without the launcher."""
    specs = list(specs)
    stems: list[str] = []
    for spec in specs:
        _collect(spec.stem, stems)
    headers = {stem: _items(_body(stem)) for stem in stems}
    instances = _instances(specs)
    kept = _reachable([item for items in headers.values() for item in items], instances)
    parts = [_section(f"{stem}.cuh", "".join(i.text for i in items if i in kept)) for stem, items in headers.items()]
    entries = (
        f'    {{"{s.symbol}", {{reinterpret_cast<const void*>(&{s.symbol}), sizeof({s.params})}}}},' for s in specs
    )
    parts += [
        _section("The instances that this file uses", instances),
        _section("Launching", _HOST % "\n".join(entries)),
    ]
    return "\n".join(parts)


def _section(title: str, text: str) -> str:
    text = re.sub(r"\n{3,}", "\n\n", text).strip("\n")
    return f"// ---- {title} {'-' * (111 - len(title))}\n{text}\n"


def _instances(specs: list[KernelSpec]) -> str:
    """The specs' entry points, and each algorithm and the size of each struct once.

    Of what host and device agree on, that is all that a reader of the file can still change by accident.
    """
    algorithms = dict.fromkeys(axis.text() for spec in specs for axis in spec.axes)
    sizes = dict.fromkeys(size_assertion(spec.params, spec.params_bytes) + "\n" for spec in specs)
    return "\n".join([*algorithms, "".join(sizes), *(spec.entry() for spec in specs)])


def _read(stem: str) -> str:
    return (_KERNELS / f"{stem}.cuh").read_text(encoding="utf-8")


def _collect(stem: str, stems: list[str]) -> None:
    for included in _INCLUDE.findall(_read(stem)):
        _collect(included, stems)
    if stem not in stems:
        stems.append(stem)


def _body(stem: str) -> str:
    return _INCLUDE.sub("", _read(stem)).replace("#pragma once\n", "")


# ---- leaving out what no instance uses


@dataclass(frozen=True)
class _Item:
    """A definition at the top of a header with the comment above it; or other text, which has no name and is kept."""

    name: str | None
    text: str

    @property
    def words(self) -> set[str]:
        return set(re.findall(r"\w+", re.sub(r"//.*", "", self.text)))


def _items(body: str) -> list[_Item]:
    """A header cut into its definitions. They start in the first column, as clang-format leaves them."""
    found: list[_Item] = []
    block: list[str] = []
    for line in body.splitlines(keepends=True):
        block.append(line)
        text = "".join(block)
        code = re.sub(r"//.*", "", text).strip()
        if code.startswith("#"):
            whole = code.count("#if") == code.count("#endif") and not line.endswith("\\\n")
        elif code.startswith("namespace") or code == "}":
            whole = True
        else:
            whole = (not code and line == "\n") or (code.endswith((";", "}")) and code.count("{") == code.count("}"))
        if whole:
            found.append(_Item(_name(code), text))
            block = []
    found.append(_Item(None, "".join(block)))
    return found


def _name(code: str) -> str | None:
    """What a definition defines, or None where that cannot be told."""
    code = re.sub(r"^template <.*?>\n", "", code)
    match = re.match(r"(?:struct|enum class|using|constexpr int) (\w+)", code) or re.match(
        r"__device__ __forceinline__ [\w:<>*& ]+?[ *&](\w+)\(", code
    )
    return match.group(1) if match else None


def _reachable(items: list[_Item], instances: str) -> set[_Item]:
    kept = {item for item in items if item.name is None}
    words = set(re.findall(r"\w+", instances)).union(*(item.words for item in kept))
    while True:
        more = {item for item in items if item.name in words} - kept
        if not more:
            return kept
        kept |= more
        words = words.union(*(item.words for item in more))
