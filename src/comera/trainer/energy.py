"""The energy of training in joules, by source: read from counters, or estimated from stated watts.

    cpu, memory      RAPL: the processor packages of the whole machine; its memory, where that has a counter of its own
    gpu              NVML: the GPU of each process
    cpu_estimated    core-seconds that the processes of the run used, times `EnergyConfig.cpu_watts`
    gpu_estimated    seconds of each process, times `EnergyConfig.gpu_watts`

It covers what the clock of a run covers: batches, steps and logging, but not evaluation, pruning or saving. Fans, disks
and losses of the power supply are in no source. The counters add up by themselves, so that nothing has to run between
two readings, and readings take less than a thousandth of the time.

Rejected: codecarbon 3.3, which reads the same counters. It starts two threads that sample power, takes 2.3 s to start,
replaces the settings of logging, and adds its guesses for unknown processors and memory to what was measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch

from comera.errors import check_fields

SOURCES = ("cpu", "memory", "gpu", "cpu_estimated", "gpu_estimated")
JOULES_PER_KWH = 3.6e6
RAPL = Path("/sys/class/powercap")
_COST = 1000  # at least this many times as long between two readings as a reading takes
_LONGEST = 60.0  # seconds between two readings: RAPL's counters wrap around after minutes at full power


@dataclass(frozen=True)
class EnergyConfig:
    """How a run's energy is estimated where no counter can be read, and what its electricity emits.

    Changes nothing that a run learns. Raises ConfigError for a value out of range.

    Example:
        >>> from comera.trainer import TrainConfig
        >>> from comera.trainer.energy import EnergyConfig
        >>> TrainConfig(steps=10, energy=EnergyConfig(grid_intensity=50)).energy
        EnergyConfig(cpu_watts=12.0, gpu_watts=None, grid_intensity=50)
    """

    cpu_watts: float = 12.0
    """Watts of a busy processor core, where RAPL cannot be read. Default: that of Green Algorithms for an unknown
    processor (doi:10.1002/advs.202100707)."""
    gpu_watts: float | None = None
    """Watts of a GPU, where NVML cannot be read. Default: unknown, and so is the run's energy."""
    grid_intensity: float | None = None
    """Grams of CO2 equivalent per kWh of electricity, for the run's emissions. Default: unknown, and so are they."""

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in ("cpu_watts", "gpu_watts", "grid_intensity")}
        checks = {name: (value is None or 0 <= value < inf, "a number >= 0") for name, value in values.items()}
        check_fields(self, "train.energy.", checks)


