"""How the training-step benchmark measures, counts and reports, tiny on a CPU."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import points, precision, profile, roofline, syncs, tables
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.clock import quantile, timed
from benchmarks.gpu.measure import QUICK, Measured, Readings, measure, trained
from benchmarks.gpu.peers import Contender, Eager, Plain, contenders
from benchmarks.gpu.points import POINTS
from benchmarks.gpu.profile import Span
from benchmarks.gpu.step import Seen, Setting, fresh, worst_pixel
from torch import Tensor

import banach
from gpu_parts import (
    CPU,
    LOOSE,
    batch,
    one_thread,  # noqa: F401 - a fixture that every test here uses
    still,
)


def test_host_reads_are_counted() -> None:
    for name, reads in (("explicit", 0), ("unroll", 0)):
        assert syncs.host_syncs(still(name, LOOSE, depth=3), batch(), CPU) == reads
    plain = still("plain", LOOSE)
    assert syncs.host_syncs(plain, batch(), CPU) == plain.depth()


class FakeEvent:
    """A mark on a clock that goes on by one millisecond at each mark."""

    now = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.now += 1
        self.at = FakeEvent.now

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at - self.at


def test_on_a_gpu_only_the_ends_of_a_block_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append(FakeEvent.now))
    monkeypatch.setattr(FakeEvent, "now", 0)
    step = still("unroll", LOOSE, depth=2)
    seconds, seen = timed(step, iter([batch(0), batch(1), batch(2)]), torch.device("cuda"))
    assert seconds == [1e-3] * 3
    assert waits == [0, 4]
    assert len({id(one) for one in seen}) == 3
    assert all(one.read()[0] == 2 for one in seen)


def test_on_a_gpu_the_waits_that_pytorch_tells_of_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(Plain):
        def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
            warnings.warn(
                "Synchronization debug mode does not yet detect all synchronizing operations", stacklevel=1
            )
            for _ in range(3):
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            return images

    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    setting = Setting(LOOSE, "fp32", CPU)
    assert syncs.host_syncs(Waiting(fresh(setting), setting), batch(), torch.device("cuda")) == 3
    assert modes == ["warn", 0]


def test_the_worst_pixel() -> None:
    a = torch.zeros(2, 3, 2, 2)
    a[1, :, 0, 1] = torch.tensor([2.0, 3.0, 6.0])
    a[0, 0] = 6.9
    assert float(worst_pixel(a, torch.zeros_like(a))) == 7.0
    assert Seen(torch.tensor([2, 5]), residual=torch.tensor([0.1, 0.3])).read() == (5.0, pytest.approx(0.3))


class Fast(Eager):
    """A contender of one's own."""


class Sloppy(Eager):
    """In bf16 it does next to nothing, and misses eps."""

    def forward(self, images: Tensor) -> Tensor:
        if self.setting.precision == "fp32":
            return super().forward(images)
        output = self.net.S(self.net.R(self.start(v := self.net.Q(images)), v))
        self.seen = Seen(1, residual=10.0)
        return output


class Broken(Plain):
    def forward(self, images: Tensor) -> Tensor:
        raise RuntimeError("no such kernel\nand more")


def test_one_that_fails_or_is_missing_does_not_end_the_run() -> None:
    images = points.feed(LOOSE, CPU, many=3)
    chosen = [
        Contender("broken", Broken, "peer"),
        Contender("absent", Plain, "peer", missing=lambda: "it is not here"),
        Contender("fast", Fast, "ours", precisions=()),
        contenders()["plain"],
    ]
    done, notes = measure(trained(LOOSE, iter(images), CPU, QUICK), images, chosen, QUICK)
    assert [one.contender for one in done] == ["fast", "plain"]
    assert list(done[0].pilots) == ["fp32"]
    assert set(done[1].pilots) == {"fp32", "bf16"}
    assert "broken failed: RuntimeError: no such kernel" in notes
    assert "it is not here" in notes
    for one in done:
        assert one.steps == QUICK.blocks * QUICK.block
        assert 0 < one.ms_10 <= one.ms <= one.ms_90
        assert one.images_per_second == pytest.approx(1e3 * LOOSE.batch / one.ms)
        assert one.met == 1.0
        assert one.residual is not None
        assert one.residual <= LOOSE.eps
        assert one.passes == (one.depth + 1, 1)
        assert one.products == 0
        assert one.peak_bytes is None


def test_a_precision_that_misses_eps_is_not_the_best() -> None:
    images = points.feed(LOOSE, CPU, many=3)
    chosen = [Contender("sloppy", Sloppy, "ours")]
    (one,), _ = measure(trained(LOOSE, iter(images), CPU, QUICK), images, chosen, QUICK)
    assert one.precision == "fp32"
    assert one.pilots["bf16"]["met"] == 0
    assert one.met == 1.0


def test_readings_say_how_many_steps_met_eps() -> None:
    readings = Readings()
    readings.add([1.0] * 4, [Seen(3, residual=r) for r in (0.1, 0.2, 0.05, math.nan)])
    assert readings.met(0.1) == 0.5
    explicit = Readings()
    explicit.add([1.0], [Seen()])
    assert explicit.met(0.1) is None
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0], 0.1) == 1.0
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0], 0.9) == 9.0


