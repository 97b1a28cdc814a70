"""Studies of trainings, their values by hand, and the report."""

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from banach import Neumann, models
from banach.train import Epoch
from reproduction import accelerate, contraction, jobs, neumann, rivals, rundir, study, table1, table2, train
from reproduction.__main__ import _modules, main
from reproduction.study import Options, percent
from reproduction.trainings import Point, Totals, Training, trained

ROOT = Path(__file__).parents[2]


def training(job: str, accuracy: float, seconds: float = 1.0, **changes: Any) -> Training:
    """A training that evaluated its last three of 100 epochs; the released protocol is two points worse."""
    data = next(name for name in ("mnist", "svhn", "cifar10", "digits") if name in job)
    settings = {"data": data, "model": data, "recipe": "released", "epochs": 100, "subset": None, "whole": True}
    settings |= {"batch_size": 100, "schedule": "constant"}
    points = [Point(epoch=97 + k, clean=Totals(accuracy=accuracy - (3 - k) / 10)) for k in (1, 2, 3)]
    points = [replace(p, released=Totals(accuracy=p.clean.accuracy - 0.02)) for p in points]
    times = (9.0, seconds, seconds)
    blank = {field.name: None for field in fields(Epoch)} | {"loss": 1.0, "products": 0, "converged": 1.0}
    epochs = [Epoch(**blank | {"epoch": k, "seconds": t, "warm_up": k == 1}) for k, t in enumerate(times, 1)]  # type: ignore[arg-type]
    made = Training(
        job=job,
        settings=settings,
        segments=({"device": "cpu", "torch": "2", "commit": "abc"},),
        final=Point(test=data, parameters=1, clean=Totals(accuracy=accuracy, depth=4.0)),
        test=tuple(points),
        epochs=tuple(epochs),
    )
    return replace(made, **changes)


def reaching(one: Training, epochs: int, **changes: Any) -> Training:
    """The same training with a last epoch of that number."""
    points = [replace(p, epoch=p.epoch - one.reached + epochs) for p in one.test]
    return replace(one, test=tuple(points), **changes)


def test_the_longest_runs_of_a_group_are_judged_and_reruns_of_a_seed_are_averaged() -> None:
    rows = [training(f"mnist-jfb-seed{s}", 0.993 + s / 1000) for s in range(3)]
    rows += [training("table1-mnist-jfb-seed0", 0.994), reaching(training("mnist-jfb-seed9", 0.5), 40)]
    rows += [training(f"mnist-twin-seed{s}", 0.99 + s / 1000) for s in range(3)]
    found = table1.values(rows)
    assert str(found["mnist-jfb"]) == "99.4 | 99.42 ± 0.19 | 3 | 100 of 100 epochs | reproduced"
    assert found["mnist-jfb.released"].verdict == "not reproduced"
    assert found["mnist-gain"].ours.startswith("+0.32 ± ")
    assert found["mnist-gain"].verdict == "reproduced"
    assert found["mnist-jfb.minutes"] == pytest.approx(3 / 60), "three epochs of a second"
    assert (found["mnist-jfb.peak_epoch"], found["mnist-jfb.protocols"]) == (100, "-2.00 ± 0.00")
    assert found["svhn-jfb"].verdict == "untested"
    assert [found[f"{data}-gain"].paper for data in ("mnist", "svhn", "cifar10")] == ["+0.0", "+0.4", "+0.7"]
    in_work = replace(training("mnist-jfb-seed9", 0.5), final=None)
    assert str(table1.values([*rows, in_work])["mnist-jfb"]) == str(found["mnist-jfb"]), "nor with a run in work"
    assert "| 40 of 100 epochs | 99.4 | 50.00 (n = 1) |" in found["table"]
    assert found["mnist-jfb.released"].ours == "97.42 ± 0.19"
    assert table1.values([*rows[:4], reaching(rows[-1], 40)])["mnist-gain"].ours == "-", "never short against full"
    assert table1.values([reaching(row, 40) for row in rows])["mnist-jfb"].verdict == "untested"
    assert found["mnist-jfb.best"] == pytest.approx(99.5)
    ours = table1.values([training(f"svhn-jfb-decayed-seed{s}", 0.96) for s in range(3)])
    assert (ours["svhn-jfb-decayed"].verdict, ours["svhn-jfb"].verdict) == ("-", "untested"), "not the paper's"


