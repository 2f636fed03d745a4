"""Ages of published weight versions, in rollouts that were trained since."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class WeightAges:
    """Counts the rollouts that the policy trained on, and remembers the count at which each version
    was published.
    """

    num_trained: int = 0
    trained_at: dict[int, int] = dataclasses.field(default_factory=dict)

    def published(self, version: int) -> None:
        """Notes that the weights as they are went out under `version`."""
        self.trained_at[version] = self.num_trained

    def trained(self) -> None:
        """Notes that a rollout was trained."""
        self.num_trained += 1

    def of(self, versions_N: np.ndarray) -> np.ndarray:
        """float64 [N]: updates of the weights since those versions went out; NaN for -1 (not
        known), and where nothing was published. A version from before this process counts from the
        first one it knows, one update a version.
        """
        if not self.trained_at:
            return np.full(len(versions_N), np.nan)
        first = min(self.trained_at)
        known = [
            np.nan
            if version < 0
            else self.num_trained - self.trained_at[version]
            if version in self.trained_at
            else self.num_trained - self.trained_at[first] + max(0, first - version)
            for version in versions_N.tolist()
        ]
        return np.array(known, dtype=np.float64)
