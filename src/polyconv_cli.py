"""Entry point of the ``polyconv`` command.

Importing polyconv imports torch, which takes seconds; ``polyconv --help``, a completion and a mistyped word should not.
So the command makes the package importable without running its ``__init__`` first: submodules are found as ever, and
the ``__init__`` runs at the first access to one of its public names.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec
from typing import Any


def main() -> int:
    """Run the command; gives its exit status."""
    try:
        defer("polyconv")
        from polyconv.cli import main as command

        return command()
    except KeyboardInterrupt:  # while the command was still being imported
        return 130


def defer(name: str) -> None:
    """Make a package importable without running its ``__init__`` until one of its own names is asked for."""
    spec = find_spec(name)
    if name in sys.modules or spec is None or spec.loader is None:
        return
    loader, package = spec.loader, module_from_spec(spec)

    def first_name(wanted: str) -> Any:
        is_private = wanted.startswith("__") and wanted != "__version__"
        if is_private or find_spec(f"{name}.{wanted}") is not None:  # a submodule is the import system's business
            raise AttributeError(f"module {name!r} has no attribute {wanted!r}")
        del package.__dict__["__getattr__"]
        loader.exec_module(package)
        return getattr(package, wanted)

    package.__dict__["__getattr__"] = first_name
    sys.modules[name] = package


if __name__ == "__main__":
    sys.exit(main())
