"""What the benchmarks share in writing docs/measurements.md: the machine's flags, and a section each."""

from pathlib import Path

from cleave.figures import write_whole

EXTENSIONS = ("avx2", "fma", "f16c", "avx512", "amx")


def processor_flags(prefixes: tuple = EXTENSIONS) -> list:
    """The processor's vector and matrix extensions whose names begin so; [] where none are listed."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return [f for f in line.split(":", 1)[1].split() if f.startswith(prefixes)]
    return []


def replace_section(page: Path, begin: str, end: str, text: str) -> None:
    """Puts text, which holds both markers, in the place of what is between them; at the end of a page without."""
    old = page.read_text() if page.exists() else "# Measurements\n"
    if begin not in old:
        old = old.rstrip("\n") + f"\n\n{begin}\n{end}\n"
    before, _, rest = old.partition(begin)
    write_whole(page, before + text + rest.partition(end)[2])
