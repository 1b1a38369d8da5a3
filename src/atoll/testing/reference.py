"""The reference: the unsplit model, trained in one process with only torch and the model's own library.

Nothing of Atoll is imported here. What the engine does by an adapter, by its own initialisation and by its own seeding,
this file does a second time, by what the documentation says:

    forward         the model's own, on a whole microbatch
    loss            cross-entropy of the labels that are not -100, or the recipe's; divided by the step's counted
                    labels, by its samples where there are no labels, or by what the recipe's loss counts
    initial values  each module's own rule, from a generator seeded from (seed, name)
    dropout         the generators are seeded from (seed, step, global microbatch, block) before each block
    update          the optimizer that is given, weight decay on matrices only, clipping by the global norm; Muon with
                    AdamW for what is no hidden matrix (`ReferenceMuon`)

The two seeds are those of DESIGN.md, "Same result".
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
LABELS = ("labels", "start_positions", "end_positions")


class Recipe(Protocol):
    """The job of a test: a model and its batches.

    `nn.Sequential` and models of transformers need no more. Others may have

        loss(outputs, batch)      a sum over what counts, in plain torch, or a pair of it and its count; without it,
                                  token cross-entropy of logits
        engine_loss               what `Engine` is given as `loss`; without it, the adapter has one
        initialise(name, module)  sets the module's own parameters with torch's default generator, which is seeded;
                                  without it the model starts as `build` made it, and the engine is given those values
        blocks                    names of the blocks in the order of execution, for a model that draws random numbers
    """

    def build(self) -> nn.Module:
        """The model, on torch's current device. Its forward takes the batch without labels, by keyword; that of an
        `nn.Sequential` takes `input_ids`."""
        ...

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        """A step's samples: tensors, or mappings of tensors, by name."""
        ...


@dataclass(slots=True)
class History:
    """The result of a run: mean loss and gradient norm before clipping per step; the final parameters.

    gradients: those of the first step before clipping, where they were noted.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


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
) -> History:
    """Train the unsplit model in this process, microbatch after microbatch; bad steps are skipped."""
    with torch.random.fork_rng(devices=[]):
        model = start(recipe, seed).to(device=device, dtype=dtype)
        seeding = Seeding(recipe, model, seed)
        trained = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
        decayed = [parameter for parameter in trained.values() if parameter.dim() > 1]
        others = [parameter for parameter in trained.values() if parameter.dim() <= 1]
        hidden = {id(trained[name]): name for name in hidden_matrices(model) if name in trained}
        groups: list[dict[str, Any]] = [
            {"params": [p for p in decayed if id(p) not in hidden], "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
            {"params": [p for p in decayed if id(p) in hidden], "weight_decay": 0.1},
        ]
        groups[2]["names"] = [hidden[id(parameter)] for parameter in groups[2]["params"]]
        stepping = optimizer(groups)
        history = History()
        for step in range(steps):
            batch = rows(recipe.batch(step, microbatches * microbatch), 0, microbatches * microbatch, device)
            pieces = [rows(batch, at * microbatch, microbatch, device) for at in range(microbatches)]
            tokens: float = sum(map(count, pieces))
            stepping.zero_grad(set_to_none=True)
            total = counted = 0.0
            for at, piece in enumerate(pieces):
                with seeding.of(step, at):
                    loss = summed_loss(recipe, forward(model, piece), piece)
                if isinstance(loss, tuple):
                    loss, own = loss
                    counted += float(own)
                (loss / tokens).backward()
                total += float(loss.detach())
            if counted:  # known only now: gradients have been divided by something else
                for parameter in trained.values():
                    parameter.grad = None if parameter.grad is None else parameter.grad * (tokens / counted)
                tokens = counted
            if step == 0:
                found = {name: parameter.grad for name, parameter in trained.items()}
                history.gradients = {name: value.clone() for name, value in found.items() if value is not None}
            norm = nn.utils.clip_grad_norm_(decayed + others, float("inf") if clip is None else clip)
            if math.isfinite(total) and bool(norm.isfinite()):  # else the step is skipped, as `bad_steps = "skip"` does
                stepping.step()
            history.losses.append(total / tokens)
            history.norms.append(float(norm))
    history.parameters = {name: value.detach().clone() for name, value in named_parameters(model).items()}
    return history


# ---- the model


def start(recipe: Recipe, seed: int) -> nn.Module:
    """The unsplit model with its initial values, in fp32 on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = recipe.build()
        rule = rule_of(recipe, model)
        if rule is not None:
            draw(model, rule, seed)
    return model


