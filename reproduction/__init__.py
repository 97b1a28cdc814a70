"""The paper reproduced with banach: training jobs, studies and the report. Run `python -m reproduction --help`."""

import time

STARTED = time.monotonic()  # before torch is imported: a time budget includes the start of the process
