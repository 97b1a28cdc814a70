"""Training on a GPU: every precision, the same weights as on the CPU, a resume, the peak memory."""

from pathlib import Path

import pytest
import torch

from banach import Tolerance
from banach.data import Batches
from banach.train import Run, fit
from banach.train.fit import _take_step
from banach.train.work import Work
from train.parts_train import images, network, plain_network, settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_every_precision_learns(precision: str) -> None:
    switches = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    net = network(batch_norm=False, tolerance=Tolerance(atol=3e-2, max_steps=20))
    made = settings(precision=precision, device="cuda", epochs=4, ema=0.5)
    history = fit(net, images(), images(20, "validation"), made)
    assert history.last.loss < history.epochs[0].loss
    assert history.last.memory is not None
    assert history.last.memory > 0
    assert next(net.parameters()).dtype == torch.float32
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == switches


def test_the_same_weights_as_on_the_cpu() -> None:
    here, there = plain_network(), plain_network()
    fit(here, images(), images(20, "validation"), settings())
    fit(there, images(), images(20, "validation"), settings(device="cuda"))
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-4, atol=1e-4)  # batches are made in float32


def test_a_resume_on_the_gpu(tmp_path: Path) -> None:
    made = settings(device="cuda", checkpoint_every=4, monitor=True)
    run = Run.create(tmp_path / "run", made)
    whole = plain_network()
    fit(whole, images(), images(20, "validation"), made, run=run)
    last = sorted((run.path / "checkpoints").iterdir())[-1]
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    again = plain_network(seed=9)
    fit(again, images(), images(20, "validation"), made, run=run)
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_the_gpus_random_numbers_stay() -> None:
    net = network()  # seeds the GPU too
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    fit(net, images(), images(20, "validation"), settings(device="cuda", epochs=1))
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_loop_never_waits_for_the_device() -> None:
    # A fixed depth asks for nothing, so any wait is the loop's own, and raises here.
    made = settings(device="cuda", clip=1.0, ema=0.9, label_smoothing=0.1)
    net = plain_network(Tolerance(max_steps=5, check_every=0)).cuda()
    train = images().to("cuda")
    work = Work(net, Batches(train, 16), train, made)
    batches = list(work.remaining())
    _take_step(work, *batches[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[1:]:
            _take_step(work, *batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert work.tally.read().loss > 0
