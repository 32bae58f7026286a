"""Memory and use of the GPUs of this machine, asked of the driver's own tool while the live page is open."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from miles.report.svg import Line, line_chart

EVERY_S = 2.0
KEPT = 900
IDLE_S = 30.0  # without a reader the driver is left alone
_FIELDS = ("memory.used", "memory.total", "utilization.gpu", "temperature.gpu")
_HUES = ("blue", "violet", "green", "amber", "teal", "rose", "grey")


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU at one time; numbers that the driver does not give (a GPU that shares the machine's memory) are None."""

    seconds: float
    gpu: int
    used_gb: float | None
    total_gb: float | None
    use_percent: float | None
    celsius: float | None


class GpuHistory:
    """Samples of the last half hour, taken only while somebody asks."""

    def __init__(self) -> None:
        self._tool = shutil.which("nvidia-smi")
        self._samples: deque[GpuSample] = deque(maxlen=KEPT)
        self._start = time.monotonic()
        self._asked = self._start
        self._thread: threading.Thread | None = None

    def samples(self) -> list[GpuSample]:
        self._asked = time.monotonic()
        if self._tool is not None and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._follow, name="gpu", daemon=True)
            self._thread.start()
        return list(self._samples)

    def _follow(self) -> None:
        while time.monotonic() - self._asked < IDLE_S:
            self._samples.extend(self._take())
            time.sleep(EVERY_S)

    def _take(self) -> list[GpuSample]:
        command = [str(self._tool), f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
        return parse(done.stdout, seconds=time.monotonic() - self._start) if done.returncode == 0 else []


def parse(text: str, *, seconds: float) -> list[GpuSample]:
    """The tool's lines, one per GPU: `1024, 81559, 37, 45`; `[N/A]` where the driver has no number."""
    samples = []
    for gpu, line in enumerate(filter(None, text.splitlines())):
        used, total, use, celsius = (_number(part) for part in line.split(","))
        samples.append(GpuSample(seconds, gpu, _gigabytes(used), _gigabytes(total), use, celsius))
    return samples


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _gigabytes(mebibytes: float | None) -> float | None:
    return None if mebibytes is None else mebibytes * 2**20 / 1e9


def gpu_charts(samples: Sequence[GpuSample]) -> str:
    """Memory and use over the last half hour as two charts, or a sentence when there is no GPU."""
    if not samples:
        return '<p class="none">no GPU answers on this machine</p>'
    gpus = sorted({sample.gpu for sample in samples})
    total = max((sample.total_gb for sample in samples if sample.total_gb is not None), default=None)
    memory, use = [], []
    for gpu in gpus:
        own = [sample for sample in samples if sample.gpu == gpu]
        hue = _HUES[gpu % len(_HUES)]
        used = [(sample.seconds, sample.used_gb) for sample in own if sample.used_gb is not None]
        percent = [(sample.seconds, sample.use_percent) for sample in own if sample.use_percent is not None]
        memory.append(Line(f"GPU {gpu}, GB", used, hue, smooth=False))
        use.append(Line(f"GPU {gpu}, %", percent, hue, smooth=False))
    newest = [sample for sample in samples if sample.seconds == samples[-1].seconds]
    heat = ", ".join(f"GPU {one.gpu} {one.celsius:g} C" for one in newest if one.celsius is not None)
    charts = [
        ("memory, GB" + (f" of {total:.0f}" if total else ""), line_chart(
            memory, title="GPU memory", width=420, height=150, y_low=0.0, y_high=total
        )),
        ("use, %", line_chart(use, title="GPU use", width=420, height=150, y_low=0.0, y_high=100.0)),
    ]  # fmt: skip
    figures = "".join(f'<figure style="margin:0"><h3>{title}</h3>{chart}</figure>' for title, chart in charts)
    return f'<div class="grid2">{figures}</div><p class="small soft">{heat}; seconds since the page was started</p>'
