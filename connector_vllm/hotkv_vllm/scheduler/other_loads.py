"""Loads of other connectors beside hotkv (MultiConnector), as far as storing must know of them.
Scheduler thread only.

What is always true: no KV is stored that another connector may have failed to load.

- vLLM counts tokens of an asynchronous load as computed from its start. A request is trusted again
  when a step runs it.
- A synchronous load runs within the step that uses it, and its failure is known when the step's
  output has come. Until then nothing is stored of the requests that were admitted since, as they
  may build on its blocks. If it failed, nothing is ever stored of them.
"""

from collections.abc import Collection


class OtherLoads:
    """Requests of which nothing may be stored now."""

    def __init__(self) -> None:
        self._admitted: set[str] = set()
        self._unsettled: dict[int, set[str]] = {}
        self._distrusted: set[str] = set()
        self._last_step = 0
        self.held: set[str] = set()
        """Requests that run and of which nothing may be stored."""

    def __repr__(self) -> str:
        return (
            f"OtherLoads(admitted={len(self._admitted)}, unsettled={len(self._unsettled)}, "
            f"held={len(self.held)})"
        )

    def admitted(self, request_id: str) -> None:
        """vLLM has given the request blocks; a load may be filling them."""
        self._admitted.add(request_id)

    def ended(self, request_id: str) -> None:
        """Forgets a request."""
        for requests in (self._admitted, self._distrusted, self.held, *self._unsettled.values()):
            requests.discard(request_id)

    def may_store(self, request_id: str) -> bool:
        """Returns True if all that vLLM counts as computed of the request is there."""
        return request_id not in self._admitted and request_id not in self.held

    def step(self, running: Collection[str], has_sync_loads: bool) -> int:
        """A step is planned. Returns the number under which its end is to be reported; 0 if nobody
        needs to know."""
        if not self._admitted and not has_sync_loads and not self._unsettled:
            return 0
        ran = self._admitted.intersection(running)
        self._admitted -= ran
        if not has_sync_loads and not self._unsettled:
            return 0
        self._last_step += 1
        self._unsettled[self._last_step] = ran
        self.held |= ran
        return self._last_step

    def lost(self) -> None:
        """The planning of a step broke: what it runs is not known."""
        self._distrusted |= self._admitted
        self.held |= self._admitted

    def settled(self, step: int, went_well: bool) -> None:
        """The output of a step has come. Outputs come in order, so an earlier step that was not
        reported has lost its report."""
        for number in sorted(self._unsettled):
            if number > step and went_well:
                break
            requests = self._unsettled[number] if number > step else self._unsettled.pop(number)
            if not went_well or number < step:
                self._distrusted |= requests
        self.held = self._distrusted.union(*self._unsettled.values())
