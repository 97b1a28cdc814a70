"""The two tables: quick runs, their columns, and what they say against independent routes."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from banach import data, models
from banach.backward import JFB, Implicit, NormalCG
from banach.data import Crop
from banach.models import Cosine, Steps
from banach.paper import Options, common, table1, table2, table2_notes, table2_ways
from banach.paper.common import Subject, shortened
from banach.paper.headlines import headlines
from banach.paper.jobs import carry_out
from banach.paper.records import Record, record_of
from banach.paper.released import LEFT_OUT, ReleasedCG
from banach.provenance import Summary, plain
from banach.train import Settings

STEPS = "one by one"
TINY = Subject(data="digits", model="digits", epochs=1, subset=96, fast=False)


def options_in(folder: Path) -> Options:
    return Options(quick=True, device="cpu", out=folder / "out", runs=folder / "runs")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Options]:
    options = options_in(tmp_path_factory.mktemp("table1"))
    with pytest.MonkeyPatch.context() as patch:
        entries = tuple(replace(e, subject=replace(e.subject, epochs=1, subset=96)) for e in table1.QUICK)
        patch.setattr(table1, "QUICK", entries)
        return table1.run(options), options


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Options]:
    options = options_in(tmp_path_factory.mktemp("table2"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table2, "QUICK", (replace(TINY, seeds=2),))
        return table2.run(options), options


def row_of(found: Any, **wanted: Any) -> Any:
    (row,) = [row for row in found.rows if all(row.get(key) == value for key, value in wanted.items())]
    return row


def test_table1_has_its_columns_and_leaves_rivals_open(first: Any) -> None:
    found, _ = first
    promised = {"data", "method", "parameters", "paper %", "clean %", "eps", "residual", "clean % at 1e-4"}
    promised |= {"residual at 1e-4", "converged at 1e-4", "released %", "epochs", "seconds per epoch"}
    trained = [row for row in found.rows if row["clean %"] is not None]
    assert [row["method"] for row in trained] == ["JFB", table1.TWIN, "explicit: ResNet-56"]
    assert all(promised <= set(row) for row in trained)
    rivals = [row for row in found.rows if row["clean %"] is None]
    assert {row["method"] for row in rivals} >= {"Neural ODE", "monotone operator network", "multiscale DEQ"}
    assert all(row["paper %"] for row in rivals)


def test_table1_clean_accuracy_is_that_of_the_network_by_hand(first: Any) -> None:
    """Rebuild the network from its run, answer every test image in eval mode, and count."""
    found, options = first
    shares = []
    for seed in range(2):
        from safetensors.torch import load_file

        (path,) = (options.runs / f"table1-digits-jfb-seed{seed}" / "checkpoints").glob("*/tensors.safetensors")
        weights = {k.removeprefix("net."): v for k, v in load_file(path).items() if k.startswith("net.")}
        net = models.build("digits")
        net.load_state_dict(weights)
        test = data.load("digits", "test")
        with torch.no_grad():
            hits = net.eval()(test.normalise(test.pixels)).argmax(1) == test.labels
        shares.append(100 * float(hits.double().mean()))
    row = row_of(found, method="JFB")
    assert row["clean %"].mean == pytest.approx(sum(shares) / 2, abs=1e-9)
    assert row["clean %"].count == 2
    assert row["residual at 1e-4"].mean <= 1e-4
    assert row["converged at 1e-4"].mean == 1
    assert row["parameters"] == 17_986


def test_the_explicit_twin_has_no_residual_and_no_eps(first: Any) -> None:
    row = row_of(first[0], method=table1.TWIN)
    assert row["eps"] is row["residual"] is row["clean % at 1e-4"] is None
    assert isinstance(row["released %"], Summary)


def test_findings_are_written_and_read_back(first: Any) -> None:
    found, options = first
    found.write(options)
    content = json.loads((options.out / "table1.json").read_text())
    assert content["rows"][0]["clean %"]["count"] == 2
    assert content["quick"] is True
    assert content["figures"] == ["table1.png"]
    assert any("shortened: digits, JFB: 1 epochs instead of 20" in note for note in content["notes"])
    assert content["command"] == "banach paper table1 --quick --device cpu"
    assert any(note.startswith("trained on cpu: ") and note.endswith("(5)") for note in content["notes"])


def test_a_study_says_where_its_runs_were_begun_not_where_they_are_read(second: Any) -> None:
    found, options = second
    path = options.runs / "table2-digits-jfb-bn-seed0" / "environment.json"
    kept = path.read_text()
    path.write_text(json.dumps(json.loads(kept) | {"device": "cuda: elsewhere", "commit": "abc", "dirty": True}))
    try:
        said = common.trained_on(found.details, options)
        device = common.device_of("table2-digits-jfb-bn-seed0", options)
    finally:
        path.write_text(kept)
    assert said.startswith(
        f"trained on cuda: elsewhere, torch {torch.__version__}, commit abc with changes (1); cpu: "
    )
    assert said.endswith("(19)")
    assert device == "cuda: elsewhere"
    assert all(row["device"].startswith("cpu: ") for row in found.rows)  # as they were when it was made


def test_a_shortened_schedule_keeps_its_proportions() -> None:
    settings = Settings(epochs=1000, lr=1e-3, schedule=Steps(at=(200, 400, 600, 800), factor=0.5))
    short = shortened(settings, 60)
    for share in (0.1, 0.25, 0.45, 0.65, 0.95):
        there, here = (s.schedule.multiplier(share * s.epochs, s.epochs) for s in (settings, short))
        assert here == there
    assert short.epochs == 60


def test_rows_with_a_decaying_rate_change_the_rate_the_length_and_the_shifts_alone() -> None:
    decayed = {e.subject.data: e.jobs()[0] for e in table1.FULL if e.tag == "jfb-decayed"}
    plain = {e.subject.data: e.jobs()[0] for e in table1.FULL if e.tag == "jfb"}
    assert set(decayed) == {"mnist", "svhn"}
    for name, job in decayed.items():
        assert job.settings.schedule == Cosine()
        assert job.name == f"table1-{name}-jfb-decayed-seed0"
        of = plain[name].settings
        same = replace(job.settings, recipe=of.recipe, lr=of.lr, epochs=of.epochs, schedule=of.schedule)
        shifted = name == "svhn"
        assert replace(same, augment=of.augment) == of
        assert job.settings.augment == ("crop:2" if shifted else None)
        assert job.augment == (Crop(2) if shifted else None)
        assert job.tolerance == plain[name].tolerance


def test_all_training_images_are_used(tmp_path: Path) -> None:
    assert all(job.settings.whole for entry in table1.FULL for job in entry.jobs())
    job = replace(TINY, whole=True, subset=None).job("whole")
    outcome = carry_out(job, options_in(tmp_path))
    assert outcome.epochs[0].validation_accuracy is None
    trained, held = data.load("digits"), data.load("digits", "validation")
    images = len(trained) + len(held)
    assert f"({images}, 1, 8, 8)" in _identity(tmp_path / "runs" / job.name)["train"]


def _identity(run: Path) -> Any:
    (state,) = (run / "checkpoints").glob("*/state.json")
    return json.loads(state.read_text())["state"]["identity"]


def test_full_rows_are_the_papers() -> None:
    """The printed numbers, and settings as the notes on the released code have them."""
    jfb = {e.subject.data: e for e in table1.FULL if e.tag == "jfb"}
    assert {name: e.paper for name, e in jfb.items()} == {"mnist": 99.4, "svhn": 94.1, "cifar10": 93.7}
    job = jfb["cifar10"].jobs()[2]
    assert job.name == "table1-cifar10-jfb-seed2"
    assert (job.settings.seed, job.settings.precision, job.settings.epochs) == (2, "bf16", 20)
    assert job.settings.schedule == Steps(at=(4, 8, 12, 16), factor=0.5)
    assert job.augment is not None
    assert jfb["mnist"].jobs()[0].settings.lr == 2e-4
    assert {e.paper for e in table1.FULL if e.tag == "resnet56"} == {93.0}


def test_paper_ratios_are_the_printed_ones() -> None:
    ratios = [table2._printed_ratio(subject, table2_ways.CG_ABSOLUTE) for subject in table2.FULL]
    assert ratios == [1.6, 2.5, 3.6]


def test_cg_has_the_cap_of_the_forward_pass_and_both_tolerances() -> None:
    caps = []
    for subject in table2.FULL:
        for way in (table2_ways.CG_ABSOLUTE, table2_ways.CG_RELATIVE):
            job = way.job(subject)
            assert isinstance(job.backward, Implicit)
            assert isinstance(job.backward.method, ReleasedCG if way is table2_ways.CG_ABSOLUTE else NormalCG)
            assert job.tolerance is not None
            assert job.backward.tolerance is not None
            assert job.backward.tolerance.max_steps == job.tolerance.max_steps
            assert not job.settings.fast
            assert job.settings.precision == "fp32"
            caps.append(job.backward.tolerance.max_steps)
    assert caps == [50, 50, 200, 200, 500, 500]
    absolute = table2_ways.CG_ABSOLUTE.job(table2.FULL[0]).backward
    assert isinstance(absolute, Implicit)
    assert absolute.tolerance is not None
    assert (absolute.tolerance.atol, absolute.tolerance.rtol) == (0.1, 0)


def test_as_many_steps_as_the_paper_made_on_cifar10() -> None:
    with_it = [s.data for s in table2.FULL if table2_ways.CG_AS_MANY in table2_ways.ways(s)]
    assert with_it == ["cifar10"]
    printed = table2_ways.PAPER["cifar10", "CG"]
    assert round(table2_notes.printed_steps(table2.FULL[2], printed)) == table2_ways.AS_MANY
    pair = [way.job(table2.FULL[2]) for way in (table2_ways.CG_ABSOLUTE, table2_ways.CG_AS_MANY)]
    assert repr(pair[0].backward).replace("ReleasedCG()", "ReleasedCG(at_least=19)") == repr(pair[1].backward)
    assert replace(pair[0], name="", backward=JFB()) == replace(pair[1], name="", backward=JFB())


def test_cg_as_released_makes_one_step_at_a_tolerance_of_a_tenth(second: Any) -> None:
    """A'g, a product to have its transpose, A'A at the start, 3 A'A of the step; and one to tell the residual."""
    found, _ = second
    for batch_norm in (True, False):
        loose = row_of(found, method=table2_ways.CG["absolute"], steps=STEPS, **{"batch norm in R": batch_norm})
        jfb = row_of(found, method="JFB", steps=STEPS, **{"batch norm in R": batch_norm})
        assert (loose["per image"], jfb["per image"]) == (11, 0)
        assert loose["training loss"] != jfb["training loss"]
        assert jfb["adjoints solved"] is None


