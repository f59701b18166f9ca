"""The report of devices for operators: bytes copied, the measured speed of each method, and what is
wrong."""

from hotkv_proto.v1 import admin_pb2
from hotkv_server.dataplane.cuda.lane import PAGEABLE
from hotkv_server.dataplane.cuda.values import CudaCopyFigures, Direction, Method
from hotkv_server.device.devices import Devices, uuid_text
from hotkv_server.device.runtime import DeviceInfo

DIRECTIONS = {
    Direction.LOAD: admin_pb2.COPY_DIRECTION_LOAD,
    Direction.STORE: admin_pb2.COPY_DIRECTION_STORE,
}
METHODS = {
    Method.MEMCPY.value: admin_pb2.COPY_METHOD_MEMCPY,
    Method.BATCH.value: admin_pb2.COPY_METHOD_BATCH,
    Method.KERNEL.value: admin_pb2.COPY_METHOD_KERNEL,
    Method.STAGED.value: admin_pb2.COPY_METHOD_STAGED,
    PAGEABLE: admin_pb2.COPY_METHOD_PAGEABLE,
}


def device_report(devices: Devices) -> admin_pb2.DeviceReport:
    """As it is now."""
    pinner = devices.pinner
    return admin_pb2.DeviceReport(
        devices=[_device(devices, info, figures) for info, figures in devices.figures()],
        why_none=devices.why_none,
        registered_byte_count=devices.pinned_bytes,
        registering_s=pinner.took_s if pinner is not None else 0.0,
        registering_error=pinner.error if pinner is not None else "",
        open_allocation_count=devices.num_open,
    )


def _device(devices: Devices, info: DeviceInfo, figures: CudaCopyFigures) -> admin_pb2.Device:
    calibration = devices.engines[info.number].calibration
    return admin_pb2.Device(
        number=info.number,
        uuid=uuid_text(info.uuid),
        name=info.name,
        pci_bus_id=info.pci_bus_id,
        numa_node=info.numa_node,
        problem=figures.problem,
        copies=[
            admin_pb2.DeviceCopies(
                direction=DIRECTIONS[moved.direction],
                method=METHODS[moved.method],
                byte_count=moved.num_bytes,
                piece_count=moved.num_pieces,
            )
            for moved in figures.moved
        ],
        queued_piece_count=figures.num_queued,
        flying_piece_count=figures.num_in_flight,
        failed_job_count=figures.num_failed,
        speeds=[
            admin_pb2.CopySpeed(
                direction=DIRECTIONS[direction],
                method=METHODS[method.value],
                page_byte_count=page_bytes,
                gb_per_s=speed,
            )
            for (direction, method, page_bytes), speed in (
                calibration.speeds.items() if calibration is not None else ()
            )
        ],
    )
