"""Sizes of a mixture of experts in the built-in decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from atoll.base.errors import PlanError

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """Which experts replace the feed-forward of a layer, and how each token chooses among them. Raises PlanError with
    all problems for impossible sizes.

    expert_ffn: inner width of an expert; the decoder's `ffn` if None.  shared_experts: experts that take every token;
    together they are one feed-forward.  dense_layers: first layers without experts.
    scoring: of an expert for a token; a softmax over all experts (arXiv:1701.06538), or a sigmoid of each alone.
    normalise_weights: whether the weights of a token's experts are divided by their sum; `route_scale` multiplies them.
    groups, groups_per_token: a token takes experts of its best groups only. The score of a group is the sum of its two
    best experts'.  selection_bias: whether a buffer is added to the scores that choose, but not to the weights. These
    are as in DeepSeek-V3 (arXiv:2412.19437).
    """

    experts: int
    experts_per_token: int = 2
    expert_ffn: int | None = None
    shared_experts: int = 0
    dense_layers: int = 0
    scoring: Scoring = "softmax"
    normalise_weights: bool = True
    route_scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    selection_bias: bool = False

    def __post_init__(self) -> None:
        least = {"experts": 1, "experts_per_token": 1, "shared_experts": 0, "dense_layers": 0, "groups": 1,
                 "groups_per_token": 1, **({} if self.expert_ffn is None else {"expert_ffn": 1})}  # fmt: skip
        problems = [
            f"{name} = {getattr(self, name)}: must be at least {bound}"
            for name, bound in least.items()
            if getattr(self, name) < bound
        ]
        if self.scoring not in get_args(Scoring):
            problems.append(f"scoring = {self.scoring!r}: must be {' or '.join(map(repr, get_args(Scoring)))}")
        if not self.route_scale > 0:
            problems.append(f"route_scale = {self.route_scale}: must be positive")
        if not problems:
            problems = self._misfits()
        if problems:
            raise PlanError("a mixture of experts that cannot be built:\n  " + "\n  ".join(problems))

    def _misfits(self) -> list[str]:
        problems = []
        if self.experts % self.groups:
            problems.append(f"experts = {self.experts} is not a multiple of groups = {self.groups}")
        elif self.groups > 1 and self.experts // self.groups < 2:
            problems.append(
                f"experts / groups = {self.experts} / {self.groups} = 1: the score of a group is the sum of its two "
                "best experts'; use fewer groups"
            )
        if self.groups_per_token > self.groups:
            problems.append(f"groups_per_token = {self.groups_per_token} is more than groups = {self.groups}")
        reachable = self.experts // self.groups * min(self.groups_per_token, self.groups)
        if self.experts_per_token > reachable:
            problems.append(
                f"experts_per_token = {self.experts_per_token} is more than the {reachable} experts among which a "
                "token chooses"
            )
        if self.experts_per_token == 1 and self.normalise_weights:
            problems.append(
                "experts_per_token = 1 with normalise_weights: every weight would be 1 and the router would not learn; "
                "set normalise_weights = false"
            )
        return problems

    def layer_problem(self, layers: int) -> str | None:
        """Return why a decoder of so many layers cannot have this mixture; None if it can."""
        if self.dense_layers < layers:
            return None
        return f"dense_layers = {self.dense_layers} of {layers} layers leaves no layer for experts"