def test_as_released_what_is_solved_is_what_was_not_left_out(second: Any) -> None:
    found, _ = second
    for batch_norm in (True, False):
        row = row_of(found, method=table2_ways.CG["absolute"], steps=STEPS, **{"batch norm in R": batch_norm})
        assert row["adjoints solved"] == 1
    epochs: Any = (None, None)
    record = Record(TINY.job("some"), "", epochs, [], Counter({LEFT_OUT: 1, "adjoint CONVERGED": 5}))
    assert table2._solved(table2_ways.CG_ABSOLUTE, record) == 0.75  # 2 epochs of 2 batches
    assert table2._solved(table2_ways.CG_RELATIVE, record) == 1


def test_captured_ways_have_the_gradients_of_jfb_and_of_cg(second: Any) -> None:
    """On a CPU nothing is captured, and JFB by the way of CG is JFB."""
    found, options = second
    ways = {True: table2_ways.JFB_CAPTURED, False: table2_ways.JFB_PLAIN_CAPTURED}
    for batch_norm in (True, False):
        rows = [
            row_of(found, method="JFB", steps=steps, **{"batch norm in R": batch_norm})
            for steps in ("one by one", "captured")
        ]
        assert rows[0]["training loss"] == rows[1]["training loss"]
        again = record_of(ways[batch_norm].job(TINY, seed=1), options)
        both = [rows[0]["clean %"].mean, 100 * again.accuracy]
        assert (rows[0]["clean %"].count, rows[1]["clean %"].count) == (1, 2)  # captured ones have two seeds
        assert rows[1]["clean %"].mean == pytest.approx(sum(both) / 2)
    cg = row_of(found, steps="captured", method=table2_ways.CG["fixed"])
    near = row_of(found, method=table2_ways.CG["relative"], steps=STEPS, **{"batch norm in R": False})
    assert cg["per image"] == 1 + 2 * table2_ways.STEPS
    assert cg["training loss"] == pytest.approx(near["training loss"], rel=1e-3)
    assert cg["training loss"] != rows[1]["training loss"]
    assert cg["ratio, same settings"] == pytest.approx(
        cg["seconds per epoch"].mean / rows[1]["seconds per epoch"].mean
    )


