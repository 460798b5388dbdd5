"""Everything that polyconv uses of Inductor and Dynamo beyond their public interface.

A version of torch that lacks one of these names, or has them with another meaning, makes the backend fall back to plain
Inductor, with a warning that says so (:func:`missing`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

OLDEST = (2, 11)
"""First version of torch whose Inductor was tested with the pass."""

TRACED = "eager_input_vals"
"""Name of the metadata of a node that holds its arguments as they were traced, and its keyword arguments."""

NHWC = [3, 0, 2, 1]
"""Stride order of channels_last in Inductor's notation."""


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why the pass cannot run in this version of torch, or None."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST:
        return f"torch {torch.__version__} is older than {OLDEST[0]}.{OLDEST[1]}"
    try:
        from torch._dynamo.guards import GuardBuilder, install_guard  # noqa: F401
        from torch._dynamo.source import AttrSource  # noqa: F401
        from torch._dynamo.symbolic_convert import InstructionTranslator
        from torch._inductor import config, ir, lowering
        from torch._inductor.compile_fx import compile_fx  # noqa: F401
        from torch._inductor.custom_graph_pass import CustomGraphPass  # noqa: F401
        from torch._inductor.fx_passes import freezing_patterns

        _ = (
            compilation_error(),
            config.freezing,
            config.layout_optimization,
            config.cpp_wrapper,
            config.post_grad_custom_pre_pass,
            config.unsafe_marked_cacheable_functions,
        )
        _ = InstructionTranslator.current_tx, InstructionTranslator.import_source, GuardBuilder.EQUALS_MATCH
        _ = config.aot_inductor.custom_ops_to_c_shims, freezing_patterns.lazy_init
        _ = freezing_patterns.binary_folding_pass.patterns
        _ = ir.ExternKernel.require_stride_order, lowering.make_fallback, lowering.constrain_to_fake_tensors
    except (ImportError, AttributeError) as error:
        return f"the Inductor of torch {torch.__version__} differs: {error}"
    return None if torch.backends.mkldnn.is_available() else "this build of torch has no oneDNN"