def test_the_work_of_the_mnist_network_by_hand() -> None:
    """R: four convolutions 32 > 32 on 9x9 pixels; S: one 32 > 16 to 7x7, then 784 > 10."""
    n = 5
    counted = roofline.count(POINTS["mnist100"], batch=n)
    conv, linear = 2 * n * 81 * 9 * 32 * 32, 2 * n * 784 * 10
    assert counted.R.forward.flops == 4 * conv
    assert counted.R.backward.flops == 8 * conv
    assert counted.S.forward.flops == 2 * n * 49 * 9 * 32 * 16 + linear
    first = 2 * n * 784 * 9 * 16  # no gradient goes to the images
    assert counted.Q.backward.flops == first + 2 * (2 * n * 81 * 9 * 16 * 32)
    latent, weights = n * 32 * 81, 9 * 32 * 32 + 32
    assert counted.R.forward.fused_entries == 4 * (2 * latent + weights)
    assert counted.R.forward.entries == 4 * (2 * latent + weights) + 2 * 2 * latent  # and two batch norms
    assert counted.R.backward.entries == 2 * counted.R.forward.entries
    assert counted.parameters == 54_352


def test_the_floor_is_the_larger_of_two_times() -> None:
    counted = roofline.count(POINTS["mnist100"], batch=2)
    work = counted.step(4, 1)
    assert work.flops == sum(p.forward.flops + p.backward.flops for p in (counted.Q, counted.R, counted.S)) + 3 * (
        counted.R.forward.flops
    )
    moved = 2 * work.entries + 28 * counted.parameters
    slow_memory = roofline.floor(counted, roofline.Rates(1e6, {"bf16": 1e18}), "bf16", (4, 1))
    assert slow_memory.ms == pytest.approx(1e3 * moved / 1e6)
    assert slow_memory.bound == "bytes"
    slow_units = roofline.floor(counted, roofline.Rates(1e18, {"fp32": 1e6}), "fp32", (4, 1))
    assert slow_units.ms == pytest.approx(1e3 * work.flops / 1e6)
    assert slow_units.bound == "flops"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize64x64x64", "convolution"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688wgrad_optimized_tf32>", "convolution"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true>", "batch norm and reduction"),
        ("void at::native::batch_norm_collect_statistics_kernel<float>", "batch norm and reduction"),
        ("triton_poi_fused_add_leaky_relu_native_batch_norm_backward_3", "pointwise"),
        ("triton_red_fused_native_batch_norm_backward_1", "batch norm and reduction"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "pointwise"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copy"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>>", "optimizer"),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float>", "copy"),
        ("Memcpy DtoH (Device -> Pageable)", "copy"),
        ("iterate", "whole solve"),
        ("look", "convolution"),
        ("something_new", "other"),
    ],
)
def test_kernels_have_their_kinds(name: str, kind: str) -> None:
    assert profile.kind(name) == kind


def test_every_kernel_of_ours_has_a_kind() -> None:
    """Whatever the launches name."""
    folder = Path(banach.kernels.__file__).parent
    text = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    launched = set(re.findall(r"(\w+)\[\(", text))
    assert {"iterate", "look", "convolve"} <= launched
    assert launched <= set(profile.OWN)


def test_idle_is_what_no_kernel_covers() -> None:
    spans = [Span("gemm", 0, 10), Span("memcpy", 5, 10), Span("gemm", 30, 10), Span("gemm", 31, 2)]
    assert profile.union(spans) == 25
    seen = profile.summarise(spans, 50.0, 2, waits=Counter(cudaStreamSynchronize=4))
    assert seen.busy_ms == 0.0125
    assert seen.shares["idle"] == 0.5
    assert seen.kinds["convolution"] == pytest.approx(0.011)
    assert seen.top[0] == {"name": "gemm", "kind": "convolution", "ms": pytest.approx(0.011), "calls": 1.5}
    assert seen.waits == {"cudaStreamSynchronize": 2}


def test_a_missing_data_set_becomes_noise_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANACH_CACHE", str(tmp_path))
    monkeypatch.delenv("BANACH_DATA", raising=False)
    point = dataclasses.replace(POINTS["cifar512"], batch=4)
    images = points.feed(point, CPU, many=3)
    assert images.title == "random images (no CIFAR-10 found), augmented as in the paper"
    taken = [x for (x, _), _ in zip(images, range(4), strict=False)]
    assert taken[0].shape == (4, 3, 32, 32)
    assert torch.equal(taken[0], taken[3])
    assert points.feed(LOOSE, CPU, many=1).title == "digits (scikit-learn)"


def test_the_points_are_those_of_the_paper() -> None:
    absolute = [point for point in POINTS.values() if not point.relative]
    for point in absolute:
        assert (point.eps, point.max_steps) == (point.recipe.eps, point.recipe.max_steps)
        assert point.tolerance == point.recipe.tolerance
    (relative,) = (point for point in POINTS.values() if point.relative)
    assert (relative.tolerance.atol, relative.tolerance.rtol) == (0, 1e-2)
    assert [(p.batch, p.precision) for p in absolute] == [
        (100, "bf16"),
        (100, "fp32"),
        (100, "bf16"),
        (512, "bf16"),
    ]


