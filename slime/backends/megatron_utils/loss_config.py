"""What the losses and the advantages read from `args`, as frozen values."""

from __future__ import annotations

import argparse
import dataclasses

from slime.algorithms.advantages import EstimatorConfig
from slime.algorithms.corrections import BandConfig
from slime.algorithms.policy_loss import ClipConfig
from slime.algorithms.table import LOSSES
from slime.config.algorithm import AlgorithmOptions


@dataclasses.dataclass(frozen=True)
class LossConfig(AlgorithmOptions):
    """The algorithm's options, with their defaults, and the few others that shape a log-prob or a
    loss.

    Upstream's tests and plug-ins call the losses with a namespace that holds only what they use:
    what is absent has its default.
    """

    rollout_max_response_len: int | None = None
    rollout_temperature: float = 1.0
    rollout_top_p: float = 1.0
    allgather_cp: bool = False

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> LossConfig:
        """Returns the config of the parsed options."""
        given = vars(args)
        return cls(
            **{
                field.name: given[field.name]
                for field in dataclasses.fields(cls)
                if field.name in given
            }
        )

    @property
    def log_prob_temperature(self) -> float:
        """What logits are divided by. Supervised responses were not sampled, so they have no
        temperature.
        """
        return 1.0 if LOSSES[self.loss_type].is_supervised else self.rollout_temperature

    @property
    def replays_nucleus(self) -> bool:
        """Whether log-probs are normalized over the ids that nucleus sampling kept."""
        return self.rollout_top_p != 1.0 and not LOSSES[self.loss_type].is_supervised

    @property
    def clip(self) -> ClipConfig:
        high = self.eps_clip if self.eps_clip_high is None else self.eps_clip_high
        return ClipConfig(self.eps_clip, high, self.eps_clip_c)

    @property
    def tis_band(self) -> BandConfig:
        return BandConfig(self.tis_clip_low, self.tis_clip)

    @property
    def estimator(self) -> EstimatorConfig:
        return EstimatorConfig(kl_coef=self.kl_coef, gamma=self.gamma)

    @property
    def wants_entropy(self) -> bool:
        """Whether the full-vocabulary entropy is computed in the training step."""
        return self.entropy_coef != 0 or self.report_entropy