def compile_graph(gm: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Inductor on a graph of Dynamo's, with these settings of ``torch._inductor.config``."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, list(inputs), config_patches=dict(options))
    return compiled  # type: ignore[no-any-return]


def compilation_error() -> type[Exception]:
    """What Inductor raises if it cannot compile a graph. Other exceptions make Dynamo trace again."""
    from torch._inductor.exc import InductorError

    return InductorError


def mode_options(mode: str | None) -> dict[str, Any]:
    """Settings of a mode of ``torch.compile``."""
    from torch._inductor import list_mode_options

    found: dict[str, Any] = list_mode_options(mode)
    return found


def in_layout_of_graph() -> dict[str, Any]:
    """Settings with which convolutions keep the layout of the tensors that they are given."""
    return {"layout_optimization": False}


def frozen_options(graph_pass: Callable[[Graph], None], c_shims: Mapping[Any, str]) -> dict[str, Any]:
    """Settings for a frozen graph: weights are constants, calls are made by generated C++, and ``graph_pass`` sees the
    graph after batch normalisation has been folded and weights have been packed for oneDNN. ``c_shims``: C++ functions
    ``aoti_torch_cpu_<operator>`` that generated code calls instead of operators."""
    from torch._inductor import config

    leave_transposed_convolutions_unfolded()
    return {
        "freezing": True,
        "cpp_wrapper": True,
        **pass_options(graph_pass),
        "aot_inductor.custom_ops_to_c_shims": {
            **config.aot_inductor.custom_ops_to_c_shims,
            **{operator: [text] for operator, text in c_shims.items()},
        },
    }


@lru_cache(maxsize=1)
def leave_transposed_convolutions_unfolded() -> None:
    """Keep Inductor's freezing from folding constants behind a transposed convolution, as of a normalisation, into its
    weight. It takes the first axis of the weight for the output channels (torch 2.13.0): results are wrong where inputs
    are as many, and others fail to compile."""
    from torch._inductor.fx_passes import freezing_patterns

    def folds(check: Callable[[Any], bool], match: Any) -> bool:
        convolution = torch.ops.aten.convolution.default
        return not any(node.target is convolution and node.args[6] for node in match.nodes) and check(match)

    freezing_patterns.lazy_init()
    patterns = freezing_patterns.binary_folding_pass.patterns.values()
    for entry in {id(entry): entry for entries in patterns for entry in entries}.values():
        entry.extra_check = partial(folds, entry.extra_check)


def pass_options(
    graph_pass: Callable[[Graph], None],
    given: Mapping[str, Any] | None = None,
    key: Callable[[], str | None] = lambda: None,
    functions: Iterable[Callable[..., Any]] = (),
) -> dict[str, Any]:
    """Settings with which ``graph_pass`` sees a graph, after the user's passes; in training the graphs of the forward
    and the backward pass. ``given``: settings for this graph alone.

    ``key`` identifies what the pass does in the current state of the process, and what the Python functions
    ``functions`` of the graph do when they are traced: then the graph is kept in the caches on disk. With None, as for
    frozen graphs, whose constants are not part of Inductor's keys, it is compiled in each process.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    set_by_user: Any = (given or {}).get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    earlier = set_by_user if isinstance(set_by_user, (list, tuple)) else [set_by_user] if set_by_user else []
    now = key()

    class Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            for each in (*earlier, graph_pass):
                each(graph)

        def uuid(self) -> Any:
            """None after a change of state: a backward graph may be compiled later than its forward graph."""
            keys = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in earlier]
            return (*keys, now) if now == key() and all((*keys, now)) else None

    options: dict[str, Any] = {"post_grad_custom_pre_pass": Pass()}
    if now is not None:
        earlier_names = (given or {}).get("unsafe_marked_cacheable_functions", config.unsafe_marked_cacheable_functions)
        names = {f"{each.__module__}.{each.__name__}": now for each in functions}
        options["unsafe_marked_cacheable_functions"] = {**earlier_names, **names}
    return options


def compile_again_after_a_change(module: str, text: str) -> None:
    """Make Dynamo guard the graph that it is compiling on a text, an attribute of a module. With another text it
    compiles again, with an earlier one it runs the graph compiled then."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:  # a graph that is not Dynamo's
        return
    install_guard(AttrSource(translator.import_source(module), text).make_guard(GuardBuilder.EQUALS_MATCH))


def static_inputs(inputs: Sequence[Any]) -> list[int]:
    """Positions of the parameters and buffers among the inputs of a graph of Dynamo's."""
    return [
        position
        for position, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and getattr(value, "_dynamo_static_input_type", None)
    ]


def copied(gm: GraphModule) -> GraphModule:
    """A copy of a graph of Dynamo's, which keeps using the original. Parameters are shared."""
    result = GraphModule(gm, copy.deepcopy(gm.graph))
    result.meta = dict(gm.meta)
    result._param_name_to_source = dict(gm._param_name_to_source)  # type: ignore[assignment, arg-type]
    for old, new in zip(gm.graph.nodes, result.graph.nodes, strict=True):
        new.meta = old.meta
        if old.op == "placeholder":
            new._dynamo_source = old._dynamo_source
    return result


def with_constants(gm: GraphModule, inputs: Sequence[Any], positions: Sequence[int]) -> GraphModule:
    """A copy of a graph of Dynamo's in which some inputs are attributes."""
    result = copied(gm)
    placeholders = result.graph.find_nodes(op="placeholder")
    for position in positions:
        node, value, name = placeholders[position], inputs[position], f"_polyconv_constant_{position}"
        if isinstance(value, torch.nn.Parameter):
            result.register_parameter(name, value)
        else:
            result.register_buffer(name, value)
        result._param_name_to_source[name] = node._dynamo_source  # type: ignore[index, operator]
        with result.graph.inserting_before(node):
            constant = result.graph.get_attr(name)
        constant.meta.update(node.meta)
        node.replace_all_uses_with(constant)
        result.graph.erase_node(node)
    result.recompile()
    return result


def needs_channels_last(
    operator: Any,
    positions: Callable[[Sequence[Any]], Sequence[int]],
    overwritten: Callable[[Sequence[Any]], Sequence[int]],
) -> None:
    """Make Inductor pass arguments of an operator, dense images or lists of any, in channels_last. ``positions`` tells
    from the arguments which; ``overwritten``, which share memory with the output: Inductor must not reuse it."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    def ordered(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [ir.ExternKernel.require_stride_order(each, NHWC) for each in value]
        if value is None or len(value.get_size()) != len(NHWC):
            return value
        dense = ir.FlexibleLayout.stride_ordered(value.get_size(), NHWC)  # not a slice of channels
        return ir.ExternKernel.require_exact_strides(value, dense)

    def constrain(node: Node, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        passed = list(args)
        for position in positions(args):
            if position < len(passed):
                passed[position] = ordered(passed[position])
        V.graph.never_reuse_buffers.update(passed[position].get_name() for position in overwritten(args))
        return tuple(passed), kwargs

    # Without this Inductor would declare the operator itself, and pass the strides of the traced graph.
    lowering.make_fallback(operator, layout_constraint=constrain, warn=False)


def strides_as_traced(gm: GraphModule) -> bool:
    """Give the outputs of a graph of Dynamo's, whose layouts have changed, the strides that Dynamo saw. Returns False
    if the graph does not run in these layouts."""
    from torch._subclasses import FakeTensor
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    inputs: list[Any] = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    (output,) = gm.graph.find_nodes(op="output")
    try:
        mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
        with torch.no_grad():
            found = FakeTensorProp(copied(gm), mode).propagate_dont_convert_inputs(*inputs)
    except Exception:  # whatever an operator raises: a view is not possible
        return False
    results = list(output.args[0])
    for place, (node, value) in enumerate(zip(results, found, strict=True)):
        seen = node.meta.get("example_value") if isinstance(node, Node) else None
        if isinstance(seen, torch.Tensor) and _strides(value) != _strides(seen) and seen.is_contiguous():
            with gm.graph.inserting_before(output):
                results[place] = gm.graph.call_method("contiguous", (node,))
    output.args = (tuple(results),)
    return True


def _strides(tensor: torch.Tensor) -> list[int]:
    return [hint(stride) for stride in tensor.stride()]


def needs_traced_strides(operator: Any) -> None:
    """Make Inductor pass tensors to an operator in the strides of :data:`TRACED`."""
    from torch._inductor import lowering

    def constrain(node: Node, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        passed: tuple[tuple[Any, ...], dict[str, Any]]
        passed = lowering.constrain_to_fake_tensors(args, kwargs, *node.meta[TRACED])
        return passed

    lowering.make_fallback(operator, layout_constraint=constrain, warn=False)


def value_of(gm: GraphModule, node: Node) -> Any:
    """The value of a ``get_attr`` node. In a graph to be packaged, parameters of submodules have names with dots."""
    return attrgetter(str(node.target))(gm)


def hint(size: Any) -> int:
    """A number for an extent that may be symbolic: the one that it had when the graph was traced."""
    if isinstance(size, torch.SymInt):
        known = size.node.hint
        return int(known) if known is not None else 1
    return int(size)
