"""Build the units and blocks of one rank from a model, possibly on `meta`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from atoll.base.errors import PlanError
from atoll.plans.plan import Plan, View
from atoll.program import EMBEDDING, HEAD, ModelShape, Phase, Using, groups_of
from atoll.runtime.assemble.ends import StageEnds
from atoll.runtime.assemble.sharded import Sharded
from atoll.runtime.experts.division import DividedExperts
from atoll.runtime.experts.kinds import deferred_in, stacked_in
from atoll.runtime.models import Adapter, Block, Vocabulary, initialise_block, name_seed, shared_parameters
from atoll.runtime.models.buffers import buffers_of, buffers_outside, modules_outside, on_meta, written
from atoll.runtime.outline import Outline
from atoll.runtime.pipeline.block import LocalBlock
from atoll.runtime.pipeline.deferred import Collector, defer
from atoll.runtime.pipeline.float8 import check_float8, multiplication
from atoll.runtime.pipeline.selective import Selective
from atoll.runtime.pipeline.stage import Stage
from atoll.runtime.sequence.divide import DividedSequences
from atoll.runtime.sharding.surroundings import Surroundings
from atoll.runtime.sharding.tensor_parallel import TensorParallel
from atoll.runtime.sharding.tensors import Spread, dtype_of
from atoll.runtime.sharding.unit import Unit, UnitSpec, unit_specs
from atoll.runtime.vocabulary.chunked import ChunkedLoss
from atoll.runtime.vocabulary.slice import VocabularySlice, VocabularyTable, as_slice, block_of, names_of


def build_rank(
    outline: Outline,
    *,
    around: Surroundings,
    collector: Collector,
    seed: int,
    tensor: TensorParallel | None,
    experts: DividedExperts,
    sequences: DividedSequences | None = None,
) -> Sharded:
    """Return units, stages and wiring. Materializes this rank's blocks one after the other, each into its units, and
    installs them in the model.

    tensor: how blocks are split over a tensor-parallel group, if there is one.  experts: of the model.
    sequences: if ranks divide them.
    On `meta` no values are created.
    """
    model = _Model.of(outline, around.transport.place.pp, experts, sequences=sequences)
    check_float8(outline, around.device)
    sliced: VocabularySlice | None = None
    if outline.vocabulary is not None:
        sliced = _slice_vocabulary(model, outline.vocabulary, around, seed=seed, tensor=tensor)
    units = _units(model, around, seed=seed, tensor=tensor, sliced=sliced)
    stages = tuple(_stage(model, stage, units, around=around, collector=collector) for stage in model.mine)
    ordered = tuple(units[index] for index in sorted(units))
    for view in View:
        own = [unit for unit in ordered if unit.spec.view is view]
        shapes = [(len(unit.owners) > 1, [segment.flat.shape for segment in unit.segments]) for unit in own]
        sharding = outline.plan.sharding(around.transport.place, view)
        for unit, dealt in zip(own, sharding.dealt(shapes), strict=True):
            for segment, shape in zip(unit.segments, dealt, strict=True):
                segment.flat.matrix_owners = shape.owners
    return Sharded(
        model.shape,
        model.specs,
        ordered,
        stages=stages,
        trainable=_trainable(model.blocks, model.specs),
        vocabulary=sliced,
        matrices=model.matrices,
        chunked=next((stage.exit for stage in stages if isinstance(stage.exit, ChunkedLoss)), None),
    )


@dataclass(frozen=True, slots=True)
class _Model:
    """The model and this rank's part of it.

    shared: every later name of a shared parameter -> its first name.  apart: names of what is sliced over the pipeline.
    shape: what every rank knows of it.  mine: this rank's stages.
    matrices: names of parameters that the optimizer transforms whole.  on_host: units of this rank whose state rests in
    host memory.
    """

    outline: Outline
    blocks: tuple[Block, ...]
    shared: Mapping[str, str]
    apart: tuple[tuple[str, ...], ...]
    specs: tuple[UnitSpec, ...]
    shape: ModelShape
    mine: tuple[int, ...]
    matrices: frozenset[str]
    on_host: frozenset[int]
    experts: DividedExperts
    sequences: DividedSequences | None

    @staticmethod
    def of(outline: Outline, rank: int, experts: DividedExperts, *, sequences: DividedSequences | None) -> _Model:
        adapter, runs = outline.adapter, outline.runs
        blocks = tuple(adapter.blocks())
        shared = shared_parameters(adapter)
        apart = () if outline.vocabulary is None else names_of(adapter, outline.vocabulary, shared)
        groups = groups_of([type(block.module) for block in blocks], runs, outline.plan.unit)
        named = [(block.name, block.module) for block in blocks]
        specs = unit_specs(named, groups, apart, experts=experts.names)
        trained = [at for at, block in enumerate(blocks) if any(p.requires_grad for _, p in block.named_parameters())]
        if outline.plan.host is not None:
            every = (parameter for block in blocks for _, parameter in block.named_parameters())
            outline.plan.host.check(has_frozen=any(not parameter.requires_grad for parameter in every))
        shape = ModelShape(
            outline.plan,
            runs,
            tuple(Using(spec.blocks, spec.is_shared, spec.view) for spec in specs),
            first_trained=min(trained, default=len(blocks)),
            slices={} if outline.vocabulary is None else {EMBEDDING: 0, HEAD: len(apart) - 1},
            exchanges=Counter(experts.exchanges) + Counter({} if sequences is None else sequences.exchanges),
        )
        mine = shape.stages_of(rank)
        return _Model(
            outline,
            blocks,
            shared,
            apart=apart,
            specs=specs,
            shape=shape,
            mine=mine,
            on_host=shape.on_host(_trained(blocks, specs, {at for stage in mine for at in runs[stage]})),
            matrices=_matrices(blocks, specs, shared, plan=outline.plan, apart=apart),
            experts=experts,
            sequences=sequences,
        )

    @property
    def local(self) -> list[int]:
        """This rank's blocks."""
        return [block for stage in self.mine for block in self.outline.runs[stage]]

    def around(self, around: Surroundings, spec: UnitSpec) -> Surroundings:
        """Return the surroundings of a unit's segments."""
        sharding = self.outline.plan.sharding(around.transport.place, spec.view)
        is_on_host = spec.index in self.on_host
        host = self.outline.plan.host
        if spec.view is View.DENSE and not is_on_host and (host is None or host.parameters is None):
            return around
        if host is not None:
            has_copies = len(self.shape.owners(spec.index)) > 1
            sharding = host.placed(sharding, is_on_host=is_on_host, has_copies=has_copies)
        return replace(around, sharding=sharding)

    @property
    def sliced(self) -> tuple[UnitSpec, ...]:
        """Units of slices of the vocabulary, which precede the others."""
        return self.specs[: len(self.apart)]


