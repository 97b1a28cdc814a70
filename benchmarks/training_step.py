"""Training steps and predictions on a GPU, against peers, each contender in its own processes.

Claims: benchmarks/summary.py lists them (PROMISED and others). Settings: one GPU, three processes per contender,
median of their medians and range; peers as users run them and tuned, each in the fastest precision that meets the
tolerance; batches are on the device before the time begins, augmentation included, for all contenders alike.
Result: results/gpu/training-step.jsonl, one line per process, and a summary in training-step.json.

`--seconds N` ends the command in time. The next call goes on where it stopped.
"""

import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path

from banach.provenance import provenance, source_commit
from benchmarks import summary
from benchmarks.jobs import Job, Settings, next_jobs, unknown_name
from benchmarks.processes import Gate, Record, append, read, run_wave
from benchmarks.results import Benchmark, Report

RESERVE = 5.0  # seconds for the summary


def run(settings: Settings) -> Report:
    """Run the jobs that have no record, as many as there is time for, and summarise all records."""
    if (name := unknown_name(settings)) is not None:
        words = f"no job begins with {name}; expected STUDY/POINT/CONTENDER, such as step/mlp/plain"
        print(words, file=sys.stderr)
        raise SystemExit(2)
    folder = settings.work.resolve()
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    start, longest = time.monotonic(), 0.0
    ends = start + settings.seconds - RESERVE
    while jobs := next_jobs(read(settings.records), settings, source_commit()[0]):
        began = time.monotonic()
        if began + longest > ends:
            break
        print(f"{began - start:4.0f} s: {len(jobs)} processes, {jobs[0].name} ...", flush=True)
        died = run_wave({job.name: job.command(settings) for job in jobs}, ends, caches)
        for job in jobs:
            if job.name in died:
                append(settings.records, _stamped(job, settings, {"error": died[job.name]}))
        longest = max(longest, time.monotonic() - began)
    records = read(settings.records)
    left = len(next_jobs(records, settings, source_commit()[0]))
    return summary.report(records, settings.out, "some jobs are left: run the command again" if left else None)


def _stamped(job: Job, settings: Settings, found: Record) -> Record:
    """Return a record with its job and where it was measured."""
    where = provenance(device=settings.device)
    about = {key: where[key] for key in ("date", "commit", "dirty", "device", "cpu")}
    return {"job": job.name, **vars(job), **found, **about, "torch": where["versions"]["torch"]}


def measure_in_process(given: str, *handles: str) -> None:
    """Measure one job in this process and append its record; an exception becomes a record too."""
    from benchmarks.studies import measure

    job, settings = pickle.loads(bytes.fromhex(given))
    began = time.monotonic()
    try:
        found = measure(job, settings, Gate(tuple(map(int, handles))))
    except Exception as error:  # a contender that fails must not end the run of the others
        found = {"error": f"{type(error).__name__}: {str(error).strip()}"[:600]}
    append(settings.records, _stamped(job, settings, found | {"seconds": time.monotonic() - began}))


FEW = Settings(processes=1, at_once=2, steps=2, settle=1, depth_steps=3, curve_steps=4, batches=(1, 3))
QUICK = replace(FEW, compile=False, quick=True, device="cpu", out=Path("build/benchmarks"))
QUESTION = "ms per training step and prediction, against peers"
BENCHMARKS = (Benchmark("training-step", QUESTION, run, Settings(), QUICK, "gpu"),)

if __name__ == "__main__":
    measure_in_process(*sys.argv[1:])
