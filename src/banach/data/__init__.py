"""Data sets as tensors on the training device, and their batches."""

from banach.data.augment import Affine, Augmentation, Chain, Crop, Erase, Flip, paper_cifar10
from banach.data.cifar10 import CIFAR10
from banach.data.dataset import Arrays, DataError, DataSet, cache_dir, fetch, get, load, names, register
from banach.data.digits import DIGITS, MNIST
from banach.data.images import SPLITS, Batches, Images
from banach.data.svhn import SVHN

for _dataset in (DIGITS, MNIST, CIFAR10, SVHN):
    register(_dataset)

__all__ = [
    "SPLITS", "Affine", "Arrays", "Augmentation", "Batches", "Chain", "Crop", "DataError", "DataSet", "Erase",
    "Flip", "Images", "cache_dir", "fetch", "get", "load", "names", "paper_cifar10", "register",
]  # fmt: skip