def test_a_relative_tolerance_costs_more_products_and_other_weights(second: Any) -> None:
    found, _ = second
    exact = row_of(found, method=table2_ways.CG["relative"], steps=STEPS, **{"batch norm in R": False})
    jfb = row_of(found, method="JFB", steps=STEPS, **{"batch norm in R": False})
    # One product for the first residual, then two per step of CG, and one for the residual at the end.
    assert exact["per image"] >= 4
    assert exact["J-products per epoch"] == exact["per image"] * 96
    assert exact["training loss"] != jfb["training loss"]
    assert exact["ratio, same settings"] == pytest.approx(
        exact["seconds per epoch"].mean / jfb["seconds per epoch"].mean
    )


def test_what_happens_with_batch_norm_is_said(second: Any) -> None:
    (note,) = [note for note in second[0].notes if note.startswith("digits of the first seed: JFB without")]
    assert note.count("with batch norm, 96 images") == 5
    assert note.count("without batch norm, 96 images") == 9
    assert note.count("captured, with") == 3
    assert note.count("after 1 epochs of JFB, with") == 4
    assert note.count("of adjoints met the tolerance") == 3
    assert note.count("of 2 batches 0 were left out") == 4  # by the test of the released code
    assert note.count("R was scaled down before 2") == 3


