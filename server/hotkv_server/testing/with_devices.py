"""A server with made-up devices: `python -m hotkv_server.testing.with_devices ORDER run FLAGS...`.

`ORDER` is a JSON object with the fields of `FakeDevices`. Its `control` is the path of a Unix
datagram socket for orders to the running server: `{"lose": 0}` loses a device, `{"lose_after": [0,
20]}` loses it in so many steps, `{"fail": ["open_memory", 1]}` makes the nth call of a method fail.
Engines in other processes take part with `FakeAllocation` and `FakeIpcEvent`. The rest is the real
server.
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

from hotkv_server import cli
from hotkv_server.device import start as device_start
from hotkv_server.testing.device import FakeRuntime

MAX_ORDER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FakeDevices:
    """The devices of a server; fields as in `FakeRuntime`.

    `register_s`: time to pin a piece.
    `register_fails`: number of the piece at which pinning fails; 0: pinning succeeds.
    """

    num_devices: int = 1
    seed: int = 0
    max_delay_s: float = 0.0
    register_s: float = 0.0
    register_fails: int = 0
    control: str = ""

    def command(self) -> list[str]:
        """Returns the command of a server with these devices, without its flags."""
        return [
            sys.executable,
            "-m",
            "hotkv_server.testing.with_devices",
            json.dumps(asdict(self)),
            "run",
            "--copy.cuda",
            "on",
        ]

    def tell(self, **order: Any) -> None:
        """Sends an order to the running server."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(json.dumps(order).encode(), self.control)


class _Runtime(FakeRuntime):
    """A runtime that takes `register_s` to pin memory."""

    register_s = 0.0

    def register(self, address: int, num_bytes: int, *, read_only: bool = False) -> None:
        time.sleep(self.register_s)
        super().register(address, num_bytes, read_only=read_only)


@dataclass(slots=True)
class _Control:
    """Receives orders on a thread."""

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
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        receiver.bind(path)
        threading.Thread(
            target=self._take, args=(receiver,), name="hotkv-fake-control", daemon=True
        ).start()

    def _take(self, receiver: socket.socket) -> None:
        while True:
            for name, order in json.loads(receiver.recv(MAX_ORDER_BYTES)).items():
                self.orders[name](order)


def main() -> int:
    """Runs `hotkv-server` with the devices. Returns the exit status."""
    made = FakeDevices(**json.loads(sys.argv[1]))

    def new_runtime() -> FakeRuntime:
        runtime = _Runtime(made.seed, num_devices=made.num_devices, max_delay_s=made.max_delay_s)
        runtime.register_s = made.register_s
        if made.register_fails:
            runtime.fail_call("register", made.register_fails)
        if made.control:
            _Control(runtime).listen(made.control)
        return runtime

    device_start.new_runtime = new_runtime
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
