"""The flags of `banach train`: one per setting, in the groups that --help shows."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_type_hints

import typer

from banach.cli.opened import lenient
from banach.train import Settings, words

METHODS = ("cg", "gmres", "picard", "anderson", "broyden")
IMPLICIT = " | ".join(f"implicit:{method}" for method in METHODS) + ", each [:RTOL[:STEPS]]"
# Every setting is a flag: in groups, what it means, and the name of its value.
FLAGS: dict[str, dict[str, tuple[str, str | None]]] = {
    "Data": {
        "data": ("digits | mnist | svhn | cifar10 | folder:PATH | FILE.npz  [digits]", "NAME"),
        "subset": ("Train on N images, stratified by class.", "N"),
        "whole": ("Train on the validation images too; nothing is validated.", None),
        "augment": (f"{words.AUGMENTS}.", None),
        "normalise": ("Scale pixels to mean 0 and deviation 1; without it to [0, 1].  [on]", None),
    },
    "Network": {
        "model": ("See: banach models.  [the model named like the data]", "NAME"),
        "recipe": ("Settings the model was tuned with; see: banach models NAME.", "NAME"),
        "batch_norm": ("Batch norm in R; without it for Jacobian-based modes.", None),
        "solver": (f"{words.SOLVERS}.  [picard]", None),
        "backward": (f"jfb | neumann:ORDER | unroll:STEPS[:DAMPING] | {IMPLICIT}.  [jfb]", None),
        "eps": ("Stop a solve at a residual of X.", "X"),
        "rtol": ("The residual may also be X times the norm of T(u).  [0]", "X"),
        "norm": (f"Norm of the residual: {words.NORMS}.", None),
        "max_steps": ("Steps of a solve at most; 0 is the explicit twin.", "N"),
    },
    "Training": {
        "epochs": ("Passes over the data.", "N"),
        "batch_size": ("Images per step.", "N"),
        "accumulate": ("A batch goes through the network in N parts, for less memory.  [1]", "N"),
        "optimizer": ("adam | adamw | sgd.", None),
        "lr": ("Learning rate.", "X"),
        "momentum": ("Momentum of sgd.", "X"),
        "weight_decay": ("Added to the gradient; by adamw subtracted from the weights.", "X"),
        "schedule": (f"Of the learning rate: {words.SCHEDULES}.", None),
        "label_smoothing": ("Share of the target that goes to all classes.", "X"),
        "clip": ("Bound on the norm of the gradient.", "X"),
        "ema": ("Decay of averaged weights, which are then evaluated.", "X"),
        "precision": ("fp32 | tf32 | bf16.  [fp32]", None),
        "pretrain": ("The first N steps unroll R ten times instead of solving.  [0]", "N"),
        "tune": ("Let modules choose their step size during training.", None),
        "seed": ("For weights, order and dropout.  [0]", "N"),
    },
    "Penalties": {
        "jacobian_penalty": ("Add X times the mean squared singular value of dT/du.", "X"),
        "finite_difference": ("Compute it by a difference, for an R without second derivatives.", None),
        "correction": ("Add X times the losses at earlier iterates.", "X"),
        "correction_steps": ("Which iterates these are.  [2,5]", "N,N"),
    },
    "Run": {
        "device": ("auto | cpu | cuda | cuda:N.  [auto]", None),
        "threads": ("CPU threads; another number rounds differently.", "N"),
        "fast": ("Captured steps on a GPU, channels_last on a CPU.  [on]", None),
        "compile": ("Compile Q, R and S on a GPU.  [off]", None),
        "sharded": ("With torchrun: shard the weights over the GPUs (FSDP2).  [off]", None),
        "monitor": ("Measure the contraction after every epoch.  [on]", None),
        "checkpoint_every": ("Also checkpoint every N steps.  [0: after epochs only]", "N"),
        "keep": ("Checkpoints to keep besides the best one.  [2]", "N"),
        "on_nonfinite": ("At NaN or infinity: stop | skip | rewind.  [stop]", None),
    },
}


def with_flags(command: Callable[..., int]) -> Callable[..., int]:
    """Replace **flags in the signature, which typer reads, by one option per setting."""
    *parameters, _ = inspect.signature(command, eval_str=True).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    for group, part in FLAGS.items():
        for name, (help, metavar) in part.items():
            made = _option(name, help=help, metavar=metavar, rich_help_panel=group)
            parameters.append(inspect.Parameter(name, keyword, default=None, annotation=made))
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _option(name: str, **options: Any) -> Any:
    kind, word = get_type_hints(Settings)[name], name.replace("_", "-")
    if kind is bool:
        return Annotated[bool | None, typer.Option(f"--{word}/--no-{word}", show_default=False, **options)]
    read = next((one for one in (int, float) if one in (kind, *get_args(kind))), None)
    if read and name not in words.READERS:
        options["parser"] = lenient(read)
    return Annotated[str | None, typer.Option(f"--{word}", show_default=False, **options)]
