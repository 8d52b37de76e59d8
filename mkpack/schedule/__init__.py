"""What one step does, as data: phases, the buffers between them, the order of the bytes, and what waits for what.

`ir` is the language. `cpu` says it for the CPU target, with `cpu_buffers` for sizes, and `cuda` for GPUs, with `shape`
for who has what and `cuda_step` and `cuda_decode` for the two kernels. `cost` counts bytes; `validate` proves a
schedule before anything is compiled, with `streams` for bytes, rings and budgets and `exchange` for words. codegen
writes order, barriers and sizes into model.h from here; `mkpack graph` shows it.
"""

from mkpack.schedule.cost import (
    KV_BYTES,
    bytes_per_step,
    distinct_experts,
    kv_element,
    phase_bytes,
    phases_of,
    step_bytes,
)
from mkpack.schedule.cpu import cpu_schedule, phases
from mkpack.schedule.cuda import cuda_phases, cuda_proofs, cuda_schedules
from mkpack.schedule.ir import Buffer, Exchange, Items, Phase, Schedule, Use, Wait
from mkpack.schedule.validate import check, validate

__all__ = [
    "KV_BYTES",
    "Buffer",
    "Exchange",
    "Items",
    "Phase",
    "Schedule",
    "Use",
    "Wait",
    "bytes_per_step",
    "check",
    "cpu_schedule",
    "cuda_phases",
    "cuda_proofs",
    "cuda_schedules",
    "distinct_experts",
    "kv_element",
    "phase_bytes",
    "phases",
    "phases_of",
    "step_bytes",
    "validate",
]
