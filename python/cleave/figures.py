"""What figures need beside the measurement: the machine they are of, and a file that is never half written."""

import os
import platform
from pathlib import Path


def machine() -> str:
    """Processor and core count."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores, {platform.system()}"


def write_whole(file: Path, text: str) -> None:
    """Writes a file completely or, as on a full disk, not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    try:
        part.write_text(text)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
