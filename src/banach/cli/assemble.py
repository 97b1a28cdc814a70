"""Old place of Settings.load, augmentation, build and tolerance."""

from banach.train.settings import Settings

images, augmentation, network, tolerance, usable_device = (  # TODO(merge): old names
    Settings.load,
    Settings.augmentation,
    Settings.build,
    Settings.tolerance,
    Settings.usable_device,
)
