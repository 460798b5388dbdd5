"""AOTInductor packages with polyconv's kernels. Importing the module registers the operator that a package calls.

    import torch
    from polyconv.inductor import aoti

    exported = torch.export.export(model, (x,))
    path = torch._inductor.aoti_compile_and_package(exported, inductor_configs=aoti.options())
    model = torch._inductor.aoti_load_package(path)  # in any process that imports polyconv.inductor.aoti

A package holds weights that are packed for the instruction set of the machine that made it, as its generated code is.
"""

from __future__ import annotations

from typing import Any

from ..cpu import native
from ..runtime.warn_once import warn_once
from . import private

native.why_absent()  # loads the operators


def options() -> dict[str, Any]:
    """Settings of Inductor (``inductor_configs``) that choose kernels as ``torch.compile(backend="polyconv")`` does.

    Call it once per package, under ``torch.no_grad()`` as ``aoti_compile_and_package``. The model must be on the CPU.
    """
    reason = private.missing() or native.why_absent()
    if reason is not None:
        warn_once(f"AOTInductor compiles without polyconv's kernels: {reason}")
        return {"freezing": True}
    from .choice import outcomes_here
    from .graph_pass import LayerPass

    return {name: value for name, value in LayerPass(outcomes_here()).options().items() if name != "cpp_wrapper"}