def _units(
    model: _Model,
    around: Surroundings,
    *,
    seed: int,
    tensor: TensorParallel | None,
    sliced: VocabularySlice | None,
) -> dict[int, Unit]:
    """Build the units of this rank by index, freed: at most one block of the model is unsharded here at a time."""
    outline, shared, local = model.outline, model.shared, model.local
    ranks = around.transport.place.peers("pp")
    in_i = "" if outline.chunked is None else outline.chunked.head
    phases = _phases([model.blocks[at] for at in local], shared, is_split=len(outline.runs) > 1, in_i=in_i)
    elsewhere = {name for names in model.apart for name in names}
    units = {} if sliced is None else {table.unit.spec.index: table.unit for table in sliced.tables}
    replaced: dict[int, nn.Parameter] = {}
    buffers: dict[torch.Tensor, torch.Tensor] = {}
    placed: dict[torch.Tensor, torch.Tensor] = {}
    values: dict[str, nn.Parameter] = {}
    spreads: dict[str, Spread] = {}
    for at in local:
        block = model.blocks[at]
        _materialise(
            outline.adapter,
            block,
            shared,
            replaced=replaced,
            buffers=buffers,
            elsewhere=elsewhere,
            around=around,
            seed=seed,
        )
        _read(buffers_of(block) if around.weights is not None else {}, around)
        if tensor is not None:
            found_spreads = tensor.apply(at)
            spreads.update({shared.get(name, name): spread for name, spread in found_spreads.items()})
            replaced.update({key: tensor.now(parameter) for key, parameter in replaced.items()})
        spreads.update(model.experts.apply(at))
        values.update(block.named_parameters())
        for spec in model.specs:
            if at not in spec.blocks or spec.index in units or not (spec.is_shared or at == spec.blocks[-1]):
                continue
            owners = tuple(ranks[pp] for pp in model.shape.owners(spec.index))
            found = {name: _find(values, name, shared) for name in spec.names}
            units[spec.index] = Unit(
                spec,
                found,
                model.around(around, spec),
                owners=owners,
                phases=phases,
                spreads=spreads or None,
                matrices=model.matrices,
            )
        for spec in model.specs:
            # A shared unit stays unsharded until its last block here has been initialised.
            if spec.blocks and spec.index in units and max(used for used in spec.blocks if used in local) == at:
                units[spec.index].free()
        _place_buffers(block.module.modules(), around.device, placed)
    _fill_outside(outline.adapter, around, seed=seed, placed=placed)
    return units