def test_the_finer_accuracy_averages_reruns_too_and_an_unknown_residual_is_the_largest() -> None:
    rows = []
    for number, prefix in enumerate(("", "table1-", "")):
        one = training(f"{prefix}mnist-jfb-seed{number // 2}", 0.99 + number / 1000)
        clean = replace(one.scores, max_residual=(0.1, math.nan, 0.2)[number], converged=0.9999)
        rows.append(replace(one, final=Point(clean=clean, fine=clean, test="MNIST")))
    for some in (rows, rows[::-1]):
        (line,) = table1.values(some)["table"].splitlines()[2:]
        assert "| 99.12 ± 0.95 (n = 2) | 99.12 ± 0.95 (n = 2) |" in line
        assert "| 99.99% | nan |" in line


def test_few_seeds_and_runs_in_work_decide_nothing() -> None:
    rows = [training("mnist-jfb-seed0", 0.994), training("table1-mnist-jfb-seed0", 0.994)]
    rows.append(replace(rows[0], job="mnist-jfb-seed1"))
    assert table1.values(rows[:1])["mnist-jfb"].verdict == "untested (one seed, full length)"
    assert table1.values(rows)["mnist-jfb"].verdict == "untested (two seeds, full length)", "three runs"
    in_work = [reaching(training(f"mnist-jfb-seed{s}", 0.994), 60, final=None) for s in range(3)]
    found = table1.values([*in_work, *(training(f"mnist-twin-seed{s}", 0.99) for s in range(3))])
    assert found["mnist-jfb"].length == "60 of 100 epochs, in work"
    assert (found["mnist-jfb"].verdict, found["mnist-gain"].verdict) == ("untested", "untested")


def test_the_pair_of_the_second_table_by_hand() -> None:
    rows = [training(f"table2-mnist-jfb-pair-seed{s}", 0.99, 2.0) for s in (2, 1, 0)]
    rows += [training(f"table2-mnist-cg-pair-seed{s}", 0.98 + s / 1000, 6.0 + s) for s in range(4)]
    found = table2.values(rows)
    assert str(found["mnist"]) == "1.6 | 3.50 ± 1.24 | 3 | 3 epochs, 60,000 images | reproduced"
    assert found["mnist.gain"].ours.startswith("+0.90 ± "), "JFB minus CG"
    assert found["mnist.gain"].verdict == "untested"  # a short training decides nothing about accuracy
    assert "| MNIST | 1.6 | 3.50 ± 1.24 | 3 | 99.00 ± 0.00 |" in found["table"]
    assert found["svhn"].verdict == "untested"
    earlier = [replace(row, job=row.job.replace("-pair-", "-captured-plain-")) for row in rows]
    again = table2.values(earlier)["mnist"]
    assert (again.ours, again.verdict) == (found["mnist"].ours, "untested"), "its CG has a number of steps of ours"
    in_work = [replace(row, final=None) if "-cg-" in row.job else row for row in rows]
    assert table2.values(in_work)["mnist.gain"].ours == "-", "a run in work is not compared with a finished one"
    assert table2.PAPER["cifar10"] == pytest.approx(3.62, abs=0.01)


def test_images_held_out_for_validation_are_not_training_images() -> None:
    one = training("accelerate-svhn-picard-seed0", 0.9)
    assert replace(one, settings={**one.settings, "whole": False}).images == 68_257
    assert one.images == 73_257


