"""What differs between operating systems: locks, files, memory, processors, signals and terminals. Torch-free.

`posix` (Linux and macOS) and `windows` define the same functions; the names below are those of the current system.
"""

import sys

if sys.platform == "win32":
    from llamarium.system.windows import (
        STOP_SIGNALS,
        file_number,
        hide_from_others,
        lock,
        lock_path,
        memory,
        open_file,
        physical_cores,
        prepare_streams,
        processor_name,
        read_at,
        read_parts,
        remove_open,
        reserve,
        sync,
        usable_cpus,
        write_at,
        write_parts,
    )
else:
    from llamarium.system.posix import (
        STOP_SIGNALS,
        file_number,
        hide_from_others,
        lock,
        lock_path,
        memory,
        open_file,
        physical_cores,
        prepare_streams,
        processor_name,
        read_at,
        read_parts,
        remove_open,
        reserve,
        sync,
        usable_cpus,
        write_at,
        write_parts,
    )

__all__ = [
    "STOP_SIGNALS",
    "file_number",
    "hide_from_others",
    "lock",
    "lock_path",
    "memory",
    "open_file",
    "physical_cores",
    "prepare_streams",
    "processor_name",
    "read_at",
    "read_parts",
    "remove_open",
    "reserve",
    "sync",
    "usable_cpus",
    "write_at",
    "write_parts",
]
