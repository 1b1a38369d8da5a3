"""Input and output of every system's export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from atoll.plans.layouts import Layout, Level
from atoll.plans.plan import Plan
from atoll.prediction.cost import Prediction
from atoll.prediction.cost.mixture import MixtureConfig
from atoll.training.config import Config, Train
from atoll.training.config.train import WEIGHT_DECAY


@dataclass(frozen=True, slots=True)
class Settings:
    """A plan as another system's settings.

    version: of the documentation that was followed.  files: text by name.  launch: command lines.
    limits: parts of the plan that the system cannot express, and their replacements.
    """

    system: str
    version: str
    files: Mapping[str, str]
    launch: tuple[str, ...]
    limits: tuple[str, ...]


_SCHEDULES = ("cosine", "constant", "linear")
"""Learning-rate schedules that all of the systems have."""


@dataclass(frozen=True, slots=True)
class Adam:
    """Options of AdamW, under the names that most systems have for them."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Subject:
    """A config and the prediction of its plan; predicted seconds are not used."""

    config: Config
    prediction: Prediction

    @property
    def plan(self) -> Plan:
        """The plan to express."""
        return self.prediction.plan

    @property
    def train(self) -> Train:
        """The training settings, with AdamW and a cosine schedule in place of values that none of the systems has."""
        train = self.config.train
        others: dict[str, object] = {}
        if train.optimizer != "AdamW":
            others = {"optimizer": "AdamW", "weight_decay": WEIGHT_DECAY, "optimizer_options": {}}
        if train.lr_schedule not in _SCHEDULES:
            others["lr_schedule"] = "cosine"
        return train.model_copy(update=others)

    @property
    def adam(self) -> Adam:
        """Arguments of AdamW."""
        options = self.train.options
        beta1, beta2 = options["betas"]
        return Adam(beta1, beta2, eps=float(options["eps"]), weight_decay=float(self.train.weight_decay or 0.0))

    @property
    def mixture(self) -> MixtureConfig | None:
        """The experts of the built-in decoder. None if it has none, and for other models, whose sizes are elsewhere."""
        model = self.config.model
        return model.options.mixture if model.is_builtin else None

    @property
    def expert_ranks(self) -> int:
        """Ranks that divide experts: along `expert`, and along `tensor`. 1 if the config says of no experts."""
        mesh = self.plan.mesh
        return mesh.expert * mesh.tensor if mesh.expert > 1 or self.mixture is not None else 1

    @property
    def kv_heads(self) -> int:
        """Key and value heads of the built-in decoder; 0 for other models, whose sizes are elsewhere."""
        return self.config.model.kv_heads if self.config.model.is_builtin else 0

    @property
    def layers(self) -> range:
        """Blocks of the model that are layers."""
        return self.prediction.ranks.model.layers

    @property
    def stages(self) -> tuple[range, ...]:
        """Blocks of each stage."""
        return self.prediction.ranks.runs

    @property
    def nodes(self) -> tuple[int, int]:
        """Number of nodes, and ranks of each: those of the cluster, or a group without one."""
        mesh = self.plan.mesh
        cluster = self.prediction.cluster
        each = min(mesh.world, mesh.intra * mesh.tensor if cluster is None else cluster.node.devices)
        return -(-mesh.world // each), each

    @property
    def torchrun(self) -> str:
        """Return the torchrun command that starts the ranks."""
        nodes, each = self.nodes
        where = "--standalone" if nodes == 1 else "--rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500"
        return f"torchrun --nnodes {nodes} --nproc-per-node {each} {where}"

    def length_limits(self, multiple: int) -> list[str]:
        """Return why a system whose ranks divide sequences does not take the length of this one's."""
        length = self.config.data.sequence
        if self.plan.mesh.sequence == 1 or length % multiple == 0:
            return []
        return [f"data.sequence = {length}, which is padded here: use a multiple of {multiple}"]

    def shared_limits(self, *has: str) -> list[str]:
        """Return the parts of a config that a system does not express.

        has: those that few systems have and it does: "codecs", kinds of host memory, "gradients" there, and keys of
        `train.router`.
        """
        plan, train, found = self.plan, self.config.train, []
        if train.optimizer != "AdamW":
            found.append(f"the optimizer {train.optimizer}, replaced by AdamW")
        if train.lr_schedule not in _SCHEDULES:
            found.append(f"the learning-rate schedule {train.lr_schedule}, replaced by a cosine")
        if train.epochs is not None:
            found.append(
                f"train.epochs = {train.epochs:g}, whose steps are known once the corpus is prepared, replaced by "
                f"{train.steps} steps"
            )
        if plan.vocabulary_parallel:
            found.append(
                "a vocabulary that is split over the pipeline ranks: embedding and head stay whole on the first and "
                "the last stage"
            )
        if plan.schedule.slices > 1:
            found.append(f"{plan.schedule.slices} slices of each sequence: the pipeline has whole ones")
        if plan.loss_chunks > 1:
            found.append(f"a loss in {plan.loss_chunks} chunks of tokens: it is the training script's there")
        if plan.precision.products is not None and "float8" not in has:
            found.append(f"{plan.precision.products}: they multiply in {plan.precision.compute}")
        if plan.outer is not None:
            found.append(f"outer steps ({plan.outer}): all groups take every step together")
        if plan.post_validation:
            found.append("a post-validated optimizer step: the step waits for the global gradient norm")
        codecs = replace(plan.codecs, gradient=None, parameter=None) if "codecs" in has else plan.codecs
        if codecs:
            found.append(f"codecs ({codecs}): elements are sent as they are")
        if plan.expert_layout not in (None, plan.layout):
            found.append(f"layout {plan.expert_layout} of the experts: they have that of everything else")
        for key, value in train.router:
            if value and key not in has:
                found.append(f"train.router.{key} = {value}: the settings do not balance experts so")
        if plan.host is not None and plan.host.optimizer not in (None, *has):
            found.append(f"state in host memory ({plan.host.optimizer}): it rests on the device")
        if plan.host is not None and plan.host.parameters not in (None, *has):
            found.append(f"{plan.host.parameters} parameters in host memory: they rest on the device")
        if plan.host is not None and plan.host.gradients and "gradients" not in has:
            found.append("gradients in host memory between microbatches: they stay on the device")
        if plan.host is not None and plan.host.kept:
            found.append(f"{plan.host.kept} in host memory: they stay on the device")
        if plan.stays == "run":
            found.append("residency `run`: gathered parameters stay for one microbatch or for the step")
        if plan.unit > 1:
            found.append(f"units of {plan.unit} blocks by a number: wrap that many layers in one module")
        return found


FULL, HYBRID, REPLICATED = "full shard", "hybrid shard", "replicated"


@dataclass(frozen=True, slots=True)
class TorchSharding:
    """The FSDP2 configuration nearest to a layout.

    kind: full shard over all data-parallel ranks, hybrid shard (sharded inside a group, replicated over groups), or
    replicated.  reshards: whether whole parameters are freed after the forward.
    """

    kind: str
    reshards: bool

    @staticmethod
    def of(plan: Plan) -> TorchSharding:
        """Return the nearest one that, if possible, holds no more optimizer state and sends no more between groups."""
        layout = plan.layout
        reshards = layout.parameters is not Level.N and plan.stays == "action"
        if layout == Layout("NNN") or plan.mesh.data == 1:
            return TorchSharding(REPLICATED, False)
        if "I" in layout.name and plan.mesh.inter > 1:
            return TorchSharding(HYBRID, reshards)
        return TorchSharding(FULL, reshards)

    def limits(self, plan: Plan) -> list[str]:
        """Return the differences from the plan's layout."""
        layout, found = plan.layout.name, []
        # With I it is a full shard only where there is one group.
        whole = "GGG" if "I" not in layout else layout
        rests = {FULL: whole, HYBRID: "III", REPLICATED: "NNN"}[self.kind]
        if plan.mesh.data > 1 and rests != layout:
            kept = "" if self.reshards else ", with parameters gathered once a step"
            found.append(f"layout {layout}: FSDP2 shards all three states alike; the nearest is {rests}{kept}")
        return found