def _stage(model: _Model, stage: int, units: Mapping[int, Unit], around: Surroundings, collector: Collector) -> Stage:
    """Build a stage and install its blocks where the model calls them."""
    plan, runs = model.outline.plan, model.outline.runs
    last = len(runs) - 1
    users = tuple(units[at] for at in sorted(units, reverse=True) if set(units[at].spec.blocks) & set(runs[stage]))
    part = None if model.sequences is None else model.sequences.part
    ends = StageEnds.of(model.outline, stage, users, part=part)
    waits = last > 0
    keeps = plan.recompute == "selective" and plan.compile == "none"
    own_blocks: list[LocalBlock] = []
    for at in runs[stage]:
        block = model.blocks[at]
        own = [unit for unit in users if at in unit.spec.blocks]
        has_end = any(end is not None and end.lies_in(block) for end in ends)
        # An embedding keeps its ids, which exist anyway, and has nothing to fuse. Split by rows, it could be neither
        # run again nor traced: a hook around the block makes its output whole, and keeps a mask.
        is_table = isinstance(block.module, nn.Embedding)
        local = LocalBlock(
            block.module,
            at,
            own,
            needs_backward=at >= model.shape.first_trained,
            recompute="none" if is_table else plan.recompute,
            end=ends.exit if ends.exit is not None and ends.exit.lies_in(block) else None,
            keeping=Selective(collector, by_layers=plan.offloads > 0 or model.experts.replaces(at, waits=waits))
            if keeps and not is_table
            else None,
        )
        own_blocks.append(local)
        # Replace the layers' forwards first and then the block's: replaced modules are compiled with the block.
        replaced = False
        products = multiplication(plan.precision, around.device) if at in model.outline.layers else None
        adds = plan.compile == "none" and around.device.type != "meta"
        if waits or adds or products is not None:
            options: dict[str, Any] = {"waits": waits, "every": keeps, "adds": adds, "products": products}
            replaced = bool(defer(block.module, own, collector, apart=ends.head, **options))
        if around.device.type != "meta":
            replaced |= model.experts.install(at, own, collector, waits=waits)
        # Layers that are replaced are objects of their own in compiled blocks too.
        own_graph = replaced and (waits or products is not None)
        local.take_place("none" if has_end or is_table else plan.compile, has_waiting=own_graph)
    return Stage(
        stage,
        runs[stage],
        is_last=stage == last,
        adapter=model.outline.adapter,
        units=users,
        blocks=tuple(own_blocks),
        entry=ends.entry,
        exit=ends.exit,
    )


