"""The compiled step: what the trainer calls. Wiring only."""

from __future__ import annotations

import contextlib
import gc
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from graphcomp import backend as backends
from graphcomp.call import BoundStep, Options, Ran
from graphcomp.compat.reads import host_syncs
from graphcomp.compiler import GraphCompiler, Specialisation
from graphcomp.dispatch import Dispatcher
from graphcomp.engine import Engine
from graphcomp.errors import ArtifactError, GraphcompError, PlanError, StepError
from graphcomp.plan import Plan
from graphcomp.prepare import Prepared
from graphcomp.runtime.ranks.layout import Layout, check_layout, make_layout
from graphcomp.runtime.ranks.tensor_ranks import check_parts
from graphcomp.runtime.results.hooks import Hook, Looking
from graphcomp.runtime.results.result import StepResult
from graphcomp.runtime.state.held import HeldStep
from graphcomp.runtime.state.initial import Initialiser, Recipe
from graphcomp.stored import Store, key_of, write

Outputs = Literal["none", "local", "all"]
_OUTPUTS = ("none", "local", "all")
Result = TypeVar("Result")


@dataclass
class Stats:
    """Counters. traces: captures made. programs: programs compiled on this rank. steps: steps that ended well.

    messages, bytes_sent: payloads this rank sent to other stages in the last step. collectives: of the last step, the
    closing exchange of losses and metrics included. host_syncs: how often the last step waited for the device in order
    to read how many rows an exact `all_to_all` moves.
    """

    traces: int = 0
    programs: int = 0
    steps: int = 0
    messages: int = 0
    bytes_sent: int = 0
    collectives: int = 0
    host_syncs: int = 0


