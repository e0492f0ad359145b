"""`softmaxfree fit`, `validate` and `test`: Lightning's command line with our defaults."""

import logging
import os
import sys
import warnings
from argparse import RawDescriptionHelpFormatter
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import yaml
from jsonargparse import DefaultHelpFormatter, Namespace
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.layer_sync import LayerSync
from timm.layers import convert_sync_batchnorm
from torch import nn

from ..bench.measure import largest_memory
from ..checkpoint_files import LAST, holds_run, sound_checkpoint
from ..data.module import Data
from ..errors import UserError, visible
from ..files import recipe, write_atomically
from ..models.checkpoints import check_archive
from ..modules import MODULES, Names, import_modules, listed
from ..tasks import Task
from ..tasks.predict import read_run_checkpoint
from ..trust import configuration, read_yaml
from .allocator import keep_freed_memory
from .checkpoint import AtomicCheckpointIO, RunCheckpoint, Stopped
from .lock import RunLock
from .log import LineLogger, Pace, ProgressBar
from .loop import RunLoop
from .report import (
    describe_run,
    draw_run,
    example_image,
    leave_traceback,
    next_commands,
    origin,
    resumptions,
)
from .restart import join_after_restart, restarts
from .resumed import resumption

DESCRIPTIONS = {
    "fit": "Train a model. Without --config it trains softpp_nano on handwritten digits.",
    "validate": "Score a checkpoint on the validation split, at one or several image sizes.",
    "test": "Score a checkpoint on the test split.",
}
_EXAMPLES = """
All that can be set is under trainer (Lightning's Trainer), model (the task) and data:
--print_config shows it with its values. --model.help Classification, Detection, Segmentation or
SequenceClassification and --data.help ImageData, DetectionData, SegmentationData or SequenceData
explain it.

examples:
  softmaxfree fit
  softmaxfree fit --config recipes/cifar10/softpp_nano.yaml --trainer.max_epochs 10
  softmaxfree fit --config recipes/cifar10/softpp_nano.yaml --model.attention softmax
  softmaxfree fit --config recipes/detection/digit_scenes.yaml           boxes and masks
  softmaxfree fit --config recipes/lra/listops.yaml --model.attention soft
  softmaxfree fit --ckpt_path runs/softpp_nano-digits/last.ckpt          go on with a run
  softmaxfree validate --ckpt_path runs/softpp_nano-digits/last.ckpt --data.eval_sizes [32,48,64]
"""
_NOT_OF_A_RUN = ("ckpt_path", "out", "config")
"""What is given for one command, and is no part of a run's configuration."""


