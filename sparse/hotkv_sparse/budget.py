"""Learns how large a hot set should be from the blocks that its steps needed.

With `adaptive_p`, selections are as large as the attention mass asks, up to the budget. The hot set
follows: twice what selections need of late (quickly up, slowly down), more if steps keep missing
more than they may load. Always between twice the always kept blocks and `MAX_SETS` times the
budget.
"""

from dataclasses import dataclass

USUAL_SETS = 2
"""Hot set over selection: twice the budget did better than fresh selections alone (SmolLM2)."""
MAX_SETS = 4.0
_DECAY = 0.98
_PRESSURE_RATE = 0.1


@dataclass(slots=True)
class AdaptiveCapacity:
    """Capacity of one hot set. `budget_blocks`: the ceiling of a selection; `always_blocks`: what
    is kept whatever happens.

    `needed_blocks`: a peak of recent selections that decays by 2 % a step. `pressure_ratio`: of
    late, the share of steps that missed more than they might load. `sets`: capacity over need,
    raised under pressure.
    """

    budget_blocks: int
    always_blocks: int
    needed_blocks: float = 0.0
    pressure_ratio: float = 0.0
    sets: float = USUAL_SETS

    def observe(self, selected_blocks: int, left_blocks: int) -> int:
        """Takes in one step's selected blocks and those left to prefetch; returns the capacity to
        have."""
        self.needed_blocks = max(
            float(min(selected_blocks, self.budget_blocks)), self.needed_blocks * _DECAY
        )
        self.pressure_ratio += _PRESSURE_RATE * (float(left_blocks > 0) - self.pressure_ratio)
        if self.pressure_ratio > 0.5:
            self.sets = min(self.sets * 1.05, MAX_SETS)
        elif self.pressure_ratio < 0.1:
            self.sets = max(self.sets * 0.99, USUAL_SETS)
        return self.capacity_blocks

    @property
    def capacity_blocks(self) -> int:
        """Blocks the hot set should hold; before the first step, twice the budget."""
        needed = self.needed_blocks or float(self.budget_blocks)
        return round(max(self.sets * needed, USUAL_SETS * self.always_blocks, 1.0))
