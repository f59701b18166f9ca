"""Health of each device: what works goes on while another device is lost or hangs.

Always true: sessions on a lost device end, with the reason; new ones there are refused, and so
are new ones on a device that hangs. The server as a whole has a fault only if a restart would
harm nobody: all devices are in trouble, or every engine that uses memory of devices here is
*affected*: it has, or had, a rank on a device in trouble. A restart repairs a lost device.
"""

from collections.abc import Collection, Iterable
from functools import partial

from hotkv_proto.errors import HotKVError, Reason
from hotkv_server.dataplane.engines import CopyEngines
from hotkv_server.device.devices import Devices
from hotkv_server.node.health import Health
from hotkv_server.node.live_session import LiveSession


class Affected:
    """The decision, without devices. `engines`: by id, those that are affected."""

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices
        self._by_device: dict[int, set[str]] = {}

    def __repr__(self) -> str:
        return f"Affected({self._by_device})"

    @property
    def engines(self) -> set[str]:
        return set().union(*self._by_device.values())

    def look(self, troubled: Collection[int], users: Iterable[tuple[str, Collection[int]]]) -> bool:
        """True if a restart would harm nobody. A device that works again affects no engine.

        troubled: devices that are lost or hang.
        users: for each session with memory, its engine and the devices of its memory.
        """
        found = list(users)
        self._by_device = {
            device: self._by_device.get(device, set())
            | {engine for engine, devices in found if device in devices}
            for device in troubled
        }
        affected = self.engines
        served = {engine for engine, _ in found} - affected
        return len(self._by_device) == self._num_devices > 0 or bool(affected and not served)

    def refused(self, device: int, engine: str) -> None:
        """An engine would have used a device that is in trouble."""
        if device in self._by_device:
            self._by_device[device].add(engine)


class DeviceWatch:
    """On the event loop.

    limit_s: a call or copy that takes longer hangs.
    """

    def __init__(
        self,
        devices: Devices,
        copies: CopyEngines,
        sessions: Iterable[LiveSession],
        health: Health,
        limit_s: float,
    ) -> None:
        self._devices = devices
        self._sessions = sessions
        self._health = health
        self._affected = Affected(len(devices.engines))
        self._lost: set[int] = set()
        self._fault = ""
        devices.on_refused = self._affected.refused
        for number, engine in devices.engines.items():
            name = device_name(number)
            health.watch(
                name,
                partial(copies.is_alive_on, number),
                partial(self._stalled_s, copies, number),
                limit_s,
                is_partial=True,
            )
            health.watch_fault(name, partial(getattr, engine, "problem"), is_partial=True)
        health.watch_fault("the devices", lambda: self._fault)

    def __repr__(self) -> str:
        return f"DeviceWatch(lost {sorted(self._lost)}, {self._affected})"

    def _stalled_s(self, copies: CopyEngines, number: int, now_s: float) -> float:
        return max(copies.stalled_s_on(number, now_s), self._devices.stalled_s(number, now_s))

    def look(self) -> None:
        """After each `Health.check`."""
        engines, problems = self._devices.engines, self._health.partial_problems()
        troubles = {
            number: problems[device_name(number)]
            for number in engines
            if device_name(number) in problems
        }
        self._devices.troubles = troubles
        lost = {number for number, engine in engines.items() if engine.problem}
        if lost - self._lost:
            self._probe(set(engines) - lost)
        self._lost = lost
        users = []
        for session in self._sessions:
            if session.memory is not None and not session.closing:
                used = {device for device, _ in session.memory.allocations}
                users.append((session.record.engine_id, used))
                if gone := used & lost:
                    session.end(_lost_error(engines[min(gone)].problem))
        everywhere = [engine.problem for engine in engines.values() if engine.all_are_lost]
        restarts = self._affected.look(troubles.keys(), users) or everywhere
        self._fault = "; ".join(troubles.values() or everywhere) if restarts else ""

    def _probe(self, others: Iterable[int]) -> None:
        for number in others:
            pool = self._devices.pool([number])
            assert pool is not None, "a device with a copy engine has a thread"
            pool.submit(self._devices.engines[number].probe)


def device_name(number: int) -> str:
    return f"device {number}"


def _lost_error(why: str) -> HotKVError:
    return HotKVError(
        Reason.INVALID_LAYOUT,
        f"layout.handles: {why}; engines on this device compute without the cache until the "
        "server restarts",
    )
