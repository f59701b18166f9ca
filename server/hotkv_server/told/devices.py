"""What is told of devices: bytes copied, the measured speed of each method, and what is wrong."""

from hotkv_server.dataplane.cuda.values import CudaCopyFigures
from hotkv_server.device.devices import Devices, uuid_text
from hotkv_server.device.runtime import DeviceInfo
from hotkv_server.node.topics import Figures


def device_figures(devices: Devices) -> Figures:
    """The GPUs, and the part of the arena that they reach. `why_none`: if there is no GPU;
    `registering_error`: why no more of the arena is registered, empty while it goes on and when all
    is."""
    pinner = devices.pinner
    return {
        "devices": [_device(devices, info, figures) for info, figures in devices.figures()],
        "why_none": devices.why_none,
        "registered_byte_count": devices.pinned_bytes,
        "registering_s": pinner.took_s if pinner is not None else 0.0,
        "registering_error": pinner.error if pinner is not None else "",
        "open_allocation_count": devices.num_open,
    }


def _device(devices: Devices, info: DeviceInfo, figures: CudaCopyFigures) -> Figures:
    calibration = devices.engines[info.number].calibration
    return {
        "number": info.number,
        "uuid": uuid_text(info.uuid),
        "name": info.name,
        "pci_bus_id": info.pci_bus_id,
        "numa_node": info.numa_node,
        "problem": figures.problem,
        "copies": [
            {
                "direction": moved.direction.value,
                "method": moved.method,
                "byte_count": moved.num_bytes,
                "piece_count": moved.num_pieces,
            }
            for moved in figures.moved
        ],
        "queued_piece_count": figures.num_queued,
        "flying_piece_count": figures.num_in_flight,
        "failed_job_count": figures.num_failed,
        "speeds": [
            {
                "direction": direction.value,
                "method": method.value,
                "page_byte_count": page_bytes,
                "gb_per_s": speed,
            }
            for (direction, method, page_bytes), speed in (
                calibration.speeds.items() if calibration is not None else ()
            )
        ],
    }
