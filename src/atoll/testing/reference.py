"""The reference: the unsplit model, trained in one process with only torch and the model's own library.

Nothing of Atoll is imported here. The engine's adapter, initialization and seeding are implemented here a second time,
from their documentation:

    forward         the model's own, on a whole microbatch
    loss            cross-entropy of the labels that are not -100, or the recipe's; divided by the step's counted
                    labels, by its samples where there are no labels, or by what the recipe's loss counts
    initial values  each module's own rule, from a generator seeded from (seed, name)
    dropout         the generators are seeded from (seed, step, global microbatch, block) before each block
    update          the optimizer that is given, weight decay on matrices only, clipping by the global norm; Muon with
                    AdamW for what is no hidden matrix (`ReferenceMuon`)
    codecs          what `atoll.testing.coded` makes of gradients, parameters and outer gradients, if it is given

The two seeds are those of DESIGN.md, "Same result".
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.testing.coded import Buffer, Coding, Setting, uses_apart

IGNORED = -100
_LABELS = ("labels", "start_positions", "end_positions")


class Recipe(Protocol):
    """The job of a test: a model and its batches.

    `nn.Sequential` and models of transformers need no more. Others may have

        loss(outputs, batch)      a sum over what counts, in plain torch, or a pair of it and its count; without it,
                                  token cross-entropy of logits
        engine_loss               the `loss` argument of `Engine`; without it, the adapter has one
        initialise(name, module)  sets the module's own parameters with torch's default generator, which is seeded;
                                  without it the model starts as `build` returns it, and the engine gets those values
        blocks                    names of the blocks in the order of execution, for a model that draws random numbers
    """

    def build(self) -> nn.Module:
        """Return the model, on torch's current device. Its forward takes the batch without labels, by keyword; that of
        an `nn.Sequential` takes `input_ids`."""
        ...

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        """Return a step's samples: tensors, or mappings of tensors, by name."""
        ...


