"""A rank's slice of the vocabulary: its rows of the embedding and of the head (arXiv 2411.05288).

    look_up   ids [B, S] -> their rows, zeros for those of other slices; the sum over the slices is the embedding
    score     hidden [B, S, hidden] -> this slice's part of the loss and of the hidden state's gradient
    combine   the scores of all slices -> the loss and the hidden state's gradient
    learn     the combined scores -> the gradient of the head's rows

[Note: one exchange] With z the logits of a token, p = softmax(z) and W the head, the hidden state's gradient is sum(p *
W) - W[label]. A slice does not know the sum of all exponentials, but the mean of its rows under the softmax of its own
logits needs no other slice; only one factor per token is missing, the slice's share of the sum. So a slice sends that
mean, the row of the label if it has it, its largest logit, its sum and the label's logit. The receiver of these from
all slices computes loss and gradient, and returns the factors, which the slices need for their own gradients. Sums
first and gradients afterwards would take two round trips between the last stage's F and its backward, and every
schedule would wait for them. The price is the rows of the labels, in total as much as one more hidden state. No rank
ever has the logits of more than a slice. Softmax and sums are in fp32 (fp64 for fp64), as in `token_cross_entropy`.

[Note: beside tensor parallelism] A pipeline rank's slice is split once more over the ranks of its tensor-parallel
group. Messages stay within a rank's pipeline: at both ends each rank of a group has the results of the parts on its own
pipeline, and the group sums them. All its ranks then have the same embedding, loss and gradient, as with any other
module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from atoll.base._torch import local_part
from atoll.base.errors import PlanError
from atoll.base.labels import IGNORED_LABEL
from atoll.plans.layouts import Box
from atoll.program import EMBEDDING, HEAD
from atoll.runtime.models import Adapter, Batch, Block, Vocabulary
from atoll.runtime.sharding.gradient_buffer import GradientBuffer
from atoll.runtime.sharding.tensors import added_up, part_of
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.vocabulary.ends import check_ids, ends_of, finished_logits


def splittable_vocabulary(adapter: Adapter, ranks: int) -> Vocabulary:
    """Return the ends of a model whose vocabulary is split over so many ranks.

    Raises PlanError if the adapter does not name them, or if they cannot be split.
    """
    found = ends_of(adapter, "vocabulary_parallel")
    modules = {name: module for block in adapter.blocks() for name, module in block.named_modules()}
    problems = []
    for name, kind in ((found.embedding, nn.Embedding), (found.head, nn.Linear)):
        module = modules.get(name)
        if not (isinstance(module, kind) if kind is nn.Embedding else type(module) is kind):
            problems.append(f"{name} is a {type(module).__name__}, not an nn.{kind.__name__}")
    if problems:
        raise PlanError(_refusal("; ".join(problems)))
    embedding, head = modules[found.embedding], modules[found.head]
    assert isinstance(embedding, nn.Embedding)
    assert isinstance(head, nn.Linear)
    if embedding.weight.shape != head.weight.shape:
        problems.append(f"embedding {tuple(embedding.weight.shape)} and head {tuple(head.weight.shape)} differ")
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        problems.append(f"{found.embedding} has max_norm, scale_grad_by_freq or sparse gradients")
    own = {id(parameter) for module in (embedding, head) for parameter in module.parameters(recurse=False)}
    for name, module in modules.items():
        if name not in (found.embedding, found.head) and any(id(p) in own for p in module.parameters(recurse=False)):
            problems.append(f"{name} uses a parameter of them too")
    rows = embedding.weight.shape[0]
    if -(-rows // ranks) * (ranks - 1) >= rows:
        problems.append(f"{rows} rows leave one of {ranks} ranks without any")
    if problems:
        raise PlanError(_refusal("; ".join(problems)))
    return found


def _refusal(problem: str) -> str:
    return f"vocabulary_parallel cannot split this model's embedding and head: {problem}. Turn it off"


def names_of(adapter: Adapter, vocabulary: Vocabulary, shared: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Return the first names of the parameters that form separate units: those of head and embedding, or of both
    together."""
    modules = {name: module for block in adapter.blocks() for name, module in block.named_modules()}
    groups: list[tuple[str, ...]] = []
    for end in vocabulary.ends:
        own = [f"{end}.{key}" for key, _ in modules[end].named_parameters(recurse=False)]
        names = tuple(shared.get(name, name) for name in own)
        known = next((at for at, group in enumerate(groups) if set(group) & set(names)), None)
        if known is None:
            groups.append(names)
        else:
            groups[known] = tuple(dict.fromkeys((*groups[known], *names)))
    return tuple(groups)