def test_late_epochs_go_on_from_those_of_jfb(second: Any) -> None:
    found, options = second
    early, late = (
        row_of(found, method="JFB", steps=steps, **{"batch norm in R": False})
        for steps in (STEPS, "one by one, after 1 epochs of JFB")
    )
    job = table2_ways.JFB_PLAIN_LATE.before(TINY)
    assert job is not None
    assert (job.subset, job.settings.epochs, job.batch_norm) == (None, 1, False)
    assert late["training loss"] < 0.8 * early["training loss"]
    assert late["ratio, same settings"] == 1
    (note,) = [note for note in found.notes if note.startswith("digits: late epochs")]
    assert f"without batch norm {100 * carry_out(job, options).clean.accuracy:.2f}" in note
    cg = row_of(found, method=table2_ways.CG["absolute"], steps=late["steps"])
    jfb = row_of(found, method="JFB", steps=late["steps"], **{"batch norm in R": True})
    assert cg["ratio"] == pytest.approx(cg["seconds per epoch"].mean / jfb["seconds per epoch"].mean)


def test_steps_of_cg_are_told_from_products(second: Any) -> None:
    found, _ = second
    for method, expected in (("absolute", 1), ("as many", 19), ("fixed", table2_ways.STEPS)):
        rows = [row for row in found.rows if row["method"] == table2_ways.CG[method]]
        assert {row["CG steps per image"] for row in rows} == {expected}
    assert {row["CG steps per image"] for row in found.rows if row["method"].startswith("JFB")} == {0}


def test_both_tables_have_headlines(first: Any, second: Any) -> None:
    contents = [
        {"name": found.name, "rows": json.loads(json.dumps(plain(found.rows)))} for found, _ in (first, second)
    ]
    less, resnet, *rest = headlines(contents)  # digits has no printed numbers
    assert "JFB matches its explicit twin" in less["claim"]
    assert "JFB matches ResNet-56" in resnet["claim"]
    one_by_one, norm, captured, late = rest[:6], rest[6], rest[7:9], rest[9:]
    for rows in (one_by_one, captured, late):
        faster, better = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        assert [(row["paper"], row["holds"]) for row in faster] == [(None, None)] * len(faster)
        for row in better:
            assert row["holds"].startswith("yes, at this length") or row["ours"].startswith("-")
            assert ("; with one R" in row["holds"]) <= ("; " in row["ours"])
    assert "batch norm" in norm["claim"]
    assert norm["ours"] == "100.0%"
    assert len(late) == 4
    assert all("after 1 epochs of JFB" in row["claim"] for row in late)


def test_the_slowest_way_has_fewer_images_and_the_notes_say_so() -> None:
    for subject in table2.FULL:
        ways = table2_ways.ways(subject)
        images = {way.tag: way.job(subject).settings.subset for way in ways}
        few = {tag for tag, count in images.items() if count == table2_ways.FEW[subject.data]}
        assert few == {"jfb-few-bn", "cg-absolute-bn", "cg-relative-bn"}
        long = {tag for tag, count in images.items() if count is None}
        assert long == {way.tag for way in ways if way.captured}
        assert {count for tag, count in images.items() if tag not in few | long} == {subject.subset}
        assert f"({table2_ways.FEW[subject.data]:,} for CG" in table2_notes.shortened(subject, ways)[0]


def test_the_parameters_that_a_note_tells_are_those_of_the_network() -> None:
    net: Any = models.build("mnist")
    count = {name: sum(p.numel() for p in getattr(net, name).parameters()) for name in "QRS"}
    assert f"S and Q alone have {count['S'] + count['Q']:,} on MNIST" in table1._TRAINED
    assert f"the twin {sum(count.values()):,}" in table1._TRAINED
