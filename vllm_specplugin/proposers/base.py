"""The contract of a proposer (entry-point group `vllm_specplugin.proposers`). It imports no vLLM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from vllm_specplugin.types import Capabilities, Depth, Drafts, Host, Step, Target, Verdict

if TYPE_CHECKING:
    from torch import nn

    from vllm_specplugin.config import SpecConfig
    from vllm_specplugin.guard import Guard


class ProposerOptions(BaseModel):
    """Base for a proposer's `options`: unknown keys are refused, so that a misspelt one is not silently ignored; and so are wrong
    types, such as true or "5" for a number."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        types = set(get_args(annotation)) or {annotation}
        if isinstance(value, (bool, str)) and types & {int, float} and not types & {bool, str}:
            kind = "number" if float in types else "integer"
            raise PydanticCustomError(kind, f"Input should be a valid {kind}")
        return value


OptionsT = TypeVar("OptionsT", bound=BaseModel)


class Proposer(ABC, Generic[OptionsT]):
    """Suggests the next tokens of the running requests; the target then checks all of them in one pass.

    One object serves one engine (one per tensor-parallel rank). The engine calls `load` once, then for every step
    `observe` (if there was something to verify) and `propose`; `forget` when requests end or are preempted. Whatever it
    returns is checked, and whatever it raises is caught: a faulty proposer costs speed, never a right answer.
    """

    Options: ClassVar[type[BaseModel]] = ProposerOptions
    capabilities: ClassVar[Capabilities] = Capabilities()
    default_num_speculative_tokens: ClassVar[int] = 5
    """k where the configuration does not say."""
    adaptive_num_speculative_tokens: ClassVar[int | None] = None
    """The same where control shortens drafts that do not pay, for a proposer that drafts further at no cost; None: as above."""
    host_keys: ClassVar[frozenset[str] | None] = None
    """Which of the host's own keys for draft checkpoints one of ours heeds; None: nobody says that any has no effect."""
    catches_up: ClassVar[bool] = False
    """It compares what it knows of a request with `Step.lengths`, and takes what is missing from the history. So it need not
    forget requests of which it missed steps (being late, or not being asked), and going on costs what it missed."""

    def __init__(self, host: Host, options: OptionsT) -> None:
        self.host = host
        self.options = options

    @property
    def on_host_only(self) -> bool:
        """It asks nothing of the target's device: then it runs in a thread, so that no step waits for it longer than it may."""
        return self.capabilities.on_host_only

    @property
    def guards(self) -> Mapping[str, Guard]:
        """The guards of its parts by their names, for a proposer that is made of others; their faults are shown in the metrics."""
        return {}

    @classmethod
    def capabilities_for(cls, config: SpecConfig, options: OptionsT) -> Capabilities:
        """What it needs and gives as configured; the class's own `capabilities` where that does not depend on options.

        Raises:
            ConfigError: parts that are named in the options do not go together.
        """
        return cls.capabilities

    @classmethod
    def depth(cls, config: SpecConfig, options: OptionsT, target: Target | None) -> Depth:
        """How many tokens it can draft per step. A proposer with a checkpoint looks at it here, without loading weights.

        Called before any model is loaded, so that what does not fit together is said at once.

        Args:
            config: what the user wrote.
            options: the proposer's own options, validated.
            target: the target model; None where nobody has named one.

        Raises:
            ConfigError: the checkpoint cannot be read, is of another family, or does not fit the target; both are named.
        """
        return Depth(cls.default_num_speculative_tokens, adaptive=cls.adaptive_num_speculative_tokens)

    def load(self, target: nn.Module) -> None:
        """Load weights and capture graphs, once, after the target model is loaded."""

    @abstractmethod
    def propose(self, step: Step) -> Drafts:
        """Draft up to `step.limits[row]` tokens for each row of one engine step."""

    def observe(self, verdict: Verdict) -> None:
        """Learn what the target accepted of the last drafts."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop all state of requests that finished, were aborted or were preempted; ids may be unknown."""

    @classmethod
    def memory_bill(cls, host: Host, options: OptionsT) -> Mapping[str, int]:
        """Bytes that such a proposer would come to hold at most, by what for: `{"index (20 B per token)": ...}`.

        Asked by `vllm-specplugin doctor` before any engine starts; the weights of a checkpoint are counted without it.
        """
        return {}

    def memory_bytes(self) -> int | None:
        """Bytes that the proposer holds beside its weights, where it knows."""
        return None
