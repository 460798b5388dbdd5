"""``python -m gpu_emulator disasm x.cubin [kernel]`` and ``python -m gpu_emulator resources x.cubin``."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import elf, launch, toolchain


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_emulator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("disasm", "print the machine code, and mark what the emulator cannot execute"),
        ("resources", "print registers, memory, parameters and occupancy of each kernel"),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("cubin", type=Path)
        command.add_argument("kernel", nargs="?", help="only this one")
    options = parser.parse_args(arguments)
    image = options.cubin.read_bytes()
    cubin = elf.load(image)
    for kernel in [options.kernel] if options.kernel else cubin.kernel_names:
        if options.command == "disasm":
            code, arch = cubin.kernel(kernel).code, cubin.chip.arch
            print(f"// {kernel}\n{toolchain.disassemble(code, arch)}")
            for problem in launch._program(code, arch).unsupported():
                print(f"// not supported: {problem}")
        else:
            r = elf.resources(image, kernel)
            print(f"{kernel}: {r}; {r.blocks_per_sm(r.max_threads)} blocks of {r.max_threads} threads per SM")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
