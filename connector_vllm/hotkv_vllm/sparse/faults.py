"""Turns sparse attention off for a layer that keeps failing.

An exception in every step would cost more than dense attention. What is always true: a layer that
has failed `MAX_IN_A_ROW` times without a good step between rests for `FIRST_REST_STEPS` steps, then
for twice as many with each further fault, up to `LONGEST_REST_STEPS`. One good step resets this.
The first fault and the first rest of a layer are logged, once each.
"""

from dataclasses import dataclass

from hotkv_vllm import link

logger = link.logger
MAX_IN_A_ROW = 3
FIRST_REST_STEPS = 16
LONGEST_REST_STEPS = 4096


@dataclass(slots=True)
class _Trouble:
    in_a_row: int = 0
    rest_steps: int = FIRST_REST_STEPS
    until_step: int = 0


class Faults:
    """Faults of layers, by name. The caller counts the steps."""

    def __init__(self) -> None:
        self._troubles: dict[str, _Trouble] = {}
        self._said: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        counts = (f"{name}: {trouble.in_a_row}" for name, trouble in self._troubles.items())
        return f"Faults({', '.join(counts)})"

    def rests(self, layer_name: str, step: int) -> bool:
        """Returns True if the layer attends to everything in this step."""
        trouble = self._troubles.get(layer_name)
        return trouble is not None and step < trouble.until_step

    def good_step(self, layer_name: str) -> None:
        if self._troubles:
            self._troubles.pop(layer_name, None)

    def broke(self, layer_name: str, step: int) -> None:
        """Takes in a fault of the layer. Called while its exception is handled."""
        trouble = self._troubles.setdefault(layer_name, _Trouble())
        trouble.in_a_row += 1
        if self._is_new(layer_name, "fault"):
            logger.exception(
                "hotkv: sparse attention of %s broke; the layer attends to everything in this step",
                layer_name,
            )
        if trouble.in_a_row < MAX_IN_A_ROW:
            return
        trouble.until_step = step + 1 + trouble.rest_steps
        if self._is_new(layer_name, "rest"):
            message = (
                "hotkv: sparse attention of %s broke %d times in a row; it rests for %d "
                "steps, and longer should it break again"
            )
            logger.warning(message, layer_name, trouble.in_a_row, trouble.rest_steps)
        trouble.rest_steps = min(2 * trouble.rest_steps, LONGEST_REST_STEPS)

    def _is_new(self, layer_name: str, what: str) -> bool:
        is_new = (layer_name, what) not in self._said
        self._said.add((layer_name, what))
        return is_new
