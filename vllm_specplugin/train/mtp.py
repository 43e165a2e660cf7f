"""Multi-token prediction as an objective: for pre-training, where the trunk learns too, and on a frozen trunk.

    L = sum over d = 1..D of lambda_d * (- sum over t of log p_d(x_{t+d} | x_<=t))

Depth 1 is the main head. Sources: Gloeckle et al., "Better & Faster Large Language Models via Multi-token Prediction",
arXiv 2404.19737, section 2, for *parallel* heads, which see the hidden state at t alone; DeepSeek-AI, "DeepSeek-V3 Technical
Report", arXiv 2412.19437, section 2.2, for *sequential* modules, whose depth d also sees the tokens up to x_{t+d-1}, so that
p_d is conditioned on x_<=t+d-1. All depths share the target's embedding and output layer.

As drafts: the target has chosen x_{t+1} from the hidden state at t, and depth d proposes x_{t+d}, so depth D gives D - 1 drafts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vllm_specplugin.errors import ConfigError
from vllm_specplugin.heads.medusa import MedusaHeads
from vllm_specplugin.heads.mtp import SequentialMTP
from vllm_specplugin.train.batch import Batch
from vllm_specplugin.train.losses import CrossEntropy, SoftLabels, cross_entropy
from vllm_specplugin.train.objective import Losses, Objective, chained
from vllm_specplugin.train.trunk import Trunk, TrunkStates

Exporter = Callable[["MTPObjective", Path, Mapping[str, Any]], None]
"""Writes a checkpoint; see `export_mtp.py`."""


# -- lambda ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DepthWeights:
    """lambda_d, and how the share of the run that is done changes them."""

    values: tuple[float, ...]
    """`[D]`: lambda_1 is the main head's."""
    course: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    """(share of the run, factor) in order: all but lambda_1 are multiplied by it, interpolated linearly; two points at one share
    are a jump."""

    @classmethod
    def parse(cls, values: str, course: str, depth: int) -> DepthWeights:
        """Read `--lambdas` and `--lambda-schedule`.

        Args:
            values: one number for every depth beyond the first, or D - 1 numbers, or D with the main head's, by commas.
            course: 'constant', 'ramp' (rising linearly over the whole run), or 'share:factor' points by commas.
            depth: D.

        Raises:
            ConfigError: the numbers cannot be read, or are too many or too few.
        """
        try:
            numbers = [float(part) for part in values.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) == 1:
            numbers *= depth - 1
        if len(numbers) == depth - 1:
            numbers = [1.0, *numbers]
        if len(numbers) != depth or min(numbers) < 0:
            raise ConfigError(
                f"'--lambdas' is {values!r}; with --depth {depth} give one number of at least 0 for all extra depths, "
                f"{depth - 1} by commas, or {depth} with the main head's first."
            )
        return cls(tuple(numbers), _course(course))

    def at(self, share: float) -> tuple[float, ...]:
        """`[D]`, when this share of the run is done."""
        factor = self._factor(share)
        return self.values[0], *(value * factor for value in self.values[1:])

    def _factor(self, share: float) -> float:
        before, after = None, None
        for point in self.course:
            if point[0] <= share:
                before = point
            elif after is None:
                after = point
        if before is None or after is None:
            return (before or after or (0.0, 1.0))[1]
        way = (share - before[0]) / (after[0] - before[0])
        return before[1] + way * (after[1] - before[1])


def _course(text: str) -> tuple[tuple[float, float], ...]:
    if text == "constant":
        return ((0.0, 1.0),)
    if text == "ramp":
        return ((0.0, 0.0), (1.0, 1.0))
    try:
        points = tuple((float(share), float(factor)) for share, factor in (part.split(":") for part in text.split(",")))
    except ValueError:
        points = ()
    shares = [share for share, _ in points]
    if not points or shares != sorted(shares) or shares[0] < 0 or shares[-1] > 1 or min(factor for _, factor in points) < 0:
        raise ConfigError(
            f"'--lambda-schedule' is {text!r}; 'constant', 'ramp', or points 'share:factor' in order, such as "
            "'0:1,0.67:1,0.67:0.33', are expected."
        )
    return points


# -- the objective -----------------------------------------------------------------------------------------