def _slice_vocabulary(
    model: _Model, vocabulary: Vocabulary, around: Surroundings, *, seed: int, tensor: TensorParallel | None
) -> VocabularySlice:
    """Materialize the two ends one after the other, and keep this rank's rows of them."""
    place, mesh = around.transport.place, around.transport.mesh_along("pp", "tp")
    adapter, blocks, shared = model.outline.adapter, model.blocks, model.shared
    modules = {name: module for block in blocks for name, module in block.named_modules()}
    found: dict[str, nn.Parameter] = {}
    for end in vocabulary.ends:
        block, module = blocks[block_of(blocks, end)], modules[end]
        firsts = {key: shared.get(f"{end}.{key}", f"{end}.{key}") for key, _ in module.named_parameters()}
        drawn = set()
        for key, first in firsts.items():
            parameter = module.get_parameter(key)
            if first not in found and parameter.is_meta and around.device.type != "meta":
                empty = torch.empty(parameter.shape, dtype=_first_dtype(around))
                module.register_parameter(key, nn.Parameter(empty, requires_grad=parameter.requires_grad))
                drawn |= set() if around.weights is not None and first in around.weights else {first}
        if drawn:
            every = {shared.get(name, name) for name, _ in block.named_parameters()}
            initialise_block(adapter, block, seed, shared=shared, known=every - drawn)
        for key, first in firsts.items():
            if first not in found:
                found[first] = as_slice(module.get_parameter(key), mesh)
            module.register_parameter(key, found[first])
    units = {}
    for spec in model.sliced:
        held = {name: found[name] for name in spec.names}
        phases: dict[str, frozenset[Phase]] = {name: frozenset({"W"}) for name in held}
        spreads = dict.fromkeys(held, Spread.SPLIT)
        unit = Unit(spec, held, model.around(around, spec), owners=(place.rank,), phases=phases, spreads=spreads)
        units.update(dict.fromkeys(held, unit))
        unit.free()

    def table(end: str) -> VocabularyTable:
        names = {key: shared.get(f"{end}.{key}", f"{end}.{key}") for key, _ in modules[end].named_parameters()}
        return VocabularyTable(units[names["weight"]], names["weight"], names.get("bias"))

    embedding = modules[vocabulary.embedding]
    assert isinstance(embedding, nn.Embedding), "it has been looked at"
    return VocabularySlice(
        vocabulary,
        table(vocabulary.embedding),
        table(vocabulary.head),
        index=place.pp,
        ranks=place.mesh.pipeline,
        tensor=None if tensor is None else tensor.mesh,
        size=embedding.num_embeddings,
        padding=embedding.padding_idx,
    )


def _phases(
    blocks: Sequence[Block], shared: Mapping[str, str], *, is_split: bool, in_i: str
) -> dict[str, frozenset[Phase]]:
    """Return the phases that compute the gradient of each parameter, by first name: [Note: phases] in segment.py.

    Without a pipeline no rank waits for the input's gradient, so nothing is deferred. in_i: a module that never is.
    """
    found: dict[str, set[Phase]] = {}
    for block in blocks:
        for prefix, module in block.named_modules():
            for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
                qualified = f"{prefix}.{name}"
                is_deferred = is_split and prefix != in_i and name in deferred_in(module)
                found.setdefault(shared.get(qualified, qualified), set()).add("W" if is_deferred else "I")
    return {name: frozenset(phases) for name, phases in found.items()}


def _first_dtype(around: Surroundings) -> torch.dtype:
    """Return the dtype in which initial values are drawn: the master's, so half precision loses nothing of it."""
    return dtype_of(around.sharding.precision.master)