def test_shares_and_seconds_of_a_training() -> None:
    assert percent([1.0, 0.99999]) == "99.99%", "a share below one is never shown as all"
    assert (percent([1.0, None]), percent([])) == ("100%", "-")
    one = training("table2-mnist-cg-pair-seed0", 0.9, 2.0)
    counts = {"adjoint CONVERGED": 20, "adjoint MAX_STEPS": 10}, {"adjoint CONVERGED": 10}
    segments = *({"counts": some} for some in counts), one.segments[0]
    found = table2.values([replace(one, job="table2-svhn-cg-trained-bn-seed0", segments=segments), one])
    assert (found["svhn.trained-bn"], found["mnist.trained-bn"]) == ("75.00%", "untested")  # over all segments
    assert one.elapsed == [2.0, 4.0, 6.0]  # the first epoch counts like the others
    reached = zip(one.epochs, (0.5, 0.7, 0.9), (10.0, 8.0, 6.0), strict=True)
    epochs = tuple(replace(epoch, validation_accuracy=a, depth=depth) for epoch, a, depth in reached)
    picard = replace(one, job="accelerate-mnist-picard-seed0", epochs=epochs)
    assert accelerate.spent(picard, 0.7) == (18.0, 4.0)
    deeper = [replace(epoch, depth=2 * (epoch.depth or 0)) for epoch in epochs]
    others = [
        replace(picard, job=f"accelerate-mnist-{s}-seed0", epochs=tuple(deeper)) for s in ("anderson", "broyden")
    ]
    assert accelerate.values([picard, *others])["mnist.anderson.iterations"] == 2


def test_the_monitor_counts_images_and_batches() -> None:
    def line(epoch: int, sigma: list[float]) -> dict[str, Any]:
        over = sum(x >= 1 for x in sigma)
        found = {"sigma": sigma, "rate": [0.5, "nan"], "violations": over}
        return {"epoch": epoch, "images": 2, "eval": found, "train": {"sigma": [max(sigma)]}}

    measured = training("svhn-jfb-seed0", 0.9, contraction=(line(1, [0.5, 0.9]), line(3, [0.9, 1.2])))
    found = contraction.values([measured, training("svhn-jfb-seed1", 0.9)])
    assert str(found["claim"]) == "always | 3 of 4 | 1 | over training | not reproduced"
    assert (found["highest"], found["rate"], found["batches_fired"], found["batches"]) == (1.2, 0.5, 1, 2)
    assert found["last"] == 3, "one of two images still contracts there"
    assert (
        contraction.values([replace(measured, contraction=(line(1, [0.5, 1.0]), line(3, [1.0, 1.2])))])["last"]
        == 1
    )


def test_a_ratio_whose_interval_contains_one_is_not_faster() -> None:
    rows = [training(f"neumann-mnist-k{k}-seed{s}", 0.99, 1 + k * s / 100) for k in (0, 1) for s in range(3)]
    assert str(neumann.values(rows)["mnist"]) == "> 1 | 1.01 ± 0.02 | 3 | 3 epochs, 60,000 images | undecided"
    rows = [training(f"neumann-mnist-k{k}-seed{s}", 0.99, 1 + k) for k in (0, 1) for s in range(3)]
    assert neumann.values(rows)["mnist"].verdict == "reproduced"
    assert neumann.values([row for row in rows if "-k0-" in row.job])["mnist"].verdict == "untested", "no order"


def test_rows_of_the_other_networks_come_with_their_runs() -> None:
    assert "(no records)" in rivals.values([])["table"]
    rows = [training(f"mnist-mon-{kind}-seed{s}", 0.99) for kind in ("jfb", "exact") for s in range(3)]
    found = rivals.values(rows)
    assert "| MNIST | mon | exact | 100 | 99.00 ± 0.00 (n = 3) | 99.2 | 99.1 |" in found["table"]
    in_work = replace(training("mnist-mon-exact-seed9", 0.5), final=None)
    assert rivals.values([*rows, in_work])["table"] == found["table"]
    rows += [training(f"mnist-mon-neumann2-seed{s}", 0.98) for s in range(3)]
    lines = rivals.values(rows)["gains"].splitlines()[2:]
    assert [line.split(" | ")[1:] for line in lines] == [
        ["JFB", "99.00 ± 0.00 (n = 3)", "99.00 ± 0.00 (n = 3)", "+0.00 ± 0.00 |"],
        ["Neumann(2)", "98.00 ± 0.00 (n = 3)", "99.00 ± 0.00 (n = 3)", "-1.00 ± 0.00 |"],
    ]
    assert table1.values(rows)["mnist-mon-exact"].ours == "99.00 ± 0.00"