@dataclass(slots=True)
class History:
    """The result of a run: mean loss and gradient norm before clipping per step; the final parameters.

    gradients: those of the first step before clipping, if recorded.
    masters: the values that the optimizer steps, if codecs change the parameters.  buffers: of a rank with codecs.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)
    buffers: tuple[Buffer, ...] = ()


def train_islands(
    recipe: Recipe,
    *,
    islands: int,
    outer: Mapping[str, Any],
    fragment_of: Callable[[str], int],
    seed: int,
    dtype: torch.dtype,
    device: str,
    steps: int,
    microbatches: int,
    microbatch: int,
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    clip: float | None,
    codecs: Setting | None = None,
) -> list[History]:
    """Train k replicas of the unsplit model in this process, with outer steps: the history of each.

    Replica m takes the m-th part of each step's microbatches.

    outer: every, fragments, delay, lr, momentum, nesterov, mix.  fragment_of: the fragment of a parameter, by name.
    codecs: where outer gradients are encoded, if they are.

    Algorithm 2 of arXiv 2501.18512, which with one fragment and no delay is Algorithm 1 of arXiv 2311.08105. The outer
    optimizer is torch's SGD on the anchors.
    """
    each = microbatches // islands
    replicas = [
        _Replica(recipe, seed, dtype, device, optimizer, first=at * each, microbatches=each) for at in range(islands)
    ]
    anchors = {name: nn.Parameter(value.detach().clone()) for name, value in replicas[0].trained.items()}
    stepping = {
        name: torch.optim.SGD([anchor], lr=outer["lr"], momentum=outer["momentum"], nesterov=outer["nesterov"])
        for name, anchor in anchors.items()
    }
    sent: dict[int, dict[str, Tensor]] = {}
    coding = None if codecs is None else Coding(codecs)
    for step in range(steps):
        for replica in replicas:
            batch = rows(recipe.batch(step, microbatches * microbatch), 0, microbatches * microbatch, device)
            replica.step(step, batch, microbatch, clip)
        done = step + 1
        for fragment in range(outer["fragments"]):
            names = [name for name in anchors if fragment_of(name) == fragment]
            offset = max(1, (fragment + 1) * outer["every"] // outer["fragments"])
            if done >= offset and (done - offset) % outer["every"] == 0:
                own = [
                    {name: anchors[name].detach() - replica.trained[name].detach() for name in names}
                    for replica in replicas
                ]
                if coding is None:
                    sent[fragment] = {
                        name: torch.stack([each[name] for each in own]).sum(0) / islands for name in names
                    }
                else:
                    sent[fragment] = coding.mean(own, step)
            before = done - outer["delay"]
            if before >= offset and (before - offset) % outer["every"] == 0:
                for name, gradient in sent.pop(fragment).items():
                    anchors[name].grad = gradient
                    stepping[name].step()
                    for replica in replicas:
                        values = replica.trained[name].data
                        values.copy_(outer["mix"] * values + (1 - outer["mix"]) * anchors[name].detach())
    for replica in replicas:
        replica.history.parameters = {n: v.detach().clone() for n, v in named_parameters(replica.model).items()}
        replica.history.gradients = {}
    return [replica.history for replica in replicas]


class _Replica:
    """An unsplit model, its optimizer, and the steps that it has taken.

    first, microbatches: its microbatches of a step.
    """

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        dtype: torch.dtype,
        device: str,
        optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        *,
        first: int,
        microbatches: int,
        codecs: Setting | None = None,
    ) -> None:
        self._recipe, self._first, self._count = recipe, first, microbatches
        with torch.random.fork_rng(devices=[]):
            self.model = start(recipe, seed).to(device=device, dtype=dtype)
        self._seeding = Seeding(recipe, self.model, seed)
        self.trained = {name: p for name, p in named_parameters(self.model).items() if p.requires_grad}
        self._decayed = [parameter for parameter in self.trained.values() if parameter.dim() > 1]
        self._others = [parameter for parameter in self.trained.values() if parameter.dim() <= 1]
        hidden = {id(self.trained[name]): name for name in hidden_matrices(self.model) if name in self.trained}
        matrices = [p for p in self._decayed if id(p) in hidden]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._decayed if id(p) not in hidden], "weight_decay": 0.1},
            {"params": self._others, "weight_decay": 0.0},
            {"params": matrices, "weight_decay": 0.1, "names": [hidden[id(p)] for p in matrices]},
        ]
        self._stepping = optimizer(groups)
        self.coding = None if codecs is None else _Coded(self.model, codecs)
        self.history = History()

    def step(self, step: int, batch: Mapping[str, Any], microbatch: int, clip: float | None) -> None:
        """Take a step on this replica's microbatches of a batch; a bad one is skipped."""
        history, device = self.history, str(next(iter(self.trained.values())).device)
        with torch.random.fork_rng(devices=[]):
            numbers = range(self._first, self._first + self._count)
            pieces = {at: rows(batch, at * microbatch, microbatch, device) for at in numbers}
            tokens: float = sum(map(count, pieces.values()))
            self._stepping.zero_grad(set_to_none=True)
            total = counted = 0.0
            for at, piece in pieces.items():
                with nullcontext() if self.coding is None else self.coding.watching():
                    with self._seeding.of(step, at):
                        loss = summed_loss(self._recipe, forward(self.model, piece), piece)
                    if isinstance(loss, tuple):
                        loss, own = loss
                        counted += float(own)
                    (loss / tokens).backward()
                total += float(loss.detach())
            if self.coding is not None:
                self.coding.make_gradients(step)
            if counted:  # known only now: gradients have been divided by something else
                for parameter in self.trained.values():
                    parameter.grad = None if parameter.grad is None else parameter.grad * (tokens / counted)
                tokens = counted
            if step == 0:
                found = {name: parameter.grad for name, parameter in self.trained.items()}
                history.gradients = {name: value.clone() for name, value in found.items() if value is not None}
            largest = float("inf") if clip is None else clip
            norm = nn.utils.clip_grad_norm_(self._decayed + self._others, largest)
            if math.isfinite(total) and bool(norm.isfinite()):  # else the step is skipped, as `bad_steps = "skip"` does
                if self.coding is None:
                    self._stepping.step()
                else:
                    self.coding.step(self._stepping)
            elif self.coding is not None:
                self.coding.skip()
            history.losses.append(total / tokens)
            history.norms.append(float(norm))


