"""gRPC's health service (grpc.health.v1). A client that watches and does not read delays neither
the server nor other watchers.

The servicer of grpcio-health-checking would: it holds a lock while it writes to a watching
client, and needs it to record a change, so that systemd's watchdog would get no signal.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """States by service name; the empty name is the whole server. On the event loop only."""

    def __init__(self) -> None:
        self._states: dict[str, health_pb2.HealthCheckResponse.ServingStatus.ValueType] = {}
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"HealthService({self._states})"

    def set(self, serving: Mapping[str, bool]) -> None:
        kinds = health_pb2.HealthCheckResponse
        states = {
            name: kinds.SERVING if is_serving else kinds.NOT_SERVING
            for name, is_serving in serving.items()
        }
        if states != self._states:
            self._states, changed, self._changed = states, self._changed, asyncio.Event()
            changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        state = self._states.get(request.service)
        if state is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                "service is unknown; leave it empty for the server itself",
            )
        return health_pb2.HealthCheckResponse(status=state)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """A slow reader gets only the newest state."""
        told = None
        while True:
            changed, state = (
                self._changed,
                self._states.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN),
            )
            if state != told:
                told = state
                yield health_pb2.HealthCheckResponse(status=state)
            else:
                await changed.wait()