def test_figures_draw_runs_that_can_be_compared_and_name_their_axes() -> None:
    rows = [training(f"cifar10-{kind}-seed0", 0.9) for kind in ("jfb", "twin")]
    full, short = (reaching(row, 1000) for row in rows), reaching(rows[1], 20)
    jfb, twin = full
    for drawn, wanted in (((jfb, twin), 3), ((jfb, short), 2), ((reaching(jfb, 20), short), 3)):
        (axes,) = table1.figures(drawn)["table1"].axes  # the last line is the printed value
        assert len(axes.get_lines()) == wanted
        assert axes.get_lines()[0].get_color() == study.COLORS[0], "JFB is blue everywhere"
        assert axes.get_xlabel()
        assert axes.get_ylabel()
    done = training("mnist-mon-exact-seed0", 0.99)
    runs = [training("mnist-mon-jfb-seed0", 0.99), done, replace(reaching(done, 9), final=None)]
    (axes,) = rivals.figures(runs)["rivals"].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["JFB (n = 1)", "exact gradient (n = 1)"]
    assert axes.get_xlabel() == "epoch", "the runs shared a GPU"


@pytest.mark.parametrize("order", [0, 1, 5])
def test_an_order_of_the_study_is_the_neumann_series(order: int) -> None:
    """By products with J' at the fixed point, against plain autograd through further evaluations of T."""
    gradients = []
    for mode in (jobs.neumann(order), Neumann(order)):
        torch.manual_seed(0)
        net: Any = models.build("digits", backward=mode).double().eval()
        d = torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        gradients.append(torch.autograd.grad(net(d).square().sum(), list(net.parameters())))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_jobs_differ_in_what_their_names_say() -> None:
    known = jobs.by_name()
    jfb, cg = (known[f"table2-svhn-{kind}-pair-seed1"] for kind in ("jfb", "cg"))
    assert replace(cg, name=jfb.name, backward=jfb.backward) == jfb
    assert (cg.settings.epochs, cg.settings.batch_norm, cg.settings.subset) == (5, False, None)
    mode: Any = known["table2-mnist-cg-pair-seed0"].backward
    assert (mode.tolerance.rtol, mode.tolerance.max_steps) == (1e-3, 50)  # the cap of the forward pass
    assert not mode.syncs_with_host, "a report would keep the step from being captured"
    late = known["table2-cifar10-cg-trained-bn-seed0"]
    assert late.after is not None
    assert late.after.name == "cifar10-jfb-seed0"
    assert late.settings.batch_norm
    counting: Any = known["table2-digits-cg-trained-bn-seed0"].build()
    assert isinstance(counting.backward.report, jobs.Adjoints)
    for name, wanted in (
        ("mnist-mon-exact-seed0", ("implicit:picard:1e-2:300", None, 40)),
        ("mnist-mon-jfb-seed2", ("jfb", None, 40)),
        ("cifar10-mdeq-tiny-exact-seed0", ("implicit:broyden:1e-3:20", "none", 50)),
        ("cifar10-mon-large-jfb-seed0", ("jfb", "flip+crop:4", 65)),
        ("mnist-mnist-twin-common-seed0", (None, None, 20)),
    ):
        chosen = known[name].settings
        assert (chosen.backward, chosen.augment, chosen.epochs) == wanted, name


def shortened(job: jobs.Job, name: str) -> jobs.Job:
    return replace(job, name=name, settings=replace(job.settings, epochs=1, subset=64))