def as_slice(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return this rank's rows of a parameter, which keeps its shape as a DTensor."""
    whole = parameter.detach()
    box = Box.part(whole.shape, 0, mesh.get_local_rank(), count=mesh.size())
    rows = part_of(whole, box).clone()
    split = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(split, requires_grad=parameter.requires_grad)


@dataclass(frozen=True, slots=True)
class VocabularyTable:
    """One end on this rank: the unit of its rows, and the names of weight and bias in it."""

    unit: Unit
    weight_name: str
    bias_name: str | None

    @property
    def trainable(self) -> bool:
        """True if the weight is trained."""
        return self.unit.parameters[self.weight_name].requires_grad

    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias, while the unit is unsharded."""
        weight = local_part(self.unit.parameters[self.weight_name]).detach()
        return weight, None if self.bias_name is None else local_part(self.unit.parameters[self.bias_name]).detach()


@dataclass(slots=True)
class Scores:
    """The scores of a slice for a microbatch of N tokens.

    sums: [3, N], the largest logit, the sum of exponentials relative to it, and the label's logit or 0.
    answer: [N + labels in the slice, hidden], the mean of the head's rows, followed by the rows of the labels; if
    `logits` are requested, these, [N, rows]; None if only the loss is needed.
    """

    sums: Tensor
    answer: Tensor | None = None


@dataclass(slots=True)
class _Kept:
    """State kept from S to T: the softmax of the slice's logits, and the scored hidden state."""

    hidden: Tensor
    softmax: Tensor
    slope: Tensor | None
    sums: Tensor


class VocabularySlice:
    """Rows `rows` of the vocabulary, of pipeline rank `index` of `ranks`.

    tensor: the ranks of the tensor-parallel group, if there is one, each with a part of the slice.
    """

    def __init__(self, vocabulary: Vocabulary, embedding: VocabularyTable, head: VocabularyTable, *, index: int,
                 ranks: int, tensor: DeviceMesh | None, size: int, padding: int | None) -> None:  # fmt: skip
        self.embedding, self.head = embedding, head
        self.index, self.ranks, self.size = index, ranks, size
        self._tensor = tensor
        self._vocabulary, self._padding = vocabulary, padding
        self.rows = self.rows_of(index)
        self._kept: dict[int, _Kept] = {}

    def rows_of(self, index: int) -> range:
        """Return the rows of a rank of this rank's pipeline."""
        part, parts = (0, 1) if self._tensor is None else (self._tensor.get_local_rank(), self._tensor.size())
        box = Box.part((self.size,), 0, index * parts + part, count=self.ranks * parts)
        return range(box.offsets[0], box.offsets[0] + box.sizes[0])

    @property
    def slices(self) -> dict[str, int]:
        """Return the units of both slices, by the names that instructions have of them."""
        return {EMBEDDING: self.embedding.unit.spec.index, HEAD: self.head.unit.spec.index}

    @property
    def width(self) -> int:
        """Number of elements of a row, the hidden size."""
        return int(self.head.unit.parameters[self.head.weight_name].shape[1])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of rows and hidden states."""
        return local_part(self.head.unit.parameters[self.head.weight_name]).dtype

    @property
    def precise(self) -> torch.dtype:
        """Dtype of sums and losses."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def tables(self) -> tuple[VocabularyTable, ...]:
        """The ends that have different units."""
        return (self.embedding,) if self.embedding.unit is self.head.unit else (self.embedding, self.head)

    def check(self, batch: Batch) -> None:
        """Raise PlanError for ids and labels outside all slices, which every slice would leave to the others, and for
        shapes other than [B, S]."""
        shapes = {name: tuple(batch[name].shape) for name in ("input_ids", "labels") if name in batch}
        if "input_ids" not in shapes or len(set(shapes.values())) > 1 or len(shapes["input_ids"]) != 2:
            raise PlanError(
                f"vocabulary_parallel takes input_ids and labels of one shape [B, S]; the batch has {shapes}"
            )
        for name in batch.keys() & {"input_ids", "labels"}:
            check_ids(name, batch[name][batch[name] != IGNORED_LABEL] if name == "labels" else batch[name], self.size)

    def begin(self) -> None:
        """Begin a step: discard the state of an earlier one."""
        self._kept.clear()

    @torch.no_grad()
    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, [B, S] -> [B, S, hidden], with zeros for ids in other slices."""
        weight, _ = self.embedding.rows()
        at, is_here = self._local(ids)
        found = F.embedding(at, weight)
        return found.masked_fill_(~is_here[..., None], 0.0)

    @torch.no_grad()
    def embedded(self, found: Tensor) -> Tensor:
        """Return the look-up in the full vocabulary from the sum of the pipeline ranks' look-ups."""
        return self._all(found)

    @torch.no_grad()
    def learn_look_up(self, ids: Tensor, gradient: Tensor) -> None:
        """Add the gradient of the looked-up rows to the embedding's."""
        at, is_here = self._local(ids)
        if self._padding is not None:
            is_here &= ids != self._padding
        target, is_empty = self._room(self.embedding, self.embedding.weight_name)
        if is_empty:
            target.zero_()
        target.index_add_(0, at[is_here], gradient[is_here].to(target.dtype))

    @torch.no_grad()
    def score(self, microbatch: int, hidden: Tensor, labels: Tensor, *, training: bool, logits: bool) -> Scores:
        """Return this slice's scores; in training, keep the inputs of `learn`."""
        weight, bias = self.head.rows()
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        scored, slope = finished_logits(F.linear(flat, weight, bias), self._vocabulary)
        if logits:
            return Scores(scored.new_zeros(3, 1), scored)
        precise = scored.to(self.precise)
        largest = precise.amax(1)
        exponentials = (precise - largest[:, None]).exp_()
        total = exponentials.sum(1)
        at, is_here = self._local(labels.reshape(-1))
        tokens = is_here.nonzero().squeeze(1)
        own = torch.zeros_like(largest)
        own[tokens] = precise[tokens, at[tokens]]
        scores = Scores(torch.stack([largest, total, own]))
        if training:
            softmax = exponentials.div_(total[:, None]).to(self.dtype)
            weighted = softmax if slope is None else softmax * slope
            rows = weight[at[tokens]]
            if slope is not None:
                rows = rows * slope[tokens, at[tokens]][:, None]
            scores.answer = torch.cat([weighted @ weight, rows])
            if self.head.unit.trainable:
                self._kept[microbatch] = _Kept(flat, softmax, slope, sums=scores.sums)
        return scores

    @torch.no_grad()
    def learn_score(self, microbatch: int, labels: Tensor, totals: Tensor, scale: float) -> None:
        """Add the gradient of the head's rows: of `scale` times the loss, whose log-sums are `totals` [N]."""
        kept = self._kept.pop(microbatch, None)
        if kept is None:
            return
        flat = labels.reshape(-1)
        at, is_here = self._local(flat)
        factor = (kept.sums[0] - totals).exp_().mul_(kept.sums[1]).mul_(scale).masked_fill_(flat == IGNORED_LABEL, 0.0)
        gradient = kept.softmax.to(self.precise) * factor[:, None]
        tokens = is_here.nonzero().squeeze(1)
        gradient[tokens, at[tokens]] -= scale
        if kept.slope is not None:
            gradient *= kept.slope
        self._room(self.head, self.head.weight_name).add_product(kept.hidden, gradient.to(self.dtype))
        if self.head.bias_name is not None:
            self._room(self.head, self.head.bias_name).add(gradient.sum(0))

    @torch.no_grad()
    def combine(self, scores: Sequence[Scores], labels: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Combine the pipeline ranks' scores. Return the summed loss over tokens, log-sums [N], and the hidden state's
        gradient."""
        flat = labels.reshape(-1)
        is_counted = flat != IGNORED_LABEL
        sums = torch.stack([each.sums for each in scores])
        largest = self._all(sums[:, 0].amax(0), "max")
        relative = (sums[:, 1] * (sums[:, 0] - largest).exp()).sum(0)
        total, own = self._all(torch.stack([relative, sums[:, 2].sum(0)]))
        totals = total.log() + largest
        loss = (totals - own)[is_counted].sum()
        if any(each.answer is None for each in scores):
            return loss, totals, None
        gradient = totals.new_zeros(flat.numel(), self.width)
        for each in scores:
            assert each.answer is not None
            factor = (each.sums[0] - totals).exp() * each.sums[1]
            gradient.addcmul_(each.answer[: flat.numel()].to(gradient.dtype), factor[:, None])
        for index, each in enumerate(scores):
            assert each.answer is not None
            tokens = self.labels_in(index, flat).nonzero().squeeze(1)
            gradient[tokens] -= each.answer[flat.numel() :].to(gradient.dtype)
        gradient.masked_fill_(~is_counted[:, None], 0.0)
        return loss, totals, self._all(gradient).view(*labels.shape, self.width)

    @torch.no_grad()
    def logits(self, scores: Sequence[Scores]) -> Tensor:
        """Return the logits [N, vocabulary] from the pipeline ranks' scores, in order."""
        answers = [each.answer for each in scores if each.answer is not None]
        logits = answers[0].new_zeros(len(answers[0]), self.size)
        for index, answer in enumerate(answers):
            rows = self.rows_of(index)
            logits[:, rows.start : rows.stop] = answer
        return self._all(logits)

    def _all(self, part: Tensor, by: str = "sum") -> Tensor:
        """Reduce over the ranks of the tensor-parallel group."""
        return part if self._tensor is None else added_up(part, self._tensor, by)

    def labels_in(self, index: int, labels: Tensor) -> Tensor:
        """Return the mask of labels in the slice of a rank."""
        rows = self.rows_of(index)
        return (labels >= rows.start) & (labels < rows.stop)

    def _local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of ids in the slice, arbitrary for others, and the mask of ids in the slice."""
        at = ids - self.rows.start
        is_here = (at >= 0) & (at < len(self.rows))
        return at.clamp(0, len(self.rows) - 1), is_here

    def _room(self, table: VocabularyTable, name: str) -> GradientBuffer:
        table.unit.touched.add(name)
        return table.unit.gradient_buffer(name, "W")


def block_of(blocks: Sequence[Block], module: str) -> int:
    """Return the block that contains a module."""
    return next(at for at, block in enumerate(blocks) if any(name == module for name, _ in block.named_modules()))
