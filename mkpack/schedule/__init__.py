"""What one step does, as data: phases, the buffers between them, the order of the bytes, and what waits for what.

`ir` is the language, `cpu` says it for the CPU target, `cost` counts its bytes, `validate` proves it before anything is
compiled. codegen writes the order, the barriers and the buffer sizes into model.h from here; `mkpack graph` shows it.
"""

from mkpack.schedule.cost import KV_BYTES, bytes_per_step, distinct_experts, phase_bytes
from mkpack.schedule.cpu import cpu_schedule, phases
from mkpack.schedule.ir import Buffer, Items, Phase, Schedule, Use, Wait
from mkpack.schedule.validate import check, validate

__all__ = [
    "KV_BYTES",
    "Buffer",
    "Items",
    "Phase",
    "Schedule",
    "Use",
    "Wait",
    "bytes_per_step",
    "check",
    "cpu_schedule",
    "distinct_experts",
    "phase_bytes",
    "phases",
    "validate",
]