def _trainable(blocks: Sequence[Block], specs: Sequence[UnitSpec]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    known = {name: parameter for block in blocks for name, parameter in block.named_parameters()}
    names = [name for spec in specs for name in spec.names if known[name].requires_grad]
    return tuple((name, tuple(known[name].shape)) for name in names)


def _trained(blocks: Sequence[Block], specs: Sequence[UnitSpec], local: Collection[int]) -> dict[int, bool]:
    """Return the units of a rank, each with whether any of its parameters is trained. local: the rank's blocks."""
    known = {name: parameter for block in blocks for name, parameter in block.named_parameters()}
    return {
        spec.index: any(known[name].requires_grad for name in spec.names)
        for spec in specs
        if not spec.blocks or not set(spec.blocks).isdisjoint(local)
    }


def _matrices(
    blocks: Sequence[Block],
    specs: Sequence[UnitSpec],
    shared: Mapping[str, str],
    *,
    plan: Plan,
    apart: Sequence[Sequence[str]],
) -> frozenset[str]:
    """Return the parameters that the optimizer transforms whole. Raises PlanError where its rule or its patterns do not
    fit the model."""
    whole = plan.whole
    if whole is None:
        return frozenset()
    shapes = dict(_trainable(blocks, specs))
    adapted = [name for name in shapes if ".lora_" in name]
    if adapted:
        raise PlanError(
            f"{whole.name} orthogonalises hidden matrices, and the trained matrices are low-rank adapters such as "
            f"{adapted[0]}: the update of their product would not be orthogonal. Use AdamW for adapters"
        )
    ends: set[str] = set()
    hidden: set[str] = set()
    for at, block in enumerate(blocks):
        for prefix, module in block.named_modules():
            is_end = at in (0, len(blocks) - 1) or isinstance(module, nn.Embedding)
            for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
                (ends if is_end else hidden).add(shared.get(f"{prefix}.{name}", f"{prefix}.{name}"))
    found = frozenset(whole.chosen(shapes, hidden - ends, stacked_in(blocks)))
    split = sorted(name for names in apart for name in names if name in found)
    if split:
        raise PlanError(
            f"{whole.name}: matrices: {split[0]} is split over the pipeline ranks by vocabulary_parallel; leave it to "
            "AdamW, or turn vocabulary_parallel off"
        )
    for name, shape in shapes.items():
        if name in found:
            whole.rows_of(name, shape)
    return found


def _materialise(
    adapter: Adapter,
    block: Block,
    shared: Mapping[str, str],
    replaced: dict[int, nn.Parameter],
    buffers: dict[torch.Tensor, torch.Tensor],
    elsewhere: Collection[str],
    *,
    around: Surroundings,
    seed: int,
) -> None:
    """Give a block on `meta` real parameters and buffers with their initial values. A real block is unchanged, and so
    are all blocks if the rank itself is on `meta`.

    Parameters whose values are read are not initialized, and those shared with an earlier block keep its values. What
    is `elsewhere`, by first names, is skipped. replaced, buffers: what took the place of tensors on `meta`.
    """
    parameters = [parameter for name, parameter in block.named_parameters() if shared.get(name, name) not in elsewhere]
    if not any(tensor.is_meta for tensor in (*parameters, *block.module.buffers())) or around.device.type == "meta":
        return
    if not all(parameter.is_meta or id(parameter) in _ids(replaced) for parameter in parameters):
        raise PlanError(f"block {block.name!r} is partly on meta; build the whole model on meta, or none of it")
    known = set()
    before = set(replaced)
    for prefix, module in block.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            first = shared.get(f"{prefix}.{name}", f"{prefix}.{name}")
            if first in elsewhere:
                known.add(first)
                continue
            if id(parameter) in before or (around.weights is not None and first in around.weights):
                known.add(first)
            if not parameter.is_meta:
                continue
            if id(parameter) not in replaced:
                empty = torch.empty(parameter.shape, dtype=_first_dtype(around))
                replaced[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module.register_parameter(name, replaced[id(parameter)])
    stored = () if around.weights is None else around.weights
    why = getattr(adapter, "unset_because", "")
    with written(block.named_modules(), read=stored, why=why, made=buffers):
        initialise_block(adapter, block, seed, shared=shared, known=known)


def _ids(replaced: Mapping[int, nn.Parameter]) -> set[int]:
    return {id(parameter) for parameter in replaced.values()}


def _find(values: Mapping[str, nn.Parameter], name: str, shared: Mapping[str, str]) -> nn.Parameter:
    """Return the block's parameter whose first name is `name`, under any of its names in this block."""
    if name in values:
        return values[name]
    return next(values[later] for later, first in shared.items() if first == name and later in values)


def _fill_outside(adapter: Adapter, around: Surroundings, seed: int, placed: dict[torch.Tensor, torch.Tensor]) -> None:
    """Give modules outside of all blocks, which every rank runs, the values and device of their buffers."""
    outside = modules_outside(adapter)
    if around.device.type == "meta":
        return
    unset = {name: module for name, module in outside.items() if on_meta(module)}
    stored = () if around.weights is None else around.weights
    with torch.no_grad(), written(unset.items(), read=stored, why=getattr(adapter, "unset_because", ""), made={}):
        for name, module in unset.items():
            adapter.initialise(module, torch.Generator().manual_seed(name_seed(seed, name)))
    _read(buffers_outside(adapter), around)
    for module in outside.values():
        _place_buffers([module], around.device, placed)


def _read(buffers: Mapping[str, torch.Tensor], around: Surroundings) -> None:
    """Read persistent buffers where the folder of weights has them."""
    for name, buffer in buffers.items():
        if around.weights is not None and name in around.weights:
            with torch.no_grad():
                buffer.copy_(around.weights.whole(name))


def _place_buffers(
    modules: Iterable[nn.Module], device: torch.device, placed: dict[torch.Tensor, torch.Tensor]
) -> None:
    """Move the modules' own buffers to the device of the rank. placed: buffer -> what took its place, so that a shared
    one stays shared."""
    for child in modules:
        for name, buffer in list(child.named_buffers(recurse=False)):
            if buffer.device != device:
                if buffer not in placed:
                    placed[buffer] = buffer.to(device)
                setattr(child, name, placed[buffer])