def made(name: str, role: str, ms: float) -> Measured:
    return Measured(name, role, "bf16", ms, ms, ms, 50, 1.0, 1, 1, 4.0, 0.1, 0.9, 1, 0.0, (5.0, 1.0), 1.0, {})


def test_targets_are_held_against_the_best_peer_and_the_fast_twin() -> None:
    rows = [made("plain", "peer", 9.0), made("torchdeq", "peer", 8.0), made("unroll", "fixed", 1.0)]
    rows += [made("explicit-fast", "twin", 0.3), made("banach-fast", "ours", 0.4)]
    point, rates = POINTS["mnist100"], roofline.Rates(1e12, {"bf16": 1e14})
    settings = tables.Settings(point, QUICK, "images", True)
    counted = roofline.count(point, batch=1)
    found = {
        target.what: (target.measured, target.met)
        for target in tables.targets(tables.Outcome(settings, rows, [], counted, rates, "cuda"))
    }
    assert found["banach-fast, ms"] == (0.4, True)
    assert found["times faster than the best peer, torchdeq"] == (20.0, True)
    assert found["times as long as explicit-fast"] == (pytest.approx(4 / 3), True)
    assert found["banach-fast, share of steps that meet eps"] == (0.9, False)
    assert tables.targets(tables.Outcome(settings, rows, [], counted, rates, "cpu")) == []


def test_the_command_writes_a_table_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--device", "cpu", "--points", "mnist100", "--out", str(tmp_path)]
    assert main([*arguments, "--profile", "plain,explicit"]) == 0
    shown = capsys.readouterr().out
    assert "failed" not in shown
    assert max(map(len, shown.splitlines())) <= 120
    assert {file.name for file in tmp_path.iterdir()} == {
        "mnist100.json",
        "overview.json",
        "profile-mnist100.json",
    }
    written = json.loads((tmp_path / "mnist100.json").read_text())
    names = [name for name, one in contenders().items() if one.missing() is None]
    assert [row["contender"] for row in written["rows"]] == names
    assert [row["contender"] for row in written["measured"]] == names
    assert all(name in shown for name in names)
    for row in written["measured"]:
        assert row["ms"] > 0
        assert row["floor"]["bytes"] > row["floor"]["fused_bytes"] > 0
        assert row["times_floor"] == pytest.approx(row["ms"] / row["floor"]["ms"])
    assert written["rates"]["copy"] > 0
    assert written["provenance"]["settings"]["point"]["batch"] == 4
    assert "MNIST" in written["provenance"]["settings"]["images"]
    kinds = json.loads((tmp_path / "profile-mnist100.json").read_text())["profiles"]
    assert set(kinds) == {"plain", "explicit"}
    assert kinds["plain"]["shares"]["convolution"] > 0


def test_wrong_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, sentence in (
        (["--points", "mnist7"], "no point is called mnist7; there are mnist100"),
        (["--contenders", "plane"], "no contender is called plane; there are plain"),
        (["--data-dir", "/no/such"], "/no/such is not a folder"),
        (["--more", "--quick"], "--more measures at full size on a GPU"),
        (["--more", "--device", "cpu"], "--more measures at full size on a GPU"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert sentence in capsys.readouterr().err
    with pytest.raises(ValueError, match="got 'fp8'"), precision.switches("fp8", CPU):
        pass


def test_without_data_the_further_ones_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.gpu import more

    with pytest.raises(SystemExit) as ended:
        more.main(["epoch", "--data-dir", str(tmp_path / "none"), "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert "is not a folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_further_benchmarks_run_at_tiny_sizes(tmp_path: Path) -> None:
    """On a CPU their figures mean nothing; that they run, and what they report, is tested."""
    from benchmarks.gpu import curves, epoch, inference

    small = inference.Settings(
        model="digits", batches=(1, 3), repeats=2, precision="fp32", train_steps=2, device="cpu", compile=False
    )
    with pytest.warns(banach.ConvergenceWarning):  # bf16 cannot meet 1e-4
        predicted = inference.run(small)
    assert {row["path"] for row in predicted.rows} >= {"implicit, fast", "explicit, fast"}
    assert [target.what[-1] for target in predicted.targets] == ["1", "1"]
    with pytest.warns(banach.ConvergenceWarning):
        taken = epoch.run(epoch.Settings(batch=256, epochs=2, compile=False, model="digits", device="cpu"))
    assert [row["epoch"] for row in taken.rows] == [1, 2]
    assert taken.rows[1]["loss"] < taken.rows[0]["loss"]
    learned = curves.run(
        curves.Settings(model="digits", subset=100, epochs=2, seeds=(0, 1), precision="fp32", device="cpu"),
        tmp_path / "curves.png",
    )
    assert len(learned.rows) == 4
    assert learned.targets[0].measured < 1e-3  # on a CPU both ways are the plain one, but for the layout
    assert (tmp_path / "curves.png").exists()
