"""Tensor parallelism: torch's parallel styles on the modules of a block, as the model's own plan names them.

A plan says of each module, by a pattern of its name, how its weight is split. Names are those of `transformers`:

    colwise, rowwise                an `nn.Linear` by its outputs, or by its inputs, whose results are added up
    colwise_gather_output           by its outputs, which are whole again afterwards; of the head they stay split, and
                                    so does the loss
    rowwise_split_input             by its inputs, which come whole
    embedding_rowwise               an embedding by its vocabulary
    replicated_with_grad_allreduce  whole everywhere, but used on split heads: its gradients are added up

A module all of whose parts are split takes its input once for all of them, so that their gradients are added up once.

With `sequence`, what lies between the split modules of a layer works on a part of the sequence, and so do the messages
between stages: [B, S / ranks, hidden] instead of [B, S, hidden]. Parameters that lie there have gradients of their part
alone, which are added up once a step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from atoll.base.errors import PlanError
from atoll.plans.plan import Plan
from atoll.runtime.models import STYLES, Adapter, Block
from atoll.runtime.models.probe import Arguments, hidden_argument, replace_hidden
from atoll.runtime.randomness import draw_alike, draw_apart
from atoll.runtime.sharding.tensors import Spread, is_split

_SUMMED = "replicated_with_grad_allreduce"
_ROWS = ("rowwise", "rowwise_split_input")


def tensor_parallel(adapter: Adapter, plan: Plan, mesh: DeviceMesh, *, apart: Collection[str] = ()) -> TensorParallel:
    """The split of a model over the ranks of `mesh`, as its adapter defines it. Raises PlanError if it cannot be split.

    apart: names of modules that are split in another way.
    """
    styles = getattr(adapter, "tensor_plan", None)
    if styles is None:
        raise PlanError(
            f"tensor = {plan.mesh.tensor}: a {type(adapter).__name__} has no tensor_plan(), which says "
            "how layers are split; use tensor = 1, or give the model an adapter that has one"
        )
    given = mesh, adapter.blocks(), styles(plan.mesh.tensor)
    return TensorParallel(*given, sequence=plan.sequence_parallel, apart=frozenset(apart))


@dataclass(slots=True)
class TensorParallel:
    """Splits the blocks of one model over the ranks of `mesh`, which has one axis.

    styles: pattern of a module's name -> style.  apart: names of modules that are left as they are.
    """

    mesh: DeviceMesh
    blocks: Sequence[Block]
    styles: Mapping[str, str]
    sequence: bool = False
    apart: frozenset[str] = frozenset()
    _made: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted({style for style in self.styles.values() if style not in STYLES})
        if unknown:
            raise PlanError(
                f"the model's tensor plan wants {', '.join(unknown)}; Atoll knows {', '.join(STYLES)}. Use tensor = 1, "
                "or give the model an adapter with another tensor_plan()"
            )
        if self.sequence:
            self._check_sequence()
        self._check_shared()

    def _check_sequence(self) -> None:
        """Between split modules a layer works on a part of the sequence, which attention must not."""
        layers = [block for at, block in enumerate(self.blocks) if self._is_layer(at)]
        if not layers:
            raise PlanError(
                "sequence_parallel needs layers whose parts are split by outputs and then by inputs (colwise and "
                "rowwise), and the model's tensor plan has none; turn it off"
            )
        for block in layers:
            split = {name.partition(".")[0] for name in self._styles_of(block)}
            for name, child in block.module.named_children():
                if name not in split and any(type(each) in (nn.Linear, nn.Conv1d) for each in child.modules()):
                    raise PlanError(
                        f"sequence_parallel: the model's tensor plan leaves {block.name}.{name} whole, which may need "
                        "the whole sequence; turn it off"
                    )

    def _check_shared(self) -> None:
        """A shared weight is split wherever it is used, or nowhere."""
        uses: dict[int, dict[bool, str]] = {}
        for block in self.blocks:
            styles = self._styles_of(block)
            for name, module in block.named_modules():
                inner = name.removeprefix(block.name).removeprefix(".")
                for key, parameter in module.named_parameters(recurse=False):
                    is_split = key == "weight" and styles.get(inner, _SUMMED) != _SUMMED
                    uses.setdefault(id(parameter), {}).setdefault(is_split, f"{name}.{key}")
        mixed = [names for names in uses.values() if len(names) > 1]
        if mixed:
            raise PlanError(
                f"the model's tensor plan splits {mixed[0][True]} and not {mixed[0][False]}, which are one parameter; "
                "use tensor = 1, or give the model an adapter with another tensor_plan()"
            )

    def apply(self, at: int) -> dict[str, Spread]:
        """Split a block with real parameters; what became of each of them."""
        block = self.blocks[at]
        styles = self._styles_of(block)
        self._put_back(self._parameters(block))
        before = self._parameters(block)
        for name, style in styles.items():
            if style != _SUMMED:
                module = block.module.get_submodule(name)
                self._check_even(f"{block.name}.{name}" if name else block.name, module, style)
                if type(module).__name__ == "Conv1D":
                    self._split_conv1d(module)
                    continue
                parallelize_module(module, self.mesh, self._style(style, is_head=self._is_head(at)), src_data_rank=None)
        self._keep_identities(before)
        self._draw_apart(block, styles)
        for name in self._shares_input(block, styles):
            module = block.module.get_submodule(name) if name else block.module
            module.register_forward_pre_hook(partial(_take_whole, self.mesh, self._passed), with_kwargs=True)
        if self.sequence and self._is_layer(at):
            self._enter_and_leave(at)
        return {name: self._spread(name, parameter, at, styles=styles) for name, parameter in block.named_parameters()}

    def now(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that replaced `parameter` when its block was split."""
        return self._made[id(parameter)][1] if id(parameter) in self._made else parameter

    # ---- what is split

    def _styles_of(self, block: Block) -> dict[str, str]:
        """Module inside the block, "" for itself -> style."""
        found = {}
        for name, _ in block.named_modules():
            if name in self.apart:
                continue
            style = next((style for pattern, style in self.styles.items() if fnmatchcase(name, pattern)), None)
            if style is not None:
                found[name.removeprefix(block.name).removeprefix(".")] = style
        return found

    def _is_layer(self, at: int) -> bool:
        return 0 <= at < len(self.blocks) and any(s in _ROWS for s in self._styles_of(self.blocks[at]).values())

    def _is_head(self, at: int) -> bool:
        return at == len(self.blocks) - 1

    def _style(self, style: str, *, is_head: bool) -> ParallelStyle:
        given = self._passed
        match style:
            case "colwise":
                return ColwiseParallel()
            case "colwise_gather_output" if is_head:
                return ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            case "colwise_gather_output":
                return ColwiseParallel(output_layouts=Replicate())
            case "rowwise":
                return RowwiseParallel(output_layouts=given)
            case "rowwise_split_input":
                return RowwiseParallel(input_layouts=Replicate(), output_layouts=given)
        return RowwiseParallel(input_layouts=Replicate())

    def _check_even(self, name: str, module: nn.Module, style: str) -> None:
        """Vocabularies may be cut unevenly, and what is whole afterwards; what stays split is cut into equal parts."""
        if type(module) is nn.Linear and style in ("colwise", *_ROWS):
            size = module.in_features if style in _ROWS else module.out_features
            if size % self.mesh.size():
                raise PlanError(f"{name} has {size} features, which tensor = {self.mesh.size()} cannot split evenly")

    def _split_conv1d(self, module: nn.Module) -> None:
        """GPT-2's linear layer, whose weight lies the other way round, by its outputs."""

        def split(name: str, child: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(child.named_parameters(recurse=False)):
                parts = distribute_tensor(parameter, mesh, [Shard(parameter.dim() - 1)], src_data_rank=None)
                child.register_parameter(key, nn.Parameter(parts, requires_grad=parameter.requires_grad))

        def take(child: nn.Module, given: Any, mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(given[0], mesh, [Replicate()], run_check=False),)

        def give(child: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.redistribute(placements=[Replicate()]).to_local()

        distribute_module(module, self.mesh, split, take, give)

    def _spread(self, name: str, parameter: nn.Parameter, at: int, styles: Mapping[str, str]) -> Spread:
        if is_split(parameter):
            return Spread.SPLIT
        if isinstance(parameter, DTensor):
            return Spread.SAME
        module = name.removeprefix(self.blocks[at].name).removeprefix(".").rpartition(".")[0]
        works_on_part = self.sequence and self._is_layer(at)
        return Spread.SUMMED if works_on_part or styles.get(module) == _SUMMED else Spread.SAME

    def _parameters(self, block: Block) -> list[tuple[nn.Module, str, nn.Parameter]]:
        return [
            (module, name, parameter)
            for module in block.module.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        ]

    def _keep_identities(self, before: Sequence[tuple[nn.Module, str, nn.Parameter]]) -> None:
        """A parameter that was shared is shared again, and no whole one is left behind."""
        for module, name, was in before:
            now = module.get_parameter(name)
            if isinstance(was, DTensor):
                module.register_parameter(name, was)
            elif now is not was and id(was) not in self._made:
                now.requires_grad_(was.requires_grad)
                self._made[id(was)] = (was, now)
                was.data = was.new_empty(0)
        self._put_back(before)

    def _put_back(self, parameters: Sequence[tuple[nn.Module, str, nn.Parameter]]) -> None:
        for module, name, parameter in parameters:
            module.register_parameter(name, self.now(parameter))

    # ---- what comes in

    def _shares_input(self, block: Block, styles: Mapping[str, str]) -> list[str]:
        """Modules all of whose parts with parameters are split: their parts share one input."""
        found = []
        for parent in dict.fromkeys(name.rpartition(".")[0] for name, style in styles.items() if style in _ROWS):
            module = block.module.get_submodule(parent) if parent else block.module
            parts = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
            if all((f"{parent}.{name}" if parent else name) in styles for name in parts):
                found.append(parent)
            elif self.sequence:
                raise PlanError(
                    f"{block.name}.{parent} has parts that are not in the model's tensor plan, so it cannot work on a "
                    "part of the sequence; turn sequence_parallel off"
                )
        return found

    def _draw_apart(self, block: Block, styles: Mapping[str, str]) -> None:
        """Between modules split by outputs and the next one split by inputs, random numbers are a rank's own."""
        rank = self.mesh.get_local_rank()
        joins = False
        for name, style in reversed(list(styles.items())):
            if style in _ROWS:
                joins = True
                block.module.get_submodule(name).register_forward_pre_hook(_draw_alike)
            elif style == "colwise" and joins:
                block.module.get_submodule(name).register_forward_hook(
                    partial(_draw_apart, rank, f"{block.name}.{name}")
                )

    def _enter_and_leave(self, at: int) -> None:
        """The first layer takes its part of the sequence, the last one gives all of it."""
        module = self.blocks[at].module
        if not self._is_layer(at - 1):
            module.register_forward_pre_hook(partial(_take_part, self.mesh), with_kwargs=True)
        if not self._is_layer(at + 1):
            module.register_forward_hook(partial(_give_whole, self.mesh))

    @property
    def _passed(self) -> Any:
        """The placement of the hidden state between the split modules of a layer."""
        return Shard(-2) if self.sequence else Replicate()


# Hooks, which hold the mesh and nothing that holds them: Python's collector would see the circle late.


def _take_whole(mesh: DeviceMesh, passed: Any, module: nn.Module, args: Any, kwargs: Any) -> Arguments:
    hidden = DTensor.from_local(hidden_argument(args, kwargs), mesh, [passed], run_check=False)
    return replace_hidden(args, kwargs, hidden.redistribute(placements=[Replicate()]))


def _draw_apart(rank: int, name: str, module: nn.Module, args: Any, output: Any) -> None:
    if module.training:
        draw_apart(rank, name)


def _draw_alike(module: nn.Module, args: Any) -> None:
    draw_alike()


def _take_part(mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: Any) -> Arguments:
    return replace_hidden(args, kwargs, _moved(mesh, hidden_argument(args, kwargs), Replicate(), after=Shard(1)))


def _give_whole(mesh: DeviceMesh, module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (_moved(mesh, output[0], Shard(1), after=Replicate()), *output[1:])
    return _moved(mesh, output, Shard(1), after=Replicate())


def _moved(mesh: DeviceMesh, hidden: Tensor, before: Any, after: Any) -> Tensor:
    moved: Tensor = (
        DTensor.from_local(hidden, mesh, [before], run_check=False).redistribute(placements=[after]).to_local()
    )
    return moved
