"""`softmaxfree fit`, `validate` and `test`: Lightning's command line with our defaults."""

import logging
import re
import signal
import warnings
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from ..allow_list import DATA, tasks
from ..checkpoint_files import LAST, holds_run, sound_checkpoint
from ..data import ImageData
from ..data.base import Data
from ..environment import largest_memory
from ..errors import UserError, visible
from ..files import write_atomically
from ..imports import MODULES, Names, import_modules, listed
from ..models.checkpoints import check_archive
from ..tasks import Task
from ..usage import usage_error
from .allocator import keep_freed_memory
from .arguments import complete, place_of_mistake, with_classes, with_configuration
from .checkpoint import AtomicCheckpointIO, RunCheckpoint, Stopped
from .folder import RunLock, folder_of_run, name_of_data, name_of_model, refuse_taken, start
from .log import LineLogger, Pace, ProgressBar
from .loop import RunLoop
from .plugins import SynchronisedBatchNorm, cluster
from .report import (
    continued,
    describe_run,
    draw_run,
    example_image,
    leave_traceback,
    next_commands,
    origin,
)
from .restart import join_after_restart
from .resumed import resumption

_NOT_OF_A_RUN = ("checkpoint", "out", "config")
"""Options of one command that are no part of a run's configuration."""


class TrainingCLI(LightningCLI):
    """Lightning's command line for one command, with a folder for the run."""

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
                "use_distributed_sampler": False,  # our loader divides the data
                "enable_model_summary": False,
                "callbacks": [],
            },
            parser_kwargs={
                "prog": f"softmaxfree {command}",
                "exit_on_error": False,
                "allow_abbrev": False,
            },
            args=arguments,
            run=False,  # `execute` does
        )

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--seed_everything", type=int, default=0, help="Seed of all randomness."
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("seed_everything", "model.init_args.seed")
        parser.link_arguments("seed_everything", "data.init_args.seed")
        parser.add_argument("--modules", type=Names, help=MODULES)
        if self.command != "fit":
            parser.add_argument(
                "--checkpoint",
                type=str | None,
                help="Weights to score: softpp_nano.cifar10, a run's folder or checkpoint, a file.",
            )
            return
        parser.add_argument(
            "--checkpoint",
            type=str | None,
            help="Run to go on with: its folder or checkpoint; `last` for that in --out, or none "
            "if that is new.",
        )
        parser.add_argument(
            "--out",
            type=Path | None,
            help="Folder for the run; a new runs/MODEL-DATA if not given.",
        )
        parser.add_argument(
            "--save_every", type=int, default=500, help="Steps between checkpoints."
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        assert isinstance(args, list)
        words = ["--help" if word == "--help_all" else word for word in with_classes(args)]
        try:
            self.config = parser.parse_args(words)
        except ArgumentError as error:
            options = re.findall(r"--([\w.]+)", parser.format_help())
            for part, known in (("model", tasks()), ("data", DATA)):
                options += [f"{part}.{name}" for table in known.values() for name in table]
            raise usage_error(str(error), options, place_of_mistake(str(error), args)) from error

    def before_instantiate_classes(self) -> None:
        config = self.config
        import_modules(config.modules)
        complete(config, self.command)
        if self.command == "fit":
            if config.trainer.default_root_dir:
                raise UserError(
                    "--trainer.default_root_dir has no effect here; give the run's folder by --out"
                )
            self.folder = folder_of_run(config)
            if config.checkpoint == "last":
                config.checkpoint = self.folder / LAST if holds_run(self.folder) else None
        asked = config.trainer.accelerator
        if asked in ("gpu", "cuda", "mps") and not torch.accelerator.is_available():
            raise UserError("torch finds no GPU; use --trainer.accelerator cpu")
        if config.checkpoint:
            config.checkpoint = str(sound_checkpoint(Path(config.checkpoint)))
            check_archive(Path(config.checkpoint))
        trained = config.checkpoint or start(config.model.init_args)
        if self.command != "fit" and not trained:
            raise UserError(
                f"{self.command} would score untrained weights: give --checkpoint WEIGHTS, such as "
                "softpp_nano.cifar10 or a run's folder"
            )

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (ValueError, RuntimeError) as error:
            wrapped = str(error).startswith("Does not validate") and error.__cause__
            cause = error.__cause__ if wrapped else error  # the class's own message
            if "invalid accelerator name" in str(cause):
                raise UserError(
                    f"there is no accelerator {self.config.trainer.accelerator!r}: give "
                    "--trainer.accelerator cpu, gpu or auto"
                ) from error
            if "allocate memory" in str(cause):
                raise UserError(
                    "the model does not fit into this machine's memory: check --model.options"
                ) from error
            raise cause or error from None

    def after_instantiate_classes(self) -> None:
        if self.config.checkpoint:
            self.model.init_checkpoint = None  # the checkpoint has all weights

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        if self.command != "fit":
            plugins = [*_as_list(self.config_init.trainer.plugins), AtomicCheckpointIO()]
            return self._trainer(logger=False, enable_checkpointing=False, plugins=plugins)
        config = self.config
        self.text = _configuration(self.parser, config)
        path = config.checkpoint
        self.resumption = resumption(Path(path), self.text) if path else None
        self.pace = Pace()
        trainer_config = self.config_init.trainer
        ours: dict[str, Any] = {
            "default_root_dir": str(self.folder),
            "plugins": [*_as_list(trainer_config.plugins), AtomicCheckpointIO(), *cluster()],
            "callbacks": [
                *_as_list(trainer_config.callbacks),
                *([ProgressBar()] if trainer_config.enable_progress_bar is not False else []),
                self.pace,
                LambdaCallback(on_fit_start=lambda *_: self.introduce()),
                RunCheckpoint(
                    self.folder,
                    self.model.monitor,
                    config.save_every,
                    self.text,
                    resumed=path == str(self.folder / LAST),
                    record=self.write_record,
                ),
            ],
        }
        if trainer_config.sync_batchnorm:
            ours["sync_batchnorm"] = False  # Lightning's own would drop timm's activations
            ours["plugins"].append(SynchronisedBatchNorm())
        if trainer_config.logger is not False:
            others = [] if trainer_config.logger is True else _as_list(trainer_config.logger)
            begin = self.resumption["step"] if self.resumption else 0
            ours["logger"] = [LineLogger(self.folder, begin or 0), *others]
        trainer = self._trainer(**ours)
        RunLoop.install(trainer)
        return trainer

    def _trainer(self, **ours: Any) -> Trainer:
        try:
            return super().instantiate_trainer(**ours)
        except Exception as error:  # whatever Lightning raises for values of --trainer options
            raise _refusal("no trainer can be built from the --trainer options", error) from error

    def execute(self) -> None:
        """Trains or scores. A bug leaves its traceback in the run's folder."""
        arguments: dict[str, Any] = {
            "datamodule": self.datamodule,
            "ckpt_path": self.config.checkpoint,
            "weights_only": True,  # nothing in a checkpoint is run
        }
        if self.command != "fit":
            score = self.trainer.validate if self.command == "validate" else self.trainer.test
            with _interruptible():
                score(self.model, verbose=False, **arguments)
            self.print_scores()
            return
        lock = RunLock(self.folder) if self.trainer.is_global_zero else None
        try:
            if lock:  # again: another run may have ended here meanwhile
                refuse_taken(self.folder, self.config.checkpoint)
            self.before_fit()
            with _interruptible():
                self.trainer.fit(self.model, **arguments)
                self.after_fit()
        except (UserError, Stopped, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            if self.trainer._checkpoint_connector._loaded_checkpoint:  # its state is being restored
                raise _refusal(f"{self.config.checkpoint} cannot be gone on with", error) from error
            leave_traceback(self.folder, self.trainer.global_rank)
            raise
        finally:
            if lock:
                lock.release()

    def before_fit(self) -> None:
        """Notes when and from what training starts."""
        self.started = perf_counter()
        self.origin = origin()  # now: the working copy may change while the run goes on
        self.origin["start"] = start(self.config.model.init_args) or "scratch"
        if self.resumption:
            folder = Path(self.config.checkpoint).parent
            self.origin, earlier = continued(folder, self.origin, self.resumption)
            self.started -= earlier
        if self.trainer.strategy.root_device.type == "cpu":
            keep_freed_memory()

    def introduce(self) -> None:
        """Says what is trained on which data, after all checks."""
        self.model.take_weights()
        if self.trainer.is_global_zero:
            parameters = sum(parameter.numel() for parameter in self.model.parameters())
            model, data = self.config.model.init_args, self.config.data.init_args
            words = f"training {name_of_model(model)} from {self.origin['start']}"
            if self.resumption:
                folder = Path(self.config.checkpoint).parent
                words = f"resuming {folder} at step {self.resumption['step']}"
            print(
                f"{words} ({parameters / 1e6:.1f} M parameters) on {name_of_data(data)}, "
                f"in {self.folder}"
            )
            if isinstance(self.datamodule, ImageData):
                print("\n".join(self.datamodule.found()))

    def write_record(self, **more: Any) -> None:
        """Writes down what the run is, and its time with that before it was resumed."""
        write_atomically(self.folder / "config.yaml", self.text)
        seconds = perf_counter() - self.started
        describe_run(self.folder, **self.origin, **{"seconds": seconds, **more})

    def after_fit(self) -> None:
        """Scores the run, and prints its scores and where its files are."""
        trainer, data = self.trainer, self.datamodule
        if not isinstance(data, Data):
            return
        if getattr(trainer, "fast_dev_run", False):
            print("one step of training and validation went through")
            return
        seconds = perf_counter() - self.started
        on_gpu = trainer.strategy.root_device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() if on_gpu else largest_memory()
        scores = self.model.closing_scores()
        if not trainer.is_global_zero:
            return
        waiting = self.pace.waited / max(self.pace.seconds, 1e-9)
        broken = len(data.training.broken) if data.training else 0
        self.write_record(
            seconds=seconds,
            seconds_per_step=self.pace.seconds / max(trainer.global_step - self.pace.first_step, 1),
            peak_bytes=peak,
            threads=torch.get_num_threads(),
            data_wait=waiting,
            broken_images=broken,
            scores=scores,
        )
        print(f"\nrun folder     {self.folder}")
        names = ("last.ckpt", "best.ckpt", "config.yaml", "run.json", "metrics.jsonl")
        print(" " * 14, ", ".join(name for name in names if (self.folder / name).exists()))
        image = example_image(data, self.folder)
        print(f"picture        {draw_run(self.folder, self.model.curves, image)}")
        print(f"time           {seconds / 60:.1f} minutes")
        print(f"data waiting   {waiting:.1%} of the time of a step".replace("%", " %"))
        if broken:
            print(f"broken images  {broken}, skipped")
        told = self.config.data.init_args
        where = {name: told.get(name) for name in ("name", "root")}
        commands = next_commands(self.folder, image, listed(self.config.modules), where)
        print("\n".join(self.model.closing_lines(scores)))
        print("\n  ".join(["try next", *commands]) if commands else "")

    def print_scores(self) -> None:
        if self.trainer.is_global_zero:
            for name, value in self.trainer.callback_metrics.items():
                percent, name = "accuracy" in name, visible(name)
                print(f"{name:24}{value * 100:.2f} %" if percent else f"{name:24}{value:.4f}")


def fit(arguments: list[str]) -> None:
    """Train a model."""
    run("fit", arguments)


def validate(arguments: list[str]) -> None:
    """Score a checkpoint on the validation split."""
    run("validate", arguments)


def test(arguments: list[str]) -> None:
    """Score a checkpoint on the test split."""
    run("test", arguments)


def run(command: str, arguments: list[str]) -> None:
    """Runs fit, validate or test. A signal stops it, with its state saved."""
    warnings.filterwarnings("ignore", category=PossibleUserWarning)  # advice on workers and logs
    warnings.filterwarnings("ignore", message=".*LeafSpec", module="lightning")
    warnings.filterwarnings("ignore", message=r".*ckpt_path.*\['RunCheckpoint'\]")  # of scoring
    logging.getLogger("timm.scheduler").setLevel(logging.ERROR)  # advice on one step
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    arguments = with_configuration(command, arguments)
    join_after_restart()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, _terminate)
    try:
        TrainingCLI(command, arguments).execute()
    except MisconfigurationException as error:
        raise UserError(str(error).strip()) from error
    except Stopped as stop:
        print(f"\nsoftmaxfree: {stop}; its state is saved, and --checkpoint last goes on")
        raise SystemExit(stop.exit_code) from None
    finally:
        for number, handler in before.items():  # Lightning ignores SIGINT after the first
            signal.signal(number, handler or signal.SIG_DFL)


def _terminate(number: int, _: FrameType | None) -> None:
    """Ends the process while there is nothing to save. Lightning's handler would only note it."""
    raise SystemExit(128 + number)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lightning ends on Ctrl-C with status 1; main ends with that of the signal."""
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


def _configuration(parser: LightningArgumentParser, config: Namespace) -> str:
    """The whole configuration of the run, as YAML that --config takes."""
    dumped = yaml.safe_load(parser.dump(config, skip_unset=False, format="yaml"))
    kept = {name: value for name, value in dumped.items() if name not in _NOT_OF_A_RUN}
    return yaml.safe_dump(kept, sort_keys=False)


def _refusal(what: str, error: BaseException) -> UserError:
    reason = " ".join(str(error).split())[:300].rstrip(".:")
    kind = "" if isinstance(error, MisconfigurationException) else f"{type(error).__name__}: "
    return UserError(f"{what} ({kind}{reason})")


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