class CompiledStep:
    """The training step of a model under a plan. Made by `compile_train_step`."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None, plan: Plan, layout: Layout) -> None:
        self.model, self.plan, self.layout = model, plan, layout
        self.rank = None if layout.side is None else layout.place
        self.compiler = GraphCompiler(model, loss_fn, plan, rank=self.rank, data_ranks=layout.data_ranks)
        self.stats = Stats()
        self._dispatcher = Dispatcher(self.compiler, layout.device)
        self.engine = Engine(self.compiler, layout)
        self.latest: list[Specialisation] = []
        self._prepared: Prepared | None = None
        self._hooks: OrderedDict[int, Hook] = OrderedDict()

    def compile(self, example: Any) -> None:
        """Capture and compile for microbatches like `example`, without running a step. All ranks must call it."""
        self._bind([example], Options(stops="prepared"))

    def materialize(self, init: Initialiser | None = None, *, seed: int = 0) -> None:
        """Give memory and first values to what this rank owns of a model that was built on the meta device.

        init: a function on a module, as `nn.Module.apply` takes it; None: every module's own `reset_parameters()` or
            `_reset_parameters()`. Called for all modules, children first; what is not owned stays on meta meanwhile.
        seed: the values depend on it, on nothing else: not on the layout, nor on what was drawn before.

        What has values keeps them, so for a real model this does nothing. Parameters stay the same objects. With
        several stages of which nothing is compiled yet, it is done at the first compile. All ranks must call it. Raises
        StateError, before any effect, for what nothing initialises.
        """
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise PlanError("the seed of materialize is a whole number", got=repr(seed))
        self.engine.materialize(Recipe(init, seed))

    def __call__(
        self,
        microbatches: Iterable[Any],
        outputs: Outputs = "none",
        *,
        loss_scale: float = 1.0,
        tokens: Mapping[str, Any] | None = None,
    ) -> StepResult:
        """One step: forward, loss and backward of every microbatch; gradients are added to `.grad` at the end.

        microbatches: a list or iterator of batches, of any lengths, any number from 1.
        outputs: "none"; "local": the model's outputs on the ranks that computed them; "all": on every rank.
        loss_scale: multiplies the gradients, exactly; the reported losses stay as they are.
        tokens: what to divide by, by loss name, in the place of this step's own counts: several calls that share the
            counts of all their microbatches (`step.count`) add up to one step over them. Whole numbers, unless the
            loss counts float weights.

        Nothing is changed if it raises, unless the error says otherwise. Raises BatchError, GuardError, CaptureError,
        StepError, and whatever the model's own code raises; RankFailure if that was on another rank.
        """
        options = Options(True, outputs, loss_scale, inspects=self._inspects)
        return self._run(microbatches, options, tokens or {}).result

    def hold(self, microbatches: Iterable[Any], outputs: Outputs = "none") -> HeldStep:
        """A step that keeps its gradients until `deposit()`, which adds them to `.grad`. Buffers are written as ever.

        Raises what a step raises; nothing is changed then.
        """
        ran = self._run(microbatches, Options(True, outputs, holds=True, inspects=self._inspects), {})
        return HeldStep(ran.result, ran.gradients, self.engine.state)

    def on_microbatch(self, hook: Hook) -> RemovableHandle:
        """Call `hook(result)` for each microbatch of every later training step; `remove()` of the handle ends that.

        Once for each of this pipeline's microbatches (a `MicrobatchResult`), in their order whatever the schedule, and
        outside of the program: when the step has run, and before anything is written. If a hook raises an
        Exception, nothing is written on any rank, all ranks raise, and the step may be used on; after one that ends its
        process (`sys.exit`), all raise, and the step is of no more use. All ranks must have hooks, or none.
        """
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    @property
    def _inspects(self) -> bool:
        return bool(self._hooks) or self.plan.check_finite

    def count(self, microbatches: Iterable[Any]) -> dict[str, torch.Tensor]:
        """What a step over these microbatches divides each loss by: its tokens, over all data ranks.

        For a mean loss: the number of microbatches. 0-dim tensors by loss name, lazy. All ranks must call it.
        """
        return dict(self.engine.count(self._bind(microbatches, Options(stops="counted"))).tokens)

    def evaluate(self, microbatches: Iterable[Any], outputs: Outputs = "none") -> StepResult:
        """Forward and loss only, in eval mode.

        Changes neither gradients, nor buffers, nor the model's modes, nor the random streams: what is trained later is
        the same, bit by bit, with and without it.
        """
        with evaluating(self.model, self.layout.device):
            return self._run(microbatches, Options(False, outputs), {}).result

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The user's own parameters that this rank owns, by original name, in the model's order.

        What no stage uses, the first one owns. Before the first step or `compile(example)` no stage is known; then this
        raises StepError on a cut plan.
        """
        owns = self.owner()
        yield from ((name, parameter) for name, parameter in self.model.named_parameters() if owns(name))

    def owner(self) -> Callable[[str], bool]:
        """A function that says whether this rank owns the parameter or buffer of a name. Raises as above."""
        if not self.engine.owned.is_placed:
            raise StepError(
                "it is not known yet which stage owns what", do="run a step, or call step.compile(example) first"
            )
        return self.engine.owned.holds

    def state_dict(self) -> dict[str, Any]:
        """As `model.state_dict()`, with the same names: what this rank owns of it, in the memory of the model.

        Persistent buffers and the extra state of modules are in it; a sharded parameter is a DTensor. Raises StepError
        on a cut plan before a first step or `compile(example)`.
        """
        from graphcomp.checkpoint.entries import owned_state

        return owned_state(self)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Copy into the model what this rank owns of a dict by the model's names; all ranks must call it.

        state: whole tensors, of all that the model has or of what this rank owns; or what `state_dict()` returned on
        this rank. Returns the names that are missing, and those that are not the model's; with `strict` it raises for
        them. Raises CheckpointError before any effect, on all ranks. A model on meta is given memory.
        """
        from graphcomp.checkpoint.weights import load_state_dict

        return load_state_dict(self, state, strict)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The user's own parameters that this rank owns."""
        return (parameter for _, parameter in self.named_parameters())

    def counted_parameters(self) -> Iterator[nn.Parameter]:
        """The owned parameters without those that a lower stage holds too: each logical one on exactly one stage."""
        if len(self.layout.ranks) == 1:
            yield from self.parameters()
            return
        homes, own = self.compiler.homes, self.layout.own_stages
        named = self.named_parameters()
        yield from (parameter for name, parameter in named if homes.get(name, (0,))[0] in own)

    def close(self) -> None:
        """Give back process groups, connections and threads. All ranks must call it; again, it does nothing.

        Waits for a checkpoint that is being written in the background. Parameters, gradients and an optimizer are as
        they were and stay usable, as does the mesh; so do `parameters()` and `state_dict()`. All else raises StepError
        from then on. After a RankFailure a rank may call it by itself. Raises RankFailure if another rank is gone.
        """
        from graphcomp.checkpoint.writing import leave

        if not self.engine.closed:
            leave(self)
            self.engine = self.engine.close()
            self.layout, self._prepared, self.latest = self.engine.layout, None, []
            gc.collect()  # what refers to groups refers to itself, too

    def together(self, doing: str, work: Callable[[], Result]) -> Result:
        """Do what all ranks do together between steps: an error on one of them becomes an error on all."""
        return self.engine.together.do(doing, work)

    def explain(self) -> str:
        """The plan as text: stages, boundaries, parameters, FLOPs, bytes, schedule, bubble and peak memory."""
        from graphcomp.inspect import explain

        prepared = self._compiled()
        return explain(prepared.partitioned[-1], self.plan, prepared.programs.schedule, prepared.data)

    def dump(self, folder: str | Path) -> list[Path]:
        """Write every program, in order, as text; returns the files.

        With several ranks each writes into its own folder below, `rank_0`, `rank_1`, ...
        """
        from graphcomp.inspect import dump_step

        prepared = self._compiled()
        if self.rank is not None:
            folder = Path(folder) / f"rank_{self.rank}"
        return dump_step(folder, self.compiler, prepared.programs, self.explain(), prepared.data)

    def save(self, folder: str | Path) -> Path:
        """Write all that was captured and compiled so far, for `graphcomp.load`; every rank its own file. Returns it.

        Raises ArtifactError for a program that cannot be written.
        """
        self._compiled()
        path = self._file_in(folder)
        write(path, self._key(), self._dispatcher.programs(), self.compiler.backend)
        return path

    def take_over(self, folder: str | Path) -> None:
        """Use what `save` has written, by a process that was like this one. All ranks must call it.

        Raises ArtifactError on all ranks, naming what has changed, if it does not fit; then nothing is taken over.
        """
        path = self._file_in(folder)

        def found() -> Store:
            return Store(path, self._key(), self._dispatcher.guard.key(), self.compiler)

        self._dispatcher.store = self.engine.together.look("take over saved programs", found, refusal=ArtifactError)

    def _file_in(self, folder: str | Path) -> Path:
        return Path(folder) / f"rank_{self.rank or 0}.programs"

    def _key(self) -> dict[str, str]:
        return key_of(self.plan, self.layout.device, self.rank or 0, self.model)

    def _run(self, microbatches: Iterable[Any], options: Options, tokens: Mapping[str, Any]) -> Ran:
        try:
            _check(options)
            given = _denominators(tokens)
        except GraphcompError as error:
            self.engine.refuse(error)
        stats = self.stats
        looking = Looking(stats.steps, tuple(self._hooks.values()))
        before = host_syncs()
        bound = self._bind(microbatches, options.given(given))
        ran = self.engine.run(bound, given, looking)
        stats.host_syncs = host_syncs() - before
        stats.steps += options.training
        stats.messages, stats.bytes_sent, stats.collectives = ran.messages, ran.bytes_sent, ran.collectives
        return ran

    def _bind(self, microbatches: Iterable[Any], options: Options) -> BoundStep:
        bound = self.engine.bind(self._dispatcher, [microbatches], options)
        self.stats.traces, self.stats.programs = self.compiler.traces, self.compiler.backend.programs
        if options.training:
            line = bound.lines[0]
            self.latest = [one.specialisation for one in line.bound]
            self._prepared = line.prepared
        return bound

    def _compiled(self) -> Prepared:
        if self._prepared is None:
            self.engine.require_usable()
            raise StepError("nothing is compiled yet", do="run a step, or call step.compile(example) first")
        return self._prepared


