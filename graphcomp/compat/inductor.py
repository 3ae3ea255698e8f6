"""Inductor below AOTAutograd. Its public entry traces the graph a second time and wraps every call; ours
needs neither."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from graphcomp.compat.believed import as_read
from graphcomp.compat.corrected import corrected
from graphcomp.compat.decompositions import inductor_table, trace_with
from graphcomp.compat.inductor_options import with_options
from graphcomp.compat.onednn import use_onednn
from graphcomp.compat.sums import products_in_place, write_sums
from graphcomp.compat.symbols import FakeTensorMode
from graphcomp.compat.undecided import ask_nothing

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class CompiledCode:
    """call: the code itself, below all wrappers. graph: Inductor's object, from which it can be written to a file."""

    call: Boxed
    graph: Any

    def __call__(self, box: list[Any]) -> Sequence[Any]:
        return self.call(box)


def compile_graph(
    module: GraphModule,
    inputs: Sequence[Any],
    mode: FakeTensorMode,
    written: Sequence[tuple[int, int]] = (),
    options: Mapping[str, Any] | None = None,
) -> CompiledCode:
    """Compile a functional aten graph with fake or symbolic inputs, as they stand in `mode`.

    written: (input, output) by place: the output is written to the input's memory, and None is returned for it.
    options: of Inductor, by name.

    The result takes one list, which it empties before it computes, so that inputs die at their last use.
    Outputs keep the strides they have in the graph. Needs grad mode off, at compile time and at run time.
    Sizes that Inductor has to decide on become guards of the mode's shape environment (see `guards_since`).
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
    from torch._inductor.virtualized import V

    with tracing(TracingContext(mode)), with_options(options or {}), V.set_fake_mode(mode), as_read():
        with mode, enable_python_dispatcher():
            module = _decompose(module, inputs)
        module = _recursive_joint_graph_passes(module, input_device=_device(inputs))
        use_onednn(module.graph)
        output = module.graph.output_node()
        write_sums(module.graph, written)
        module.recompile()  # its code is the key of Inductor's cache on disk
        results: Any = output.args[0]
        visible = [place for place, node in enumerate(results) if isinstance(node, Node)]
        output.meta["user_visible_output_idxs"] = visible
        with ask_nothing(), corrected(), products_in_place():
            compiled: Any = compile_fx_inner(module, list(inputs), is_inference=True, cpp_wrapper=config.cpp_wrapper)
    return CompiledCode(callable_of(compiled), compiled)


def callable_of(compiled: Any) -> Boxed:
    """Below the wrapper that serves the autotuner's cache and the profiler, which costs as much as a small kernel."""
    return getattr(compiled, "current_callable", None) or compiled


def guards_since(mode: FakeTensorMode, count: int, symbols: Container[str]) -> tuple[sympy.Basic, ...]:
    """The relations a shape environment has assumed after its first `count` guards.

    symbols: those that a program has. A guard stands as it was asked, and that may be of sizes which the trace had
    found to equal others: symbols that the program no longer has are written as those that took their place. What it
    has of its own stays, also if the guards themselves have made two of them equal.
    """
    env: Any = mode.shape_env
    found: dict[sympy.Basic, None] = {}
    for guard in env.guards[count:]:
        gone = {symbol: env.replace(symbol) for symbol in guard.expr.free_symbols if str(symbol) not in symbols}
        found[guard.expr.xreplace(gone)] = None
    return tuple(relation for relation in found if relation != sympy.true)


def _decompose(module: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """The graph in the operations that Inductor lowers, still functional."""
    run: Callable[..., Any] = torch.fx.Interpreter(module).run
    done = trace_with(lambda *values: list(run(*values)), inputs, inductor_table())
    if any(_writes(node) for node in done.graph.nodes):  # some decompositions fill a tensor in place
        # Of what the first trace made: a function that an operator takes is run under other transforms there. Views
        # stay, for a copy in the place of one that is a result would have other strides.
        functional = torch.func.functionalize(torch.fx.Interpreter(done).run, remove="mutations")
        done = trace_with(lambda *values: list(functional(*values)), inputs, inductor_table())
    done.graph.eliminate_dead_code()
    done.recompile()
    return done


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _device(inputs: Sequence[Any]) -> torch.device:
    return next((x.device for x in inputs if isinstance(x, torch.Tensor)), torch.device("cpu"))
