"""Read by every Python process of the CPU server, because this folder is on PYTHONPATH."""

import torchvision_ops

torchvision_ops.install()