def train_alone(
    recipe: Recipe,
    *,
    seed: int,
    dtype: torch.dtype,
    device: str,
    steps: int,
    microbatches: int,
    microbatch: int,
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    clip: float | None,
    codecs: Setting | None = None,
) -> History:
    """Train the unsplit model in this process, microbatch after microbatch; bad steps are skipped."""
    replica = _Replica(recipe, seed, dtype, device, optimizer, first=0, microbatches=microbatches, codecs=codecs)
    for step in range(steps):
        samples = microbatches * microbatch
        replica.step(step, rows(recipe.batch(step, samples), 0, samples, device), microbatch, clip)
    history = replica.history
    history.parameters = {n: value.detach().clone() for n, value in named_parameters(replica.model).items()}
    history.masters = {} if replica.coding is None else replica.coding.masters
    return history


class _Coded:
    """A model whose gradients and parameters cross groups with codecs.

    masters: what the optimizer steps; the model's parameters are what the forward uses.
    """

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self._coding = Coding(setting)
        self._model = base_of(model)
        self._named = named_parameters(model)
        self._tied = tied(model)
        self._pieces: list[dict[str, Tensor]] = []
        self._touched: set[str] = set()
        self.masters = {name: parameter.detach().clone() for name, parameter in self._named.items()}
        self._follow()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the gradients of a microbatch by the names of their uses."""
        names = sorted({*self._tied, *self._tied.values()})
        with uses_apart(self._model, names) as apart:
            yield
        found = {name: alias.grad for name, alias in apart.items()}
        for name, parameter in self._named.items():
            if name not in apart:
                found[name] = parameter.grad
            parameter.grad = None
        self._pieces.append({name: value.clone() for name, value in found.items() if value is not None})
        self._touched.update(self._tied.get(name, name) for name in self._pieces[-1])

    def make_gradients(self, step: int) -> None:
        """Give the parameters the gradients that are left of the microbatches' after their messages."""
        for name, value in self._coding.gradients(self._pieces, step).items():
            self._named[name].grad = value
        self._pieces.clear()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the masters, and let the parameters follow. What no microbatch has used has no gradient."""
        with torch.no_grad():
            used = {name: parameter.detach().clone() for name, parameter in self._named.items()}
            for name, parameter in self._named.items():
                parameter.grad = parameter.grad if name in self._touched else None
                parameter.copy_(self.masters[name])
            optimizer.step()
            self.masters = {name: parameter.detach().clone() for name, parameter in self._named.items()}
            for name, parameter in self._named.items():
                parameter.copy_(used[name])
        self._touched.clear()
        self._follow()

    def skip(self) -> None:
        """The step is not taken."""
        self._touched.clear()
        self._coding.skip()

    def _follow(self) -> None:
        with torch.no_grad():
            self._coding.parameters(self.masters, {name: each.detach() for name, each in self._named.items()})


# ---- the model


def _seed(value: int) -> None:
    """As torch.manual_seed, which also formats a stack trace for every kind of device that is not in use: up to 2 ms
    for each module, and for each block and microbatch."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


def start(recipe: Recipe, seed: int) -> nn.Module:
    """Return the unsplit model with its initial values, in fp32 on the CPU."""
    with torch.random.fork_rng(devices=[]):
        _seed(seed)
        model = recipe.build()
        rule = rule_of(recipe, model)
        if rule is not None:
            draw(model, rule, seed)
    return model


