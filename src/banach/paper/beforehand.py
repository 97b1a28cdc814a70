"""What can be known before hours of work: is the data of all trainings there?"""

from __future__ import annotations

from collections.abc import Iterable

from banach import data
from banach.data.find import find, roots
from banach.paper.jobs import Job
from banach.paper.marks import MARKS
from banach.paper.records import RECORD
from banach.paper.study import Options, Study
from banach.paper.theory_readings import are_alone


def check_data(studies: Iterable[Study], options: Options) -> None:
    """Raises `DataError` where a training that is still to be made would miss its data."""
    wanted = [job for study in studies for job in study.trainings(options) if not _is_kept(job, options)]
    for name in dict.fromkeys(job.data for job in wanted):
        dataset = data.get(name)
        for part in ("train", "test"):
            find(dataset, part, roots(dataset, options.data_dir))


def _is_kept(job: Job, options: Options) -> bool:
    """Has it what a study reads instead of training?"""
    run = options.runs / job.name
    return any((run / name).exists() for name in (MARKS, RECORD)) or are_alone(run)
