"""Data sets as tensors that live on the training device, and their batches."""

from banach.data.affine import Affine
from banach.data.augment import Augmentation, Chain, Crop, Erase, Flip, paper_cifar10
from banach.data.batches import Batches
from banach.data.cifar10 import CIFAR10
from banach.data.dataset import Arrays, DataSet, Download, Known, Layout, get, names, register
from banach.data.digits import DIGITS
from banach.data.error import DataError
from banach.data.fetch import fetch
from banach.data.find import cache_dir
from banach.data.images import Images
from banach.data.load import load
from banach.data.mnist import MNIST
from banach.data.split import SPLITS
from banach.data.svhn import SVHN
from banach.data.verify import Listing, Report, listing, verify

for _dataset in (DIGITS, MNIST, CIFAR10, SVHN):
    register(_dataset)

__all__ = [
    "SPLITS",
    "Affine",
    "Arrays",
    "Augmentation",
    "Batches",
    "Chain",
    "Crop",
    "DataError",
    "DataSet",
    "Download",
    "Erase",
    "Flip",
    "Images",
    "Known",
    "Layout",
    "Listing",
    "Report",
    "cache_dir",
    "fetch",
    "get",
    "listing",
    "load",
    "names",
    "paper_cifar10",
    "register",
    "verify",
]