def forward(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the logits, or other outputs, of the model's own forward. A decoder beside an encoder also takes the
    labels."""
    config: Any = getattr(base_of(model), "config", None)
    reads_labels = getattr(config, "is_encoder_decoder", False)
    inputs = {key: value for key, value in batch.items() if key not in _LABELS or (reads_labels and key == "labels")}
    if hasattr(config, "use_cache"):
        config.use_cache = False
    first = inputs.get("input_ids", inputs.get("inputs"))
    output: Any = model(first) if isinstance(model, nn.Sequential) else model(**inputs)
    if hasattr(output, "start_logits"):
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    logits: Tensor = getattr(output, "logits", output)
    return logits


def base_of(model: nn.Module) -> nn.Module:
    """Return the model itself, without the wrapper of the `peft` package."""
    get_base: Any = getattr(model, "get_base_model", None)
    base: nn.Module = model if get_base is None else get_base()
    return base


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the model's parameters, a shared one by its first name."""
    later = tied(model)
    named = base_of(model).named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if name not in later}


def tied(model: nn.Module) -> dict[str, str]:
    """Return each later name of a shared parameter with its first one, as declared by a transformers model."""
    base = base_of(model)
    said: Mapping[str, str] = getattr(base, "all_tied_weights_keys", {})
    firsts: dict[nn.Parameter, str] = {}
    named = dict(base.named_parameters(remove_duplicate=False))
    for name in sorted(named, key=lambda name: name in said):
        firsts.setdefault(named[name], name)
    return {name: firsts[parameter] for name, parameter in named.items() if firsts[parameter] != name}


# ---- Muon


