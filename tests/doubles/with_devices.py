"""Runs the real server with simulated GPUs: `python -m tests.doubles.with_devices ORDER run
FLAGS...`.

`ORDER` is a JSON object with the fields of `FakeDevices`. On the Unix socket `control`
(SOCK_SEQPACKET) the running server takes orders: `{"lose": 0}` loses device 0, `{"lose_after":
[0, 20]}` after 20 steps of its streams, `{"fail": ["open_memory", 1]}` fails the next call of a
method. Tests simulate engines with `FakeAllocation` and `FakeIpcEvent`.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hotkv_server.device import start as device_start
from tests.doubles import with_constants
from tests.doubles.device import FakeRuntime
from tests.doubles.off_loop import OffLoop, while_serving

MAX_ORDER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FakeDevices:
    """Further fields are arguments of `FakeRuntime`.

    register_s: time to register a piece of the arena.
    register_fails: number of the piece whose registration fails, from 1; 0: none.
    control: path of the socket for orders.
    """

    num_devices: int = 1
    seed: int = 0
    max_delay_s: float = 0.0
    register_s: float = 0.0
    register_fails: int = 0
    control: str = ""

    def command(self) -> list[str]:
        """The caller appends the server's flags."""
        return [
            sys.executable,
            "-m",
            "tests.doubles.with_devices",
            json.dumps(asdict(self)),
            "run",
            "--copy.cuda",
            "on",
        ]

    def tell(self, **order: Any) -> None:
        """Sends an order, such as `lose=0`, and waits until it is executed."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sender:
            sender.connect(self.control)
            sender.send(json.dumps(order).encode())
            sender.recv(1)


class _Runtime(FakeRuntime):
    """Each registration takes `register_s`."""

    register_s = 0.0

    def register(self, address: int, num_bytes: int) -> None:
        time.sleep(self.register_s)
        super().register(address, num_bytes)


@dataclass(slots=True)
class _Control:
    """Executes orders on a thread."""

    runtime: FakeRuntime
    orders: dict[str, Callable[[Any], None]] = field(init=False)

    def __post_init__(self) -> None:
        self.orders = {
            "lose": self.runtime.lose,
            "lose_after": lambda order: self.runtime.lose_after(*order),
            "fail": lambda order: self.runtime.fail_call(*order),
        }

    def listen(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        receiver.bind(path)
        receiver.listen()
        threading.Thread(
            target=self._take, args=(receiver,), name="hotkv-fake-control", daemon=True
        ).start()

    def _take(self, receiver: socket.socket) -> None:
        while True:
            sender, _ = receiver.accept()
            with sender:
                for name, order in json.loads(sender.recv(MAX_ORDER_BYTES)).items():
                    self.orders[name](order)


def main() -> int:
    made = FakeDevices(**json.loads(sys.argv[1]))

    def new_runtime() -> OffLoop:
        runtime = _Runtime(made.seed, num_devices=made.num_devices, max_delay_s=made.max_delay_s)
        runtime.register_s = made.register_s
        if made.register_fails:
            runtime.fail_call("register", made.register_fails)
        if made.control:
            _Control(runtime).listen(made.control)
        return while_serving(runtime)

    device_start.new_runtime = new_runtime
    return with_constants.run(sys.argv[2:])


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