def forward(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The logits, or other outputs, of the model's own forward. A decoder beside an encoder reads the labels too."""
    config: Any = getattr(base_of(model), "config", None)
    reads_labels = getattr(config, "is_encoder_decoder", False)
    inputs = {name: value for name, value in batch.items() if name not in LABELS or (reads_labels and name == "labels")}
    if hasattr(config, "use_cache"):
        config.use_cache = False
    first = inputs.get("input_ids", inputs.get("inputs"))
    output: Any = model(first) if isinstance(model, nn.Sequential) else model(**inputs)
    if hasattr(output, "start_logits"):
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    logits: Tensor = getattr(output, "logits", output)
    return logits


def base_of(model: nn.Module) -> nn.Module:
    """The model itself, without the wrapper of the `peft` package."""
    get_base: Any = getattr(model, "get_base_model", None)
    base: nn.Module = model if get_base is None else get_base()
    return base


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters, a shared one by its first name."""
    later = tied(model)
    named = base_of(model).named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if name not in later}


def tied(model: nn.Module) -> dict[str, str]:
    """Each later name of a shared parameter -> its first, which a model of transformers says itself."""
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
    """The recipe's loss, or token cross-entropy; a pair where the recipe's loss counts."""
    own: Callable[[Any, Mapping[str, Any]], Any] | None = getattr(recipe, "loss", None)
    return token_loss(outputs, batch["labels"]) if own is None else own(outputs, batch)


def count(batch: Mapping[str, Any]) -> int:
    """Labels that count: integers but -100, all others; samples where there are no labels."""
    labels = batch.get("labels")
    if isinstance(labels, Tensor):
        return labels.numel() if labels.is_floating_point() else int((labels != IGNORED).sum())
    value: Any = batch
    while not isinstance(value, Tensor):
        value = next(iter(value.values()))
    return len(value)


def rows(batch: Mapping[str, Any], first: int, count: int, device: str) -> dict[str, Any]:
    """Some samples of a batch."""
    return {
        name: value[first:][:count].to(device) if isinstance(value, Tensor) else rows(value, first, count, device)
        for name, value in batch.items()
    }


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy summed over the labels that are not -100, in fp32 (fp64 for fp64 logits)."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


# ---- initial values


Rule = Callable[[str, nn.Module], None]
"""(qualified name, module) -> nothing; sets the module's own parameters from torch's default generator."""


def rule_of(recipe: Recipe, model: nn.Module) -> Rule | None:
    """How modules of this model start, if that can be known without its adapter."""
    own: Rule | None = getattr(recipe, "initialise", None)
    if own is not None:
        return own
    family: Any = getattr(base_of(model), "_init_weights", None)
    if family is not None:
        return lambda name, module: _start_as_family(family, module)
    return (lambda name, module: _reset(module)) if isinstance(model, nn.Sequential) else None


def draw(model: nn.Module, rule: Rule, seed: int) -> None:
    """Set all parameters, each module from a generator of its own, what is inside a module before the module.

    A shared parameter is drawn under each of its names and keeps the values of the first. A family's rule of a module
    that holds the layers follows for each block, with the block's seed, and sets what is in this block.
    """
    base = base_of(model)
    with torch.no_grad(), _untied(base):
        for parameter in base.parameters():
            parameter.fill_(torch.nan)
        outside, blocks = _outside(base), _blocks_of_family(base)
        for name, module in reversed(list(base.named_modules())):
            if module in outside:
                continue
            torch.manual_seed(module_seed(seed, name))
            rule(name, module)
            if any(parameter.isnan().any() for parameter in module.parameters(recurse=False)):
                torch.manual_seed(module_seed(seed, name))
                _reset(module)
        names = {module: name for name, module in base.named_modules()}
        for block in blocks:
            with _marked(base, but=block):
                for module in reversed(outside):
                    torch.manual_seed(module_seed(seed, names[block]))
                    rule(names[module], module)
    unset = [name for name, parameter in base.named_parameters() if parameter.isnan().any()]
    if unset:
        raise ValueError(f"the recipe's rule leaves {', '.join(unset)} without values")


@contextmanager
def _untied(model: nn.Module) -> Iterator[None]:
    """Meanwhile later names of shared parameters have parameters of their own."""
    later = {name: model.get_parameter(name) for name in tied(model)}

    def put(name: str, parameter: nn.Parameter) -> None:
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, parameter)

    for name, parameter in later.items():
        put(name, nn.Parameter(torch.empty_like(parameter)))
    yield
    for name, parameter in later.items():
        put(name, parameter)


@contextmanager
def _marked(model: nn.Module, but: nn.Module) -> Iterator[None]:
    """Meanwhile rules of transformers leave alone what is not in a module."""
    own = {*but.parameters(), *but.buffers()}
    others: list[Any] = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor not in own]
    for tensor in others:
        tensor._is_hf_initialized = True
    yield
    for tensor in others:
        del tensor._is_hf_initialized


def module_seed(seed: int, name: str) -> int:
    """The upper 63 bits of the first 8 bytes of SHA-256("seed NUL name"), little-endian."""
    return int.from_bytes(hashlib.sha256(b"%d\0%b" % (seed, name.encode())).digest()[:8], "little") // 2


def _start_as_family(family: Callable[[nn.Module], None], module: nn.Module) -> None:
    """The rule of a family of transformers, and that of low-rank adapters of `peft`."""
    family(module)
    restart: Any = getattr(module, "reset_lora_parameters", None)
    adapters: Any = module.active_adapters if restart is not None else ()
    for adapter in adapters:
        restart(adapter, True)


def _reset(module: nn.Module) -> None:
    """As torch starts a module; a `MultiheadAttention` has another name for it."""
    name = "_reset_parameters" if isinstance(module, nn.MultiheadAttention) else "reset_parameters"
    reset: Any = getattr(module, name, None)
    if reset is not None:
        reset()


# ---- dropout


def block_seed(seed: int, step: int, microbatch: int, block: int) -> int:
    """The upper 63 bits of the 8-byte BLAKE2b of "seed:step:microbatch:block", little-endian."""
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
        """The context of one forward."""
        self._moment = (step, microbatch)
        return self

    def __enter__(self) -> None:
        torch.manual_seed(0)
        self._before = torch.get_rng_state()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None and not self._is_known and not torch.equal(torch.get_rng_state(), self._before):
            raise ValueError("the model draws random numbers: name its blocks, in order, in `blocks` of the recipe")

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._inside:
            block = self._order.setdefault(module, len(self._order))
            torch.manual_seed(block_seed(self._seed, *self._moment, block))
        self._inside.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()


def _blocks_of_family(model: nn.Module) -> list[nn.Module]:
    """Modules with parameters beside the lists of layers, and the layers; one inside another is no block."""
    around, lists = _outside(model), _layers_of_family(model)
    inside = {module for layers in lists for layer in layers for module in layer.modules()}
    inside -= {layer for layers in lists for layer in layers}
    found = [m for m in model.modules() if m not in around and m not in inside and any(True for _ in m.parameters())]
    nested = {inner for module in found for inner in module.modules() if inner is not module}
    return [module for module in found if module not in nested] if lists else []


def _outside(model: nn.Module) -> list[nn.Module]:
    """Modules of a family's model that hold layers."""
    lists = _layers_of_family(model)
    return [
        module for module in model.modules() if any(each is layers for each in module.modules() for layers in lists)
    ]


def _layers_of_family(model: nn.Module) -> list[nn.ModuleList]:
    """The lists of layers: as long as the configuration says, and two where an encoder has a decoder."""
    if not hasattr(model, "_init_weights"):
        return []
    config: Any = model.config
    configs = [config, config.get_text_config(), getattr(config, "vision_config", config)]
    keys = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
    counts = {getattr(each, key, None) for each in configs for key in keys}
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) in counts]
    inner = {id(module) for each in lists for layer in each for module in layer.modules()}
    return [each for each in lists if id(each) not in inner][: 2 if config.is_encoder_decoder else 1]