def _check(options: Options) -> None:
    """Raise PlanError, or StepError, for a call that cannot be meant."""
    if options.training and not torch.is_grad_enabled():
        raise StepError(
            "a training step was called under no_grad",
            do="call step.evaluate(microbatches) to evaluate, or leave the no_grad block",
        )
    scale = options.loss_scale
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise PlanError("loss_scale is a finite number", got=repr(scale), do="read a tensor with float() first")
    if options.outputs not in _OUTPUTS:
        raise PlanError(f"unknown outputs={options.outputs!r}", expected=", ".join(map(repr, _OUTPUTS)))


def _denominators(tokens: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """As 0-dim tensors. Raises PlanError for what is no number that a loss could be divided by."""
    found: dict[str, torch.Tensor] = {}
    for name, value in tokens.items():
        number = isinstance(value, torch.Tensor | int | float) and not isinstance(value, bool)
        given = torch.as_tensor(value) if number else None
        if given is None or given.dim() or given.is_complex() or given.dtype is torch.bool:
            raise PlanError(
                f"the tokens of loss '{name}' are one number",
                where="step(..., tokens=...)",
                expected="a number, or a 0-dim tensor, as step.count(microbatches) returns",
                got=repr(value) if given is None else f"a {given.dtype} tensor of shape {tuple(given.shape)}",
            )
        found[name] = given
    return found


def compile_train_step(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None = None, *, plan: Plan | None = None
) -> CompiledStep:
    """Compile the training step of `model`.

    loss_fn: `loss_fn(output, batch)`, plain PyTorch, run once while tracing; returns a loss (`token_loss`,
        `mean_loss`, a scalar), a dict of losses by name, or (losses, metrics). None: the model's output has `.loss`.
    plan: what to compile for; None: this process alone, one stage, Inductor.

    The model is captured at the first call, or at `step.compile(example)`; it stays the user's own object. With a
    mesh, all of its ranks must call this. Raises PlanError, without any effect, if the plan does not fit this process
    or model.
    """
    plan = plan or Plan()
    check_layout(plan)
    check_parts(plan, model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PlanError(
            "the model has nothing to train: no parameter requires a gradient",
            where=type(model).__name__,
            do="call requires_grad_() on what is to be trained",
        )
    backends.get(plan.backend, options=plan.compile_options)  # the layout makes process groups: refused before that
    return CompiledStep(model, loss_fn, plan, make_layout(plan, model))


@contextlib.contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Every module in eval mode within; each one's own mode, and the random streams as they were, again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            for module, _ in modes:
                module.training = False
            yield
    finally:
        for module, mode in modes:
            module.training = mode