def test_a_study_trains_what_is_missing_and_reads_the_rest(tmp_path: Path) -> None:
    said: list[str] = []
    options = Options(quick=True, device="cpu", records=tmp_path, runs=tmp_path / "runs", say=said.append)
    few = [shortened(job, job.name) for job in neumann.QUICK[:2]]
    rows = trained([], few, options)
    assert [row.group for row in rows] == ["neumann-digits-k0", "neumann-digits-k1"]
    said.clear()
    assert trained([], few, options) == rows
    assert not said, "nothing is trained again"
    assert study.read(Training, tmp_path / "neumann.jsonl") == rows
    assert set(neumann.figures(rows)) == {"neumann"}


def test_a_job_goes_on_from_the_weights_of_another(tmp_path: Path) -> None:
    before = shortened(neumann.QUICK[0], "before-seed0")
    after = replace(before, name="after-seed0", after=before)
    trainer = train.Trainer(after, Options(device="cpu", runs=tmp_path, say=lambda line: None))
    trainer.net = after.build()
    trainer._take_weights()
    weights = load_file(rundir.snapshot(tmp_path / "before-seed0", 1))
    assert all(torch.equal(value, weights[name]) for name, value in trainer.net.state_dict().items())


def test_a_report_can_be_made_of_one_run_and_is_not_made_of_none(tmp_path: Path, capsys: Any) -> None:
    """The first was refused, since a page names other runs; the second replaced all pages by "not run"."""
    (tmp_path / "one").mkdir()
    for name, run in (("trainings", '{"job":"mnist-jfb-seed0"'), ("theory", '{"run":"theory-digits-jfb-seed0"')):
        lines = (ROOT / study.RESULTS / f"{name}.jsonl").read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.startswith(run)]
        assert kept
        (tmp_path / "one" / f"{name}.jsonl").write_text("".join(kept))
    assert main(["report", "--records", str(tmp_path / "one"), "--docs", str(tmp_path / "docs")]) == 0
    text = (tmp_path / "docs/reproduction.md").read_text()
    assert "| 99.4 | 99.36 | 1 | 100 of 100 epochs | untested (one seed, full length) |" in text
    assert "nan" not in text
    assert main(["report", "--records", str(tmp_path / "no"), "--docs", str(tmp_path / "docs")]) == 2
    assert f"in the folder {tmp_path / 'no'}" in capsys.readouterr().err
    assert (tmp_path / "docs/reproduction.md").read_text() == text


@pytest.mark.parametrize("device", ["cuda:7", "zzz"])
def test_a_study_is_refused_a_device_before_it_begins(device: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["memory", "--quick", "--device", device, "--records", str(tmp_path)]) == 2
    assert device in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_everything_runs_quickly_on_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["all", "--quick"]) == 0
    page = Path("runs/quick/docs/reproduction.md").read_text()
    assert all(f"## {name}\n\nThe claim: " in page for name in _modules())
    assert "decide no claim of the paper" in page
    assert Path("runs/quick/docs/reproduction/table1.svg").exists()


def test_the_committed_pages_are_what_the_records_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte; figures too."""
    monkeypatch.chdir(ROOT)
    assert main(["report", "--docs", str(tmp_path)]) == 0
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    kept = [ROOT / "docs/reproduction.md", *sorted((ROOT / "docs/reproduction").iterdir())]
    assert set(made) == {path.relative_to(ROOT / "docs") for path in kept}
    for path in kept:
        assert made[path.relative_to(ROOT / "docs")] == path.read_bytes(), path.name
    text, page = made[Path("reproduction.md")].decode(), made[Path("reproduction/report.html")].decode()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 4000
    assert "{" not in text
    named = set(re.findall(r'src="([^"]+)"', page))
    assert named == {path.name for path in made if path.suffix == ".svg"}, "every figure is shown, and exists"
    assert all(f'<section id="{name}">' in page for name in re.findall(r'href="#([^"]+)"', page))


def test_the_first_table_has_the_parameters_of_the_networks() -> None:
    page = (ROOT / "reproduction" / "pages" / "reproduction.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| ([\d,]+) \| \{table1\.([^.]+)\.paper\}", page)
    assert len(rows) == 17
    for count, group in rows:
        net = jobs.get(f"{group}-seed0").build()
        assert f"{sum(weight.numel() for weight in net.parameters()):,}" == count, group
