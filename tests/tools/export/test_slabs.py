"""Host functions of an exported file: they cut slabs as the plan for its device does, and serve every size."""

from __future__ import annotations

import re

import pytest

from polyconv.cuda.planner import DEVICES, plan_cuda
from polyconv.measure.workloads import find
from polyconv.problem import Pass, Problem
from polyconv.tools.export.host_code import chosen_for, launching


@pytest.mark.parametrize(("device", "resident"), [("v100", False), ("a100", False), ("rtx4090", True), ("gb10", True)])
def test_slabs_stay_in_the_l2_where_the_plan_has_them_there(device: str, resident: bool) -> None:
    gpu, problem = DEVICES[device], find("W1")[0].problem(Pass.FPROP)
    written = launching(problem, chosen_for(problem, gpu), gpu)
    found = re.search(r", (\d+)>\(\*call", written.call)
    assert found is not None
    assert int(found[1]) == (gpu.l2_slab_bytes if resident else 0)
    assert (plan_cuda(problem, gpu).workspace_bytes <= gpu.l2_slab_bytes) == resident


def test_a_strided_gradient_has_several_phases_at_other_sizes() -> None:
    """Exported for one row, where there is one."""
    problem = Problem.make("dgrad", (64, 128, 1, 4096), (128, 128, 1, 9), stride=(2, 1), padding=(0, 0, 4, 4))
    chosen = chosen_for(problem, DEVICES["v100"])
    assert chosen.name.startswith("winograd_nonfused_")
    assert launching(problem, chosen, DEVICES["v100"]).call == "direct_input_gradient(*call)"
