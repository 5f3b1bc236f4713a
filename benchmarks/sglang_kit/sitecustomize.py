"""Read by Python at start where this folder is on the path: in the server and in every process that it spawns."""

import stubs

stubs.install()