class _HelpFormatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the lines of the examples."""


class TrainingCLI(LightningCLI):
    """One subcommand of Lightning's command line, with a folder for the run."""

    def __init__(self, command: str, arguments: list[str]) -> None:
        self.command = command
        super().__init__(
            Task,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            auto_configure_optimizers=False,
            trainer_defaults={
                "max_epochs": 300,
                "use_distributed_sampler": False,  # ours share the data out
                "enable_model_summary": False,
                "callbacks": [],
            },
            parser_kwargs={"prog": "softmaxfree", "formatter_class": _HelpFormatter},
            args=[command, *arguments],
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        return {self.command: super().subcommands()[self.command] | set(self.fixed)}

    @property
    def fixed(self) -> dict[str, bool]:
        """Arguments of Lightning's method that are no options here."""
        safe = {"weights_only": True}  # nothing in a checkpoint is run
        return safe if self.command == "fit" else safe | {"verbose": False}  # printed below

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        return super()._prepare_subcommand_kwargs(subcommand) | self.fixed

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        if "description" in kwargs:  # the subcommand's
            kwargs |= {
                "description": DESCRIPTIONS[self.command],
                "epilog": _EXAMPLES,
                "usage": f"softmaxfree {self.command} [--config FILE] [options]",
            }
        return super().init_parser(**kwargs)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--seed_everything", type=int, default=0, help="What all randomness is a function of."
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("seed_everything", "model.init_args.seed")
        parser.link_arguments("seed_everything", "data.init_args.seed")
        parser.add_argument("--modules", type=Names, help=MODULES)
        if self.command == "fit":
            parser.add_argument(
                "--out",
                type=Path | None,
                help="Folder of the run; runs/MODEL-DATA if not given, numbered if that is taken.",
            )
            parser.add_argument(
                "--save_every", type=int, default=500, help="Steps between two checkpoints."
            )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        assert isinstance(args, list)
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Nothing: the whole configuration is in the checkpoint, and was the default."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.command]
        import_modules(config.modules)
        if self.command == "fit":
            if config.trainer.default_root_dir:
                raise UserError(
                    "--trainer.default_root_dir has no effect here; give the run's folder by --out"
                )
            self.folder = folder_of_run(config)
            if config.ckpt_path == "last":
                config.ckpt_path = self.folder / LAST if holds_run(self.folder) else None
        if config.ckpt_path:
            config.ckpt_path = str(sound_checkpoint(Path(config.ckpt_path)))
            check_archive(Path(config.ckpt_path))
        model = config.model.init_args
        trained = model.get("init_from") or (model.get("options") or {}).get("pretrained")
        if self.command != "fit" and not config.ckpt_path and not trained:
            raise UserError(
                f"{self.command} would score untrained weights: give --ckpt_path FILE, "
                "--model.init_from FILE or --model.options.pretrained true"
            )

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            if str(error).startswith("Does not validate") and error.__cause__:
                raise error.__cause__ from None  # what the class said, without all its arguments
            raise

    def after_instantiate_classes(self) -> None:
        if self.config[self.command].ckpt_path:
            self.model.init_from = None  # the checkpoint has all weights

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        if self.command != "fit":
            return super().instantiate_trainer(logger=False, enable_checkpointing=False)
        config = self.config.fit
        self.text = _configuration(self._parser("fit"), config)
        path = config.ckpt_path
        self.resumption = resumption(Path(path), self.text) if path else None
        self.pace = Pace()
        trainer_config = self.config_init.fit.trainer
        ours: dict[str, Any] = {
            "default_root_dir": str(self.folder),
            "plugins": [*_listed(trainer_config.plugins), AtomicCheckpointIO(), *_cluster()],
            "callbacks": [
                *_listed(trainer_config.callbacks),
                *([ProgressBar()] if trainer_config.enable_progress_bar is not False else []),
                self.pace,
                RunCheckpoint(
                    self.folder,
                    self.model.monitor,
                    config.save_every,
                    self.text,
                    resumed=path == str(self.folder / LAST),
                ),
            ],
        }
        if trainer_config.sync_batchnorm:
            ours["sync_batchnorm"] = False  # Lightning's own would drop timm's activations
            ours["plugins"].append(SynchronisedBatchNorm())
        if trainer_config.logger in (None, True):
            ours["logger"] = LineLogger(self.folder)
        trainer = super().instantiate_trainer(**ours)
        RunLoop.install(trainer)
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        fit = self.command == "fit"
        lock = RunLock(self.folder) if fit and self.trainer.is_global_zero else None
        try:
            if lock and not self.config.fit.ckpt_path:
                refuse_taken(self.folder)  # once more: another run may have ended here meanwhile
            super()._run_subcommand(subcommand)
        except (UserError, Stopped, KeyboardInterrupt):
            raise
        except BaseException:
            if fit:
                leave_traceback(self.folder, self.trainer.global_rank)
            raise
        finally:
            if lock:
                lock.release()

    def before_fit(self) -> None:
        self.started = perf_counter()
        self.origin = origin()  # now: the working copy may change while the run goes on
        if self.trainer.is_global_zero:
            self.origin |= resumptions(self.folder, self.resumption)
            write_atomically(self.folder / "config.yaml", self.text)
            describe_run(self.folder, **self.origin)
        if self.trainer.strategy.root_device.type == "cpu":
            keep_freed_memory()
        if self.trainer.is_global_zero:
            parameters = sum(parameter.numel() for parameter in self.model.parameters())
            model, data = self.config.fit.model.init_args, self.config.fit.data.init_args
            print(
                f"training {_name_of_model(model)} "
                f"({parameters / 1e6:.1f} M parameters) on {_name_of_data(data)}, "
                f"in {self.folder}"
            )

    def after_fit(self) -> None:
        """Scores the run, and says where everything is."""
        trainer, data = self.trainer, self.datamodule
        if not isinstance(data, Data):
            return
        if getattr(trainer, "fast_dev_run", False):
            print("one step of training and validation went through")
            return
        seconds = perf_counter() - self.started  # of this process, where the run was gone on with
        on_gpu = trainer.strategy.root_device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() if on_gpu else largest_memory()
        scores = self.model.closing_scores()
        if not trainer.is_global_zero:
            return
        waiting = self.pace.waited / max(self.pace.seconds, 1e-9)
        broken = len(data.training.broken) if data.training else 0
        describe_run(
            self.folder,
            **self.origin,
            seconds=seconds,
            seconds_per_step=self.pace.seconds / max(trainer.global_step - self.pace.first_step, 1),
            peak_bytes=peak,
            threads=torch.get_num_threads(),
            data_wait=waiting,
            broken_images=broken,
            scores=scores,
        )
        print(f"\nrun folder     {self.folder}")
        print("               last.ckpt, best.ckpt, config.yaml, run.json, metrics.jsonl")
        image = example_image(data, self.folder)
        print(f"picture        {draw_run(self.folder, self.model.curves, image)}")
        print(f"time           {seconds / 60:.1f} minutes")
        print(f"data waiting   {waiting:.1%} of the time of a step".replace("%", " %"))
        if broken:
            print(f"broken images  {broken}, skipped")
        told = self.config.fit.data.init_args
        where = {name: told.get(name) for name in ("name", "root")}
        commands = next_commands(self.folder, image, listed(self.config.fit.modules), where)
        print("\n  ".join(["try next", *commands]) if commands else "")
        print("\n".join(self.model.closing_lines(scores)))

    def after_validate(self) -> None:
        if self.trainer.is_global_zero:
            for name, value in self.trainer.callback_metrics.items():
                percent, name = "accuracy" in name, visible(name)
                print(f"{name:24}{value * 100:.2f} %" if percent else f"{name:24}{value:.4f}")

    after_test = after_validate


class SynchronisedBatchNorm(LayerSync):
    """Batch normalisation over all processes; timm's has an activation in it, which stays."""

    def apply(self, model: nn.Module) -> nn.Module:
        converted: nn.Module = convert_sync_batchnorm(model)
        return converted

    def revert(self, model: nn.Module) -> nn.Module:
        """As it is: outside training nothing is synchronised."""
        return model


def run(command: str, arguments: list[str]) -> None:
    """Runs fit, validate or test; stopping by a signal ends it cleanly."""
    warnings.filterwarnings("ignore", category=PossibleUserWarning)  # advice on workers and logs
    warnings.filterwarnings("ignore", message=".*LeafSpec", module="lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    arguments = _with_configuration(command, _with_sound_checkpoint(arguments))
    join_after_restart()
    try:
        TrainingCLI(command, arguments)
    except MisconfigurationException as error:
        raise UserError(str(error).strip()) from error
    except Stopped as stop:
        print(f"\nsoftmaxfree: {stop}; all of its state is saved, and --ckpt_path last goes on")
        raise SystemExit(stop.exit_code) from None


def _with_configuration(command: str, arguments: list[str]) -> list[str]:
    """The arguments with a configuration: that given, else the checkpoint's, else the digits'."""
    if any(word.split("=")[0] in ("--config", "-c", "--help", "-h") for word in arguments):
        return arguments
    path = _option(arguments, "--ckpt_path")
    if path and path != "last":
        config = _configuration_of_checkpoint(Path(path), command, arguments)
        return ["--config", config, *arguments]
    if command != "fit":
        raise UserError(
            f"{command} needs something to score: give --ckpt_path FILE, or --config FILE"
        )
    return ["--config", str(recipe("digits/softpp_nano.yaml")), *arguments]


def _with_sound_checkpoint(arguments: list[str]) -> list[str]:
    """The arguments with the checkpoint that is taken, where the one given is damaged."""
    path = _option(arguments, "--ckpt_path")
    if not path or path == "last":
        return arguments
    taken = {path: str(sound_checkpoint(Path(path)))}
    taken |= {f"--ckpt_path={old}": f"--ckpt_path={new}" for old, new in taken.items()}
    return [taken.get(word, word) for word in arguments]


def _option(arguments: list[str], name: str) -> str | None:
    for word, following in zip(arguments, [*arguments[1:], ""]):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _configuration_of_checkpoint(path: Path, command: str, arguments: list[str]) -> str:
    """What a run was told, as far as it is plain: nothing is run because a file says so."""
    text = read_run_checkpoint(path).get("config")
    if not isinstance(text, str):
        raise UserError(f"{path} does not say how it was trained: give its --config")
    config = read_yaml(text, path)
    own = listed(config.pop("modules", None))
    if own and not any(word.startswith("--modules") for word in arguments):
        raise UserError(
            f"{path} was trained with modules of your own, which are not imported because a file "
            f"names them: give --modules [{','.join(map(str, own))}]"
        )
    taken, left = configuration(config, path, command, arguments)
    if left:
        print(f"not taken from {path}: {visible(', '.join(left))}", file=sys.stderr)
    return yaml.safe_dump(taken)


def _configuration(parser: LightningArgumentParser, config: Namespace) -> str:
    """Everything that the run was told, as YAML that --config takes."""
    dumped = yaml.safe_load(parser.dump(config, skip_unset=False, format="yaml"))
    kept = {name: value for name, value in dumped.items() if name not in _NOT_OF_A_RUN}
    return yaml.safe_dump(kept, sort_keys=False)


def _cluster() -> list[SLURMEnvironment]:
    """Slurm without Lightning's own answer to its signals; RunCheckpoint has ours."""
    return [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else []


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def folder_of_run(config: Namespace) -> Path:
    """The run's folder, the same for all of its processes."""
    if config.ckpt_path and config.ckpt_path != "last" and not config.out:
        return Path(config.ckpt_path).parent
    by_lightning = "LOCAL_RANK" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    if by_lightning and not config.out and (chosen := os.environ.get("SOFTMAXFREE_RUN")):
        return Path(chosen)  # by the process that started this one
    base = Path(config.out or _name_of_run(config))
    parallel = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))) > 1
    if restarts() and not config.ckpt_path:
        config.ckpt_path = "last"
    if config.out or parallel or config.ckpt_path:
        if not config.ckpt_path:
            refuse_taken(base)
        folder = base
    else:
        numbered = (base.with_name(f"{base.name}-{number}") for number in range(2, 10_000))
        folder = next(path for path in (base, *numbered) if not path.exists())
    os.environ["SOFTMAXFREE_RUN"] = str(folder)
    return folder


def refuse_taken(folder: Path) -> None:
    """Refuses a folder for a new run that has one in it."""
    if holds_run(folder):
        raise UserError(
            f"{folder} holds a run already: give --ckpt_path last to go on with it, "
            "or another folder with --out"
        )


def _name_of_run(config: Namespace) -> str:
    model, data = config.model.init_args, config.data.init_args
    return f"runs/{_name_of_model(model)}-{_name_of_data(data)}"


def _name_of_model(model: Namespace) -> str:
    return str(model.get("backbone") or model.get("attention") or "model")


def _name_of_data(data: Namespace) -> str:
    name = str(data.get("name") or "").strip("/").split("/")[-1]
    return name or Path(data.get("root") or "data").name