def hidden_matrices(model: nn.Module) -> list[str]:
    """Names of the matrices between the first block and the last, without those of embeddings."""
    base = base_of(model)
    blocks = list(base.children()) if isinstance(model, nn.Sequential) else _blocks_of_family(base)
    outside = {id(p) for block in (*blocks[:1], *blocks[-1:]) for p in block.parameters()}
    outside |= {id(p) for module in base.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    inside = {id(p) for block in blocks[1:-1] for p in block.parameters()} - outside
    return [name for name, p in named_parameters(model).items() if p.dim() == 2 and id(p) in inside]


class ReferenceMuon(torch.optim.Optimizer):
    """Muon on the last group, in the dtype of its parameters, and AdamW on the others: as torch documents them.

    split: pairs of a pattern and a number of equal parts of the rows, or the rows of each part.  adamw: pairs of
    options.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        split: Iterable[tuple[str, Any]] = (),
        adamw: Iterable[tuple[str, Any]] = (),
        matrices: object = None,
    ) -> None:
        super().__init__([group for group in groups if group["params"]], {})
        self._matrices = groups[-1]
        self._rest = torch.optim.AdamW(groups[:-1], **{"lr": lr, **dict(adamw)})
        self._lr, self._momentum, self._nesterov = lr, momentum, nesterov
        self._polynomial, self._eps, self._steps = ns_coefficients, eps, ns_steps
        self._adjust, self._split = adjust_lr_fn, dict(split)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step everything."""
        self._rest.step()
        for name, parameter in zip(self._matrices["names"], self._matrices["params"], strict=True):
            if parameter.grad is None:
                continue
            average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
            average.copy_(self._momentum * average + (1 - self._momentum) * parameter.grad)
            direction = average
            if self._nesterov:
                direction = self._momentum * average + (1 - self._momentum) * parameter.grad
            parameter -= self._lr * self._matrices["weight_decay"] * parameter
            parts = next((parts for pattern, parts in self._split.items() if fnmatchcase(name, pattern)), 1)
            rows = [len(parameter) // parts] * parts if isinstance(parts, int) else list(parts)
            for own, part in zip(parameter.split(rows), direction.split(rows), strict=True):
                own -= self._lr * self._ratio(*own.shape) * self._orthogonal(part)

    def _ratio(self, rows: int, columns: int) -> float:
        if self._adjust == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        a, b, c = self._polynomial
        wide = matrix if len(matrix) <= matrix.shape[1] else matrix.T
        wide = wide / max(float(wide.norm()), self._eps)
        for _ in range(self._steps):
            gram = wide @ wide.T
            wide = a * wide + b * (gram @ wide) + c * (gram @ (gram @ wide))
        return wide if len(matrix) <= matrix.shape[1] else wide.T


# ---- loss


def summed_loss(recipe: Recipe, outputs: Any, batch: Mapping[str, Any]) -> Any:
    """Return the recipe's loss, or token cross-entropy; a pair if the recipe's loss returns a count."""
    own: Callable[[Any, Mapping[str, Any]], Any] | None = getattr(recipe, "loss", None)
    return token_loss(outputs, batch["labels"]) if own is None else own(outputs, batch)


def count(batch: Mapping[str, Any]) -> int:
    """Return the number of labels that count: integers except -100, all others; samples if there are no labels."""
    labels = batch.get("labels")
    if isinstance(labels, Tensor):
        return labels.numel() if labels.is_floating_point() else int((labels != IGNORED).sum())
    value: Any = batch
    while not isinstance(value, Tensor):
        value = next(iter(value.values()))
    return len(value)


def rows(batch: Mapping[str, Any], first: int, count: int, device: str) -> dict[str, Any]:
    """Return some samples of a batch."""
    return {
        name: value[first:][:count].to(device) if isinstance(value, Tensor) else rows(value, first, count, device)
        for name, value in batch.items()
    }


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return cross-entropy summed over the labels that are not -100, in fp32 (fp64 for fp64 logits)."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


# ---- initial values


_Rule = Callable[[str, nn.Module], None]
"""(qualified name, module) -> None; sets the module's own parameters from torch's default generator."""


def rule_of(recipe: Recipe, model: nn.Module) -> _Rule | None:
    """Return the initialization of this model's modules, if it is known without the adapter."""
    own: _Rule | None = getattr(recipe, "initialise", None)
    if own is not None:
        return own
    family: Any = getattr(base_of(model), "_init_weights", None)
    if family is not None:
        return lambda name, module: _start_as_family(family, module)
    return (lambda name, module: _reset(module)) if isinstance(model, nn.Sequential) else None


def draw(model: nn.Module, rule: _Rule, seed: int) -> None:
    """Set all parameters, each module from a generator of its own, inner modules first.

    A shared parameter is drawn under each of its names and keeps the values of the first. A family's rule of a module
    that contains the layers is then run for each block, with the block's seed, and sets the parameters in this block.
    """
    base = base_of(model)
    with torch.no_grad(), _untied(base):
        for parameter in base.parameters():
            parameter.fill_(torch.nan)
        outside, blocks = _outside(base), _blocks_of_family(base)
        for name, module in reversed(list(base.named_modules())):
            if module in outside:
                continue
            _seed(module_seed(seed, name))
            rule(name, module)
            if any(parameter.isnan().any() for parameter in module.parameters(recurse=False)):
                _seed(module_seed(seed, name))
                _reset(module)
        names = {module: name for name, module in base.named_modules()}
        for block in blocks:
            with _marked(base, but=block):
                for module in reversed(outside):
                    _seed(module_seed(seed, names[block]))
                    rule(names[module], module)
    unset = [name for name, parameter in base.named_parameters() if parameter.isnan().any()]
    if unset:
        raise ValueError(f"the recipe's rule leaves {', '.join(unset)} without values")


@contextmanager
def _untied(model: nn.Module) -> Iterator[None]:
    """Context in which later names of shared parameters have parameters of their own. A module with two names has one
    parameter under both."""

    def owner(name: str) -> nn.Module:
        return model.get_submodule(name.rpartition(".")[0])

    def put(name: str, parameter: nn.Parameter) -> None:
        setattr(owner(name), name.rpartition(".")[2], parameter)

    apart = [name for name, first in tied(model).items() if owner(name) is not owner(first)]
    later = {name: model.get_parameter(name) for name in apart}

    for name, parameter in later.items():
        put(name, nn.Parameter(torch.empty_like(parameter)))
    yield
    for name, parameter in later.items():
        put(name, parameter)


@contextmanager
def _marked(model: nn.Module, but: nn.Module) -> Iterator[None]:
    """Context in which rules of transformers skip parameters outside a module."""
    own = {*but.parameters(), *but.buffers()}
    others: list[Any] = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor not in own]
    for tensor in others:
        tensor._is_hf_initialized = True
    yield
    for tensor in others:
        del tensor._is_hf_initialized


def module_seed(seed: int, name: str) -> int:
    """Return the upper 63 bits of the first 8 bytes of SHA-256("seed NUL name"), little-endian."""
    return int.from_bytes(hashlib.sha256(b"%d\0%b" % (seed, name.encode())).digest()[:8], "little") // 2


def _start_as_family(family: Callable[[nn.Module], None], module: nn.Module) -> None:
    """Run the rule of a transformers family, and that of low-rank adapters of `peft`."""
    family(module)
    restart: Any = getattr(module, "reset_lora_parameters", None)
    adapters: Any = module.active_adapters if restart is not None else ()
    for adapter in adapters:
        restart(adapter, True)


def _reset(module: nn.Module) -> None:
    """Initialize a module as torch does; a `MultiheadAttention` has another name for it."""
    name = "_reset_parameters" if isinstance(module, nn.MultiheadAttention) else "reset_parameters"
    reset: Any = getattr(module, name, None)
    if reset is not None:
        reset()


# ---- dropout


def reference_seed(seed: int, step: int, microbatch: int, block: int) -> int:
    """Return the upper 63 bits of the 8-byte BLAKE2b of "seed:step:microbatch:block", little-endian."""
    text = ":".join(map(str, (seed, step, microbatch, block)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") // 2


class Seeding:
    """Seeds torch's generators before each block of a model, by hooks on modules.

    Blocks are counted in the order of execution: those that the recipe names, the modules of an `nn.Sequential`, or the
    layers of a model of transformers and the outermost modules with parameters beside them.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, seed: int) -> None:
        self._seed, self._moment = seed, (0, 0)
        self._order: dict[nn.Module, int] = {}
        self._inside: list[nn.Module] = []
        base = base_of(model)
        named: Iterable[str] | None = getattr(recipe, "blocks", None)
        if named is None and isinstance(model, nn.Sequential):
            named = [name for name, _ in model.named_children()]
        blocks = _blocks_of_family(base) if named is None else [base.get_submodule(name) for name in named]
        self._is_known = bool(blocks)
        for block in blocks:
            block.register_forward_pre_hook(self._enter)
            block.register_forward_hook(self._leave)

    def of(self, step: int, microbatch: int) -> Seeding:
        """Return the context of one forward."""
        self._moment = (step, microbatch)
        return self

    def __enter__(self) -> None:
        _seed(0)
        self._before = torch.get_rng_state()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None and not self._is_known and not torch.equal(torch.get_rng_state(), self._before):
            raise ValueError("the model draws random numbers: name its blocks, in order, in `blocks` of the recipe")

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._inside:
            block = self._order.setdefault(module, len(self._order))
            _seed(reference_seed(self._seed, *self._moment, block))
        self._inside.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()


def _blocks_of_family(model: nn.Module) -> list[nn.Module]:
    """Return modules with parameters beside the lists of layers, and the layers; one inside another is not a block."""
    around, lists = _outside(model), _layers_of_family(model)
    inside = {module for layers in lists for layer in layers for module in layer.modules()}
    inside -= {layer for layers in lists for layer in layers}
    found = [m for m in model.modules() if m not in around and m not in inside and any(True for _ in m.parameters())]
    nested = {inner for module in found for inner in module.modules() if inner is not module}
    return [module for module in found if module not in nested] if lists else []


def _outside(model: nn.Module) -> list[nn.Module]:
    """Return modules of a family's model that contain layers."""
    lists = _layers_of_family(model)
    return [
        module for module in model.modules() if any(each is layers for each in module.modules() for layers in lists)
    ]


def _layers_of_family(model: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of layers: as long as the configuration requires, and two if an encoder has a decoder."""
    if not hasattr(model, "_init_weights"):
        return []
    config: Any = model.config
    configs = [config, config.get_text_config(), getattr(config, "vision_config", config)]
    keys = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
    counts = {getattr(each, key, None) for each in configs for key in keys}
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) in counts]
    inner = {id(module) for each in lists for layer in each for module in layer.modules()}
    return [each for each in lists if id(each) not in inner][: 2 if config.is_encoder_decoder else 1]
