"""The energy meter: counters that wrap around or go away, estimates, and runs that are resumed."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from comera.errors import ConfigError
from comera.trainer.config import TrainConfig
from comera.trainer.energy import EnergyConfig, EnergyMeter, emissions, is_estimated, total
from comera.trainer.loop import fit
from comera.trainer.metrics import Summary
from comera.trainer.task import Task

from ...helpers.run_folders import records
from .test_loop import CONFIG, Tiny

CPU = torch.device("cpu")
RANGE = 1_000_000


def zone(root: Path, place: str, name: str, microjoules: int) -> Path:
    folder = root / place
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


@pytest.fixture
def rapl(tmp_path: Path) -> Path:
    """Two packages, of which one has cores and memory, the platform around them, and a second view of a package."""
    for place, name in {
        "intel-rapl:0": "package-0",
        "intel-rapl:0:0": "core",
        "intel-rapl:0:1": "dram",
        "intel-rapl:1": "package-1",
        "intel-rapl:2": "psys",
        "intel-rapl-mmio:0": "package-0",
    }.items():
        zone(tmp_path, place, name, 500_000)
    return tmp_path


def advance(rapl: Path, microjoules: int, *places: str) -> None:
    for place in places or [path.name for path in rapl.iterdir()]:
        file = rapl / place / "energy_uj"
        file.write_text(str((int(file.read_text()) + microjoules) % (RANGE + 1)))


def taken(meter: EnergyMeter) -> dict[str, float]:
    meter.stop()
    joules = meter.take()
    meter.start()
    return joules


def test_packages_and_memory_are_counted_once(rapl: Path) -> None:
    meter = EnergyMeter(EnergyConfig(), CPU, rapl=rapl)
    advance(rapl, 1000)  # before the start
    meter.start()
    advance(rapl, 200_000)
    assert taken(meter) == pytest.approx({"cpu": 0.4, "memory": 0.2})
    assert taken(meter) == {}
    assert set(meter.basis) == {"cpu", "memory"}
    assert not is_estimated({"cpu": 1.0})


def test_a_counter_that_wraps_around_loses_nothing(rapl: Path) -> None:
    meter = EnergyMeter(EnergyConfig(), CPU, rapl=rapl)
    meter.start()
    joules = []
    for _ in range(7):
        advance(rapl, 300_000, "intel-rapl:0")
        joules.append(taken(meter)["cpu"])
    assert joules == pytest.approx([0.3] * 7)


def test_what_happens_while_stopped_does_not_count(rapl: Path) -> None:
    meter = EnergyMeter(EnergyConfig(), CPU, rapl=rapl)
    meter.start()
    meter.stop()
    advance(rapl, 300_000)
    assert meter.take() == {}
    meter.start()
    advance(rapl, 100_000)
    assert taken(meter) == pytest.approx({"cpu": 0.2, "memory": 0.1})


def test_only_one_process_of_a_machine_reads(rapl: Path) -> None:
    meter = EnergyMeter(EnergyConfig(), CPU, reads_cpu=False, rapl=rapl)
    meter.start()
    advance(rapl, 200_000)
    sum(range(100_000))
    assert taken(meter) == {}  # no estimate either: the other process measures


def test_readings_are_rare(rapl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = EnergyMeter(EnergyConfig(), CPU, rapl=rapl)
    reads = []
    read = meter._read
    monkeypatch.setattr(meter, "_read", lambda **options: (reads.append(1), read(**options)))
    meter.start()
    began = time.perf_counter()
    while time.perf_counter() < began + 0.2:
        meter.take()
    assert len(reads) < 20


def test_a_counter_that_goes_away_becomes_an_estimate(rapl: Path) -> None:
    meter = EnergyMeter(EnergyConfig(cpu_watts=100), CPU, rapl=rapl)
    meter.start()
    advance(rapl, 100_000)
    assert set(taken(meter)) == {"cpu", "memory"}
    (rapl / "intel-rapl:1" / "energy_uj").write_text("gone")
    advance(rapl, 100_000, "intel-rapl:0:1")
    taken(meter)
    began = time.process_time()
    sum(range(300_000))
    used = time.process_time() - began
    after = taken(meter)
    assert set(after) == {"cpu_estimated"}
    assert 100 * used <= after["cpu_estimated"] < 100 * used + 5
    assert "invalid literal" in meter.basis["cpu_estimated"]


@pytest.mark.parametrize("folder", ["nothing", "intel-rapl:0"])
def test_without_a_counter_busy_cores_are_estimated(tmp_path: Path, folder: str) -> None:
    zone(tmp_path / "only", "intel-rapl:0", "core", 5)
    meter = EnergyMeter(EnergyConfig(cpu_watts=50), CPU, reads_cpu=False, rapl=tmp_path / "only" / folder)
    meter.start()
    began = time.process_time()
    while time.process_time() < began + 0.1:
        pass
    time.sleep(0.1)  # an idle core does not count
    joules = taken(meter)
    assert 5 <= joules["cpu_estimated"] < 7.5
    assert is_estimated(joules)
    assert "50 W per busy core: no counter (no RAPL in" in meter.basis["cpu_estimated"]


class _Nvml(SimpleNamespace):
    """pynvml of a machine with one GPU, at `millijoules`."""

    millijoules = 1000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "handle of GPU-1234"
        return self.millijoules


def test_gpu_is_read_by_its_identity(rapl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = _Nvml(nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    meter = EnergyMeter(EnergyConfig(), torch.device("cuda", 0), rapl=rapl)
    meter.start()
    nvml.millijoules += 2500
    assert taken(meter) == {"gpu": 2.5}


def test_a_gpu_without_a_counter_leaves_the_sum_unknown(rapl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = EnergyMeter(EnergyConfig(), torch.device("cuda", 0), rapl=rapl)
    meter.start()
    advance(rapl, 100_000)
    assert taken(meter) == {}
    assert "pip install 'comera[energy]', or set gpu_watts" in meter.unknown
    stated = EnergyMeter(EnergyConfig(gpu_watts=1e6), torch.device("cuda", 0), rapl=rapl)
    stated.start()
    joules = taken(stated)
    assert (stated.unknown, set(joules)) == ("", {"gpu_estimated"})
    assert 0 < joules["gpu_estimated"] < 1e6


def test_emissions_follow_from_the_grid() -> None:
    joules = {"cpu": 1.8e6, "cpu_estimated": 1.8e6}
    assert total(joules) == 3.6e6
    assert total({}) is None
    assert emissions(joules, EnergyConfig(grid_intensity=50)) == 50
    assert emissions(joules, EnergyConfig()) is emissions({}, EnergyConfig(grid_intensity=50)) is None


@pytest.mark.parametrize("wrong", [{"cpu_watts": -1.0}, {"gpu_watts": float("inf")}, {"grid_intensity": float("nan")}])
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"train\.energy\.{next(iter(wrong))} must be a number >= 0, got"):
        EnergyConfig(**wrong)


ESTIMATING = replace(CONFIG, energy=EnergyConfig(cpu_watts=1000, grid_intensity=360))


def run(out: Path, task: Task, config: TrainConfig, *, resume: bool = False) -> Summary:
    return fit(task, config, out, resume=resume)


def test_a_run_states_its_energy_and_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.enumerate()
    summary = run(tmp_path / "run", Tiny(), ESTIMATING)
    assert threading.enumerate() == before
    (source, joules), *others = summary.energy.items()
    assert (source, others) == ("cpu_estimated", [])
    assert summary.co2 == pytest.approx(joules / 1e4)
    logged = [total(row["energy"]) or 0.0 for row in records(tmp_path / "run", "train")]
    assert logged == sorted(logged)
    assert logged[-1] <= joules
    assert Summary.read(tmp_path / "run" / "summary.json") == summary


def test_a_resumed_run_adds_the_energy_of_the_interrupted_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Tiny()
    monkeypatch.setattr(task, "after_step", lambda step: step == 6 and os.kill(os.getpid(), signal.SIGTERM))
    interrupted = run(tmp_path, task, ESTIMATING)
    assert (interrupted.steps, interrupted.finished) == (6, False)
    monkeypatch.setattr(EnergyMeter, "take", lambda self: {"cpu": 1e6})  # a million joules per reading from now on
    resumed = run(tmp_path, Tiny(), ESTIMATING, resume=True)
    assert resumed.steps == CONFIG.steps
    assert resumed.energy["cpu_estimated"] == interrupted.energy["cpu_estimated"]
    assert resumed.energy["cpu"] >= 6e6
    assert is_estimated(resumed.energy)
    entries = json.loads((tmp_path / "provenance.json").read_text())
    assert [entry["step"] for entry in entries] == [0, 6]
    assert "12 W" not in str(entries)
    assert "1000 W per busy core" in entries[0]["energy"]["cpu_estimated"]
