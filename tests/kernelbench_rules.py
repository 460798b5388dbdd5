"""KernelBench's rules for submitted files, reimplemented: rejected texts, and its loaders.

Its checker searches the text for patterns without parsing it: it cuts each line at ``#`` or ``//`` (so preprocessor
lines vanish), but keeps docstrings and strings, whose words count. As of commit 423217d of
ScalingIntelligence/KernelBench.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

REFUSED = {
    "a fallback": (r"\btry\s*:", r"\bexcept\s*:", r"\bexcept\s+\w"),
    "a body that does nothing": (r"\bpass\b",),
    "a clock that is replaced": (
        r"torch\.cuda\.Event(\.record|\.elapsed_time)?\s*=",
        r"torch\.cuda\.synchronize\s*=",
        r"time\.(perf_counter|time)\s*=",
    ),
    "threads and processes": (
        r"(import|from)\s+threading\b",
        r"\bthreading\.Thread\s*\(",
        r"import\s+multiprocessing",
        r"multiprocessing\.(Process|Pool|Manager|Queue|Pipe)",
        r"concurrent\.futures|(Thread|Process)PoolExecutor",
    ),
    "a tensor that is none": (r"_make_subclass", r"torch\.Tensor\.__new__", r"class\s+\w+.*\((torch\.)?Tensor\)"),
}
"""Patterns that reject a file."""

WARNED = {
    "a layer of torch": (r"torch\.nn\.(?!(Module|[Pp]arameter|Parameter(List|Dict)|Module(List|Dict)|init)\b)",),
    "an operation of torch": (
        r"\btorch\.(mm|bmm|matmul|einsum|conv(_transpose)?([123]d)?|linear|relu|clamp|dropout|normalize)(?=\s|\(|$)",
        r"\bnn\.functional\.\w",
        r"\bF\.(conv|linear|relu|gelu|softmax|batch_norm|layer_norm|dropout|max_pool|avg_pool)",
    ),
    "a stream": (r"cuda\.Stream\s*\(", r"with\s+torch\.cuda\.stream", r"\.(wait|record)_stream\s*\("),
    "half precision": (
        r"__float2half(_rn)?\s*\(",
        r"\(\s*__half\s*\)\s*[\w.>-]",
        r"static_cast\s*<\s*(__)?half\s*>",
        r"\.(half|float16)\s*\(",
        r"\.to\s*\(\s*(dtype\s*=\s*)?torch\.(float16|half)\b",
    ),
}
"""Patterns that cause a warning."""

REQUIRED = {"a kernel": ("__global__",), "a build by torch": ("load_inline", "cpp_extension")}
"""Groups of words of which one each must be present."""

VARIABLES = (
    *("batch_size", "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"),
    *("width", "height", "width_in", "height_in", "length", "output_padding", "num_classes", "Model"),
    *("depth", "depth_in", "kernel_depth", "kernel_height", "kernel_width"),
    *("kernel_size_h", "kernel_size_w", "stride_h", "stride_w", "padding_h", "padding_w", "dilation_h", "dilation_w"),
)
"""Names that the problems define. A submitted file is executed among them; their functions read them afterwards."""


def visible(text: str) -> str:
    """The text after the checker's cuts."""
    return "\n".join(line.partition("#")[0].partition("//")[0] for line in text.split("\n"))


def found(text: str, rules: dict[str, tuple[str, ...]]) -> list[str]:
    """Broken rules, each with the offending words."""
    searched = visible(text)
    matches = ((rule, re.search(pattern, searched)) for rule, patterns in rules.items() for pattern in patterns)
    return [f"{rule}: {match.group()!r}" for rule, match in matches if match]


def missing(text: str) -> list[str]:
    """Missing words."""
    searched = visible(text)
    return [what for what, words in REQUIRED.items() if not any(word in searched for word in words)]


# ---- the loaders


def executed(text: str, context: dict[str, Any]) -> dict[str, Any]:
    """For evaluation: executed among the names of the problem, without a module."""
    exec(compile(text, "<string>", "exec"), context)
    return context


def executed_with_folder(text: str, context: dict[str, Any]) -> dict[str, Any]:
    """For precompiling: two lines in front set the build folder."""
    folder = tempfile.mkdtemp()
    return executed(f"import os\nos.environ['TORCH_EXTENSIONS_DIR'] = '{folder}'\n{text}", context)


def imported_from_temporary_file(text: str, context: dict[str, Any]) -> dict[str, Any]:
    """For other kinds of kernels: a module absent from ``sys.modules``, from a file that is deleted later."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "submitted.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("temp_module", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        vars(module).update(context)
        spec.loader.exec_module(module)
    return vars(module)


Loader = Callable[[str, "dict[str, Any]"], "dict[str, Any]"]
LOADERS: tuple[Loader, ...] = (executed, executed_with_folder, imported_from_temporary_file)
