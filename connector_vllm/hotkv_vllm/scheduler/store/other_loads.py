"""Loads of other connectors."""

from collections.abc import Collection


class OtherLoads:
    """hotkv stores no KV that another connector of a MultiConnector may have failed to load.

    - Asynchronous: vLLM counts the tokens as computed at once, so the request is not stored until a
      step runs it.
    - Synchronous: requests admitted for the step, or for later ones before its output, are not
      stored until that output; if the load failed, never.

    held: requests that run, but must not be stored now.
    """

    def __init__(self) -> None:
        self._admitted: set[str] = set()
        self._unsettled: dict[int, set[str]] = {}
        self._distrusted: set[str] = set()
        self._last_step = 0
        self.held: set[str] = set()

    def __repr__(self) -> str:
        return (
            f"OtherLoads(admitted={len(self._admitted)}, unsettled={len(self._unsettled)}, "
            f"held={len(self.held)})"
        )

    def admitted(self, request_id: str) -> None:
        self._admitted.add(request_id)

    def ended(self, request_id: str) -> None:
        for requests in (self._admitted, self._distrusted, self.held, *self._unsettled.values()):
            requests.discard(request_id)

    def may_store(self, request_id: str) -> bool:
        """Whether the blocks surely hold all tokens that vLLM counts as computed."""
        return request_id not in self._admitted and request_id not in self.held

    def step(self, running: Collection[str], has_sync_loads: bool) -> int:
        """Number for workers to report at the step's end; 0: no report needed.

        has_sync_loads: of another connector.
        """
        ran = {request_id for request_id in self._admitted if request_id in running}
        self._admitted -= ran
        if not has_sync_loads and not self._unsettled:
            return 0
        self._last_step += 1
        self._unsettled[self._last_step] = ran
        self.held |= ran
        return self._last_step

    def lost(self) -> None:
        """The planning of a step raised, so which requests it runs is unknown."""
        self._distrusted |= self._admitted
        self.held |= self._admitted

    def settled(self, step: int, went_well: bool) -> None:
        """Reports come in order: an earlier open step has lost its report, and its admitted
        requests are never stored.

        went_well: False if a synchronous load failed.
        """
        for number in sorted(self._unsettled):
            if number > step and went_well:
                break
            requests = self._unsettled[number] if number > step else self._unsettled.pop(number)
            if not went_well or number < step:
                self._distrusted |= requests
        self.held = self._distrusted.union(*self._unsettled.values())
