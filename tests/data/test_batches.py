"""Batches: every image once an epoch, the same after a resume, normalised, nothing asked of the host."""

import pytest
import torch

from banach.data import Affine, Batches, Chain, Crop, Erase, Flip, Images, counter, paper_cifar10


def images(count: int = 53) -> Images:
    """The label of an image is its number, and its pixels tell it too."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (count, 2, 9, 7), generator=generator, dtype=torch.uint8)
    classes = tuple(str(n) for n in range(count))
    return Images(pixels, torch.arange(count), "mine", "Mine", "train", classes, (0.4, 0.5), (0.2, 0.25))


EVERYTHING = Chain(Flip(), Crop(2, 0.449), Erase(), Affine())


def test_an_epoch_has_every_image_once() -> None:
    batches = Batches(images(), 10, seed=3)
    with torch.device("meta"):  # stands for torch.set_default_device("cuda")
        parts = list(batches.epoch(0))
    assert [len(y) for _, y in parts] == [10, 10, 10, 10, 10, 3]
    assert len(batches) == 6
    assert sorted(torch.cat([y for _, y in parts]).tolist()) == list(range(53))
    assert [len(y) for _, y in Batches(images(), 10, drop_last=True).epoch(2)] == [10] * 5
    assert len(Batches(images(50), 10, drop_last=True)) == len(Batches(images(50), 10)) == 5
    with pytest.raises(ValueError, match="whole number, at least 1"):
        Batches(images(), 0)
    with pytest.raises(ValueError, match="53 images make no batch of 54"):
        Batches(images(), 54, drop_last=True)


def test_order_of_an_epoch() -> None:
    shuffled = Batches(images(), 53, seed=3)
    orders = [shuffled.order(epoch).tolist() for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert Batches(images(), 53, seed=4).order(0).tolist() != orders[0]
    plain = Batches(images(), 10, shuffle=False)
    assert torch.cat([y for _, y in plain.epoch(1)]).tolist() == list(range(53))


@pytest.mark.parametrize("start", [0, 5, 6])
def test_a_resumed_epoch_is_bit_equal(start: int) -> None:
    """A new object, as after a new start of the process, with other random numbers drawn in between."""
    whole = list(Batches(images(), 10, seed=7, augment=EVERYTHING).epoch(3))
    torch.manual_seed(start)
    before = torch.random.get_rng_state()
    resumed = list(Batches(images(), 10, seed=7, augment=EVERYTHING).epoch(3, start=start))
    assert torch.equal(torch.random.get_rng_state(), before)  # torch's own generator is not used
    assert len(resumed) == 6 - start
    for (x, y), (other_x, other_y) in zip(whole[start:], resumed, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def test_augmentation_is_applied_to_normalised_images_and_differs_between_batches_epochs_and_seeds() -> None:
    data, seen = images(), []
    for seed, epoch, k in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)):
        batches = Batches(data, 20, seed=seed, augment=Crop(2, fill=0.449))
        key, index = next(batches.drawn(epoch, k))
        x, y = batches.make(index, key)
        assert torch.equal(y, index)
        u = counter.uniform(key, len(index), 2)
        assert torch.equal(x, Crop(2, fill=0.449).apply(data.normalise(data.pixels[index]), u))
        assert (x == torch.tensor(0.449)).any()
        seen.append(u)
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_nothing_is_asked_of_the_host() -> None:
    """On the meta device there are no values to ask for."""
    batches = Batches(images().to("meta"), 10, augment=EVERYTHING)
    index, key = (torch.empty(shape, dtype=torch.int64, device="meta") for shape in ((10,), ()))
    x, y = batches.make(index, key)
    assert (x.shape, y.shape) == ((10, 2, 9, 7), (10,))


@pytest.mark.gpu
def test_a_captured_batch_on_a_gpu() -> None:
    """Replayed with other indices and another key, a CUDA graph gives what the CPU gives."""
    host, device = (Batches(images().to(d), 10, seed=2, augment=EVERYTHING) for d in ("cpu", "cuda"))
    index, key = (torch.zeros(shape, dtype=torch.int64, device="cuda") for shape in ((10,), ()))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which fills the indices
    with torch.cuda.stream(stream):
        device.make(index, key)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x, y = device.make(index, key)
    assert torch.equal(device.order(4).cpu(), host.order(4))
    for (expected, labels), (new_key, new_index) in zip(host.epoch(4), device.drawn(4), strict=True):
        if len(labels) == 10:
            index.copy_(new_index)
            key.copy_(new_key)
            graph.replay()
            assert torch.equal(y.cpu(), labels)
            torch.testing.assert_close(x.cpu(), expected, atol=2e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_host_sync_on_a_gpu() -> None:
    for augment in (EVERYTHING, paper_cifar10()):
        batches = Batches(images().to("cuda"), 10, augment=augment)
        list(batches.epoch(0))
        torch.cuda.set_sync_debug_mode("error")
        try:
            list(batches.epoch(1))
        finally:
            torch.cuda.set_sync_debug_mode("default")