class MTPObjective(Objective):
    """What both kinds of trunk share."""

    name = "mtp"

    def __init__(self, heads: SequentialMTP | MedusaHeads, weights: DepthWeights, exporter: Exporter) -> None:
        super().__init__()
        self.heads = heads
        self.weights = weights
        self.exporter = exporter
        self._now = weights.at(0.0)
        if len(weights.values) != self.depth + 1:
            raise ValueError(f"{len(weights.values)} weights for {self.depth + 1} depths")

    @property
    def depth(self) -> int:
        """Drafts: depths beyond the main head."""
        config = self.heads.config
        return config.num_heads if isinstance(self.heads, MedusaHeads) else config.num_drafts  # type: ignore[union-attr]

    def schedule(self, share: float) -> None:
        self._now = self.weights.at(share)

    def export(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        self.exporter(self, folder, provenance)

    @abstractmethod
    def run_trunk(self, batch: Batch) -> TrunkStates:
        """The target's states for the batch's texts."""

    @property
    @abstractmethod
    def main_head_learns(self) -> bool:
        """Whether depth 1 is a part of the loss."""

    def decays(self, name: str, parameter: nn.Parameter) -> bool:
        """Blocks of parallel heads keep the gates, norms and scales of all depths together, so that these look like matrices."""
        if name.startswith("heads.") and isinstance(self.heads, MedusaHeads):
            return name.endswith("linear.weight")
        return super().decays(name, parameter)

    def drafted(self, trunk: TrunkStates) -> Iterator[Tensor]:
        """For d = 2..D: `[rows, length, hidden]`, whose place t predicts x_{t+d} through the trunk's output layer."""
        if isinstance(self.heads, MedusaHeads):
            states = self.heads(trunk.after_norm.flatten(0, 1))
            return iter(states.unflatten(0, trunk.after_norm.shape[:2]).unbind(2))
        places = torch.arange(trunk.before_norm.shape[1], device=trunk.before_norm.device)
        return self.heads(trunk.before_norm, trunk.embeddings, places)  # type: ignore[no-any-return]

    def loss(self, batch: Batch) -> Losses:
        """L of a batch, per token that counts."""
        trunk = self.run_trunk(batch)
        states: Iterable[Tensor] = self.drafted(trunk)
        if self.main_head_learns:
            states = (trunk.after_norm, *states)
        first = 1 if self.main_head_learns else 2
        total = trunk.output.new_zeros((), dtype=torch.float32)
        parts, right, known = {}, [], []
        for depth, state in enumerate(states, first):
            labels, counts = labels_at(batch, depth)
            found = self.compare(state[counts], labels[counts], batch, depth, trunk)
            total = total + self._now[depth - 1] * found.total
            parts[f"depth {depth}" if depth > 1 else "main"] = found.total.detach()
            if depth > 1:
                hits = torch.zeros_like(counts)
                hits[counts] = self.token_of(found.best) == labels[counts]
                right.append(hits)
                known.append(counts)
        # Drafts are made where the target has just chosen a token, x_{t+1}, itself.
        anchors = labels_at(batch, 1)[1]
        chain = chained(torch.stack(right, dim=-1)[anchors], torch.stack(known, dim=-1)[anchors])
        return Losses(total, parts, *chain)

    def compare(self, states: Tensor, labels: Tensor, batch: Batch, depth: int, trunk: TrunkStates) -> CrossEntropy:
        """Cross-entropy of a depth, per token that counts in the batch.

        Args:
            states: `[n, hidden]`, of the places that have a label.
            labels: `[n]`, the tokens there.
            batch: the batch.
            depth: d.
            trunk: the target's states.
        """
        return cross_entropy(states, trunk.output, _weights(states, batch), labels)

    def token_of(self, best: Tensor) -> Tensor:
        """The tokens that rows of the compared output matrix stand for."""
        return best


def labels_at(batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
    """What place t is to predict at a depth: x_{t+depth} `[rows, length]` int64, and whether that token is there and counts."""
    ahead = min(depth, batch.token_ids.shape[1])
    return F.pad(batch.token_ids[:, ahead:], (0, ahead)), F.pad(batch.counts[:, ahead:], (0, ahead))


class JointMTP(MTPObjective):
    """The trunk learns from all depths: pre-training, or training that goes on."""

    states = "none"
    main_head_learns = True

    def __init__(self, trunk: Trunk, heads: SequentialMTP | MedusaHeads, weights: DepthWeights, exporter: Exporter) -> None:
        super().__init__(heads, weights, exporter)
        self.trunk = trunk

    def run_trunk(self, batch: Batch) -> TrunkStates:
        states: TrunkStates = self.trunk(batch.token_ids)
        return states


@dataclass(frozen=True, slots=True, eq=False)
class FrozenParts:
    """What heads share with a target that does not learn."""

    embedding: Tensor
    """`[vocab, hidden]`"""
    output: Tensor
    """`[vocab, hidden]`"""
    final_norm: Tensor
    """`[hidden]`: the weight of its final norm."""


class FrozenMTP(MTPObjective):
    """Heads for a model as it is, from its stored hidden states."""

    states = "last"
    main_head_learns = False

    embedding: Tensor
    output: Tensor
    norm: Tensor
    compared: Tensor | None

    def __init__(
        self,
        frozen: FrozenParts,
        heads: SequentialMTP | MedusaHeads,
        weights: DepthWeights,
        exporter: Exporter,
        soft: bool = False,
        compared: Tensor | None = None,
    ) -> None:
        """Take over the target's frozen parts.

        Args:
            frozen: what the heads share with the target.
            heads: what is trained.
            weights: lambda; the main head's is not used.
            exporter: writes the checkpoint.
            soft: learn the target's distribution at each place, and not the token written there.
            compared: `[some]` int64, sorted: the tokens that training's softmax ranges over; None for all. A label outside
                is left out of the loss.

        Raises:
            ConfigError: the final norm has a zero, so that what stood before it cannot be told from what came out.
        """
        super().__init__(heads, weights, exporter)
        if bool((frozen.final_norm == 0).any()):
            raise ConfigError("the target's final norm has a weight of exactly 0; train with --trunk joint instead.")
        self.register_buffer("embedding", frozen.embedding, persistent=False)
        self.register_buffer("output", frozen.output, persistent=False)
        self.register_buffer("norm", frozen.final_norm, persistent=False)
        self.register_buffer("compared", compared, persistent=False)
        self.register_buffer("compared_output", None if compared is None else frozen.output[compared], persistent=False)
        self.soft = soft

    def run_trunk(self, batch: Batch) -> TrunkStates:
        after = batch.last
        # Stored is what the output layer reads. Divided by the norm's weight it has the direction of the state before the norm,
        # at size 1, and the heads norm it anyhow: for them it is the state before the norm.
        return TrunkStates(
            before_norm=(after.float() / self.norm.float()).to(after.dtype),
            after_norm=after,
            embeddings=F.embedding(batch.token_ids, self.embedding).to(after.dtype),
            output=self.output,
        )

    @property
    def _restricted(self) -> bool:
        """Whether only some tokens are compared: in training, while an evaluation ranges over all as serving does."""
        return self.compared is not None and self.training

    def compare(self, states: Tensor, labels: Tensor, batch: Batch, depth: int, trunk: TrunkStates) -> CrossEntropy:
        weights = _weights(states, batch)
        output: Tensor = self.compared_output if self._restricted else self.output  # type: ignore[assignment]
        if self.soft:
            # The target chose x_{t+d} from its state at t + d - 1.
            before = labels_at(batch, depth)[1].roll(depth - 1, dims=1)
            return cross_entropy(states, output, weights, soft=SoftLabels(trunk.after_norm[before], output))
        if self._restricted:
            assert self.compared is not None
            labels, known = _rows_of(labels, self.compared)
            weights = weights * known
        return cross_entropy(states, output, weights, labels)

    def token_of(self, best: Tensor) -> Tensor:
        return self.compared[best] if self._restricted else best  # type: ignore[index]


def _weights(states: Tensor, batch: Batch) -> Tensor:
    """What each place counts: float32 whatever the states are, in which 1 / n would be rounded."""
    return torch.full((len(states),), 1 / batch.num_counted, device=states.device)


def _rows_of(tokens: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Where tokens stand in the sorted `kept`, and whether they are in it; 0 where not."""
    rows = torch.searchsorted(kept, tokens).clamp(max=len(kept) - 1)
    known = kept[rows] == tokens
    return rows.masked_fill(~known, 0), known