class EnergyMeter:
    """Counts the energy of this process's share of a run while started.

    One process of a machine reads RAPL (`reads_cpu`), each process reads NVML for its own GPU, and each one estimates
    for itself. `basis` says in words where each source comes from, `unknown` why there are none: a sum without the GPU
    that trains would mislead.
    """

    def __init__(
        self, config: EnergyConfig, device: torch.device, *, reads_cpu: bool = True, rapl: Path = RAPL
    ) -> None:
        self._config = config
        self._joules = dict.fromkeys(SOURCES, 0.0)
        self._counters: list[_Counter] = []
        self._watts: dict[str, float] = {}
        self._running = False
        self._next = 0.0  # when to read again
        self._times: dict[str, float] = {}
        self.basis: dict[str, str] = {}
        self.unknown = ""
        try:
            counters = _rapl_counters(rapl)
            self._counters = counters if reads_cpu else []
            self.basis |= {counter.source: "measured by RAPL, for the whole machine" for counter in counters}
        except (OSError, ValueError) as error:
            self._estimate("cpu", error)
        if device.type != "cpu":
            try:
                self._counters = [*self._counters, _nvml_counter(device)]
                self.basis["gpu"] = "measured by NVML"
            except Exception as error:  # pynvml is not installed, or one of its many errors
                self._estimate("gpu", error)

    def _estimate(self, part: str, reason: Exception) -> None:
        """Count a part by its watts from now on, or nothing at all where they are not known. reason: no counter."""
        watts = self._config.cpu_watts if part == "cpu" else self._config.gpu_watts
        why = str(reason) or type(reason).__name__
        if watts is None:
            self.unknown = f"no energy counter of the GPU ({why}): pip install 'comera[energy]', or set gpu_watts"
            return
        self._watts[f"{part}_estimated"] = watts
        unit = "busy core" if part == "cpu" else "GPU"
        self.basis[f"{part}_estimated"] = f"estimated as {watts:g} W per {unit}: no counter ({why})"

    def start(self) -> None:
        """Count from now on."""
        self._running = True
        self._read(count=False)

    def stop(self) -> None:
        """Count up to now."""
        self._read()
        self._running = False

    def take(self) -> dict[str, float]:
        """Joules by source since the last call; those of the last moments may come with the next one.

        Empty where they are unknown.
        """
        if self._running and time.perf_counter() >= self._next:
            self._read()
        taken = {} if self.unknown else {name: joules for name, joules in self._joules.items() if joules}
        self._joules = dict.fromkeys(SOURCES, 0.0)
        return taken

    def _read(self, *, count: bool = True) -> None:
        """Bring all sources up to date. count: add what has come, too."""
        began = time.perf_counter()
        for counter in list(self._counters):
            try:
                self._joules[counter.source] += counter.since_last() * count
            except Exception as error:  # a counter that has gone must not end a run
                self._counters = [other for other in self._counters if other.source != counter.source]
                if counter.source != "memory":
                    self._estimate(counter.source, error)
        now = {"cpu_estimated": time.process_time(), "gpu_estimated": time.perf_counter()}
        for source, watts in self._watts.items():
            self._joules[source] += watts * (now[source] - self._times.get(source, now[source])) * count
        self._times = now
        ended = time.perf_counter()
        self._next = ended + min(_COST * (ended - began), _LONGEST)


@dataclass
class _Counter:
    """A cumulative counter. unit: joules per count; largest: its highest value before 0, None if it never wraps."""

    source: str
    read: Callable[[], int]
    unit: float
    largest: int | None = None
    last: int = 0

    def __post_init__(self) -> None:
        self.last = self.read()

    def since_last(self) -> float:
        """Joules since the last call."""
        before, self.last = self.last, self.read()
        if self.last < before:  # wrapped around, or restarted from 0
            before -= before if self.largest is None else self.largest + 1
        return (self.last - before) * self.unit


def _rapl_counters(root: Path) -> list[_Counter]:
    """The counters of all packages, and of memory beside them. Raises OSError where they cannot be read.

    A package covers its cores and, on some machines, a platform covers its packages: neither is counted twice.
    """
    found = []
    for zone in sorted(root.glob("intel-rapl:*")):  # AMD's processors, too
        name = (zone / "name").read_text().strip()
        if name.startswith("package") or name == "dram":
            largest = int((zone / "max_energy_range_uj").read_text())
            source = "memory" if name == "dram" else "cpu"
            found.append(_Counter(source, partial(_count_in, zone / "energy_uj"), 1e-6, largest))
    if not any(counter.source == "cpu" for counter in found):
        raise FileNotFoundError(f"no RAPL in {root}")
    return found


def _count_in(file: Path) -> int:
    return int(file.read_text())


def _nvml_counter(device: torch.device) -> _Counter:
    """The counter of a CUDA device, in millijoules. Raises ImportError or an error of NVML where there is none."""
    import pynvml

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    handle: Any = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    return _Counter("gpu", lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)), 1e-3)


def total(joules: Mapping[str, float]) -> float | None:
    """The sum over sources, None without any."""
    return sum(joules.values()) if joules else None


def is_estimated(joules: Mapping[str, float]) -> bool:
    """Whether any of it is an estimate."""
    return any(name.endswith("_estimated") for name in joules)


def emissions(joules: Mapping[str, float], config: EnergyConfig) -> float | None:
    """Grams of CO2 equivalent, None where energy or grid intensity is unknown."""
    energy, intensity = total(joules), config.grid_intensity
    return None if energy is None or intensity is None else energy / JOULES_PER_KWH * intensity
